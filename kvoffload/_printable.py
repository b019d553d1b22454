"""Untrusted text, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with line breaks, control characters and the like escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
