"""Tests of the watch, and what they share."""
