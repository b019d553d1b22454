"""Benchmarks that asv runs; each module imports at any commit."""
