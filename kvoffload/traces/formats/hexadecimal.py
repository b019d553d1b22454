"""Plain text: one request per line, its block hashes in hexadecimal, first block first.

The hashes are separated by blanks or commas, with or without ``0x``. Times and lengths are not
known: they are 0 in every request.
"""

from __future__ import annotations

import re

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import Request

from .base import Format, Parser, hexadecimal_id

_SEPARATORS = re.compile(r"[\s,]+")


class HexadecimalParser(Parser):
    """A parser of lines in this format."""

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        try:
            text = line.decode("ascii")
        except UnicodeDecodeError:
            raise BadLineError(f"must be hexadecimal hashes, got {describe(line)}") from None
        words = [word for word in _SEPARATORS.split(text) if word]
        hash_ids = tuple(
            hexadecimal_id(word, f"hash {position}") for position, word in enumerate(words)
        )
        return Request(0, 0, 0, hash_ids)


HEXADECIMAL = Format(
    "hex",
    "plain text, one request per line of hexadecimal hashes",
    HexadecimalParser,
    has_hashes=True,
)
