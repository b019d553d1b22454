"""Benchmarks that asv runs, through public names of the package only.

Each module imports at any commit: it imports the package in `setup`. A name that a commit lacks
raises NotImplementedError there, and asv shows the benchmark as n/a.
"""
