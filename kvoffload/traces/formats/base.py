"""What a form of trace is, and what the JSON forms share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvoffload.traces._extras import require
from kvoffload.traces.errors import BadLineError, describe
from kvoffload.traces.request import MAX_TOKENS, Request

Parser = Callable[[bytes], Request]
"""Turns a line, stripped and not blank, into a request, or raises `BadLineError`."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of trace.

    Attributes
    ----------
    name : str
        What ``--format`` calls it.
    summary : str
        What it is, in a line.
    new_parser : callable
        Returns a parser for one pass over one trace; a parser may remember earlier lines.
    """

    name: str
    summary: str
    new_parser: Callable[[], Parser]


def json_object(line: bytes) -> dict[str, Any]:
    """Decode a line that must hold one JSON object.

    Raises
    ------
    BadLineError
        If it does not.
    """
    msgspec = require("msgspec", "reading a trace")
    try:
        row = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadLineError(f"must be a JSON object ({error}), got {describe(line)}") from None
    if not isinstance(row, dict):
        raise BadLineError(f"must be a JSON object, got {describe(row)}")
    return row


def field(row: dict[str, Any], name: str) -> object:
    """Return a field that must be there."""
    if name not in row:
        raise BadLineError(f"must have the field {name}, got only {describe(sorted(row))}")
    return row[name]


def checked_integer(value: object, name: str, largest: int = MAX_TOKENS) -> int:
    """Return a value that must be an integer from 0 to `largest`."""
    if type(value) is not int or not 0 <= value <= largest:
        rule = ">= 0" if type(value) is not int or value < 0 else f"<= {largest}"
        raise BadLineError(f"{name} must be an integer {rule}, got {describe(value)}")
    return value


def checked_number(value: object, name: str) -> int | float:
    """Return a value that must be a number >= 0."""
    if type(value) not in (int, float) or not value >= 0:  # type: ignore[operator]
        raise BadLineError(f"{name} must be a number >= 0, got {describe(value)}")
    return value  # type: ignore[return-value]
