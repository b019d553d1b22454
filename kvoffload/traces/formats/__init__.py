"""The formats of traces, one file per format, and the recognition of a line's format."""

from __future__ import annotations

import re

from kvoffload.traces.errors import BadLineError

from .bailian import BAILIAN
from .base import Format, Parser, json_object
from .hexadecimal import HEXADECIMAL
from .lmcache import LMCACHE
from .mooncake import MOONCAKE

__all__ = ["FORMATS", "MODEL_FORMATS", "Format", "Parser", "recognise"]

FORMATS: dict[str, Format] = {
    found.name: found for found in (MOONCAKE, LMCACHE, BAILIAN, HEXADECIMAL)
}

MODEL_FORMATS = (LMCACHE.name,)
"""Formats whose lines name the model that was asked."""

# Words of eight digits or more: a file of ordinary words is not taken for hashes.
_HASHES = re.compile(rb"(?:(?:0x)?[0-9a-fA-F]{8,}(?:[\s,]+|$))+")


def recognise(line: bytes) -> Format:
    """Return the format of a line; Mooncake's, whose parser reports the error, if it has none."""
    if _HASHES.fullmatch(line):
        return HEXADECIMAL
    try:
        row = json_object(line)
    except BadLineError:
        return MOONCAKE
    if "chunk_hashes" in row:
        return LMCACHE
    return BAILIAN if "chat_id" in row else MOONCAKE
