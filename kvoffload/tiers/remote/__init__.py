"""Tiers on media that other processes share, and that may not answer."""
