"""Suites of tests for users' own policies and tiers."""
