"""The forms that traces come in: one file a form, and which one a line is in."""

from __future__ import annotations

import re

from kvoffload.traces.errors import BadLineError

from .bailian import BAILIAN
from .base import Form, Parser, json_object
from .hexadecimal import HEXADECIMAL
from .lmcache import LMCACHE
from .mooncake import MOONCAKE

__all__ = ["FORMS", "Form", "Parser", "recognise"]

FORMS: dict[str, Form] = {form.name: form for form in (MOONCAKE, LMCACHE, BAILIAN, HEXADECIMAL)}

# Words of eight digits or more: a file of ordinary words is not taken for hashes.
_HASHES = re.compile(rb"(?:(?:0x)?[0-9a-fA-F]{8,}(?:[\s,]+|$))+")


def recognise(line: bytes) -> Form:
    """Return the form that a line is in; Mooncake's, which then says what is wrong, if in none."""
    if _HASHES.fullmatch(line):
        return HEXADECIMAL
    try:
        row = json_object(line)
    except BadLineError:
        return MOONCAKE
    if "chunk_hashes" in row:
        return LMCACHE
    return BAILIAN if "chat_id" in row else MOONCAKE
