"""Plain text: one request per line, its block hashes in hexadecimal, first block first.

The hashes are separated by blanks or commas, with or without ``0x``. Times and lengths are not
known: they are 0 in every request.
"""

from __future__ import annotations

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import Request

from .base import Format, HexadecimalIds, Parser


class HexadecimalParser(Parser):
    """A parser of lines in this format."""

    def __init__(self) -> None:
        self._ids = HexadecimalIds()

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        try:
            text = line.decode("ascii")
        except UnicodeDecodeError:
            raise BadLineError(f"must be hexadecimal hashes, got {describe(line)}") from None
        words = text.replace(",", " ").split()
        return Request(0, 0, 0, self._ids.of(words, "hash {}"))


HEXADECIMAL = Format("hex", HexadecimalParser, has_hashes=True)
