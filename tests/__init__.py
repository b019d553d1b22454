"""Tests of kvoffload; helpers that several groups share stand beside this file."""
