"""JSON of the rows of logs, which may hold more of it in their texts."""

from __future__ import annotations

import functools
import json
from typing import Any

from kvoffload._extras import require
from kvoffload.traces.errors import BadLineError


@functools.cache
def _codec() -> tuple[Any, Any, tuple[type[Exception], ...]]:
    """Return the decoder, the encoder, and the errors of both."""
    msgspec = require("msgspec", "reading a trace")
    faults = (msgspec.MsgspecError, UnicodeError, RecursionError)
    return msgspec.json.Decoder().decode, msgspec.json.Encoder().encode, faults


def decoded(line: bytes) -> Any:
    """Decode a line; half a pair of surrogates, which is no text but occurs, is kept."""
    decode, _, faults = _codec()
    try:
        return decode(line)
    except faults:
        pass
    try:
        return json.loads(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        found = f"got {len(line)} bytes that are none"
        raise BadLineError(f"must be a JSON object, {found}") from None


def unpacked(text: str) -> Any:
    """Return what a text of JSON holds, else the text."""
    decode, _, faults = _codec()
    try:
        return decode(text)
    except faults:
        return text


def packed(value: Any) -> str:
    """Return a value as JSON."""
    _, encode, _ = _codec()
    try:
        text: str = encode(value).decode()
    except UnicodeError:
        text = json.dumps(value)
    return text
