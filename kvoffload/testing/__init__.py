"""Suites of tests for what users write themselves."""
