"""Tests of the policies, one file a policy, and of what holds for all."""
