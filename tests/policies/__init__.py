"""Tests of the policies: one file per policy, and those of all."""
