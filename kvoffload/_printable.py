"""Untrusted text, made safe to print; and counts with their noun."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with line breaks, control characters and the like escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def plural(count: int, noun: str) -> str:
    """Return a count as in ``1 block`` or ``2,000 blocks``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
