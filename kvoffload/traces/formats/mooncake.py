"""The Mooncake format: JSON Lines of `timestamp`, `input_length`, `output_length`, `hash_ids`.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation" (FAST'25), and the traces
published with it. Timestamps are in milliseconds. `session` is an addition that some traces make;
any other field is ignored, and of a field given twice the last counts.
"""

from __future__ import annotations

from typing import Annotated, Any

from kvoffload._extras import require
from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import MAX_HASH_ID, MAX_MILLISECONDS, Request

from .base import Format, Parser, field, integer, integer_ids, json_object, number


class MooncakeParser(Parser):
    """A parser of lines in this format: a typed decoder, and a slow check that finds the error."""

    def __init__(self) -> None:
        msgspec = require("msgspec", "reading a trace")
        self._decode = msgspec.json.Decoder(_row_type(msgspec)).decode
        self._faults = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        try:
            row = self._decode(line)
        except self._faults:
            return _checked(line)
        if row.timestamp > MAX_MILLISECONDS:
            return _checked(line)
        if row.hash_ids and max(row.hash_ids) > MAX_HASH_ID:
            return _checked(line)
        session = None if row.session is None else str(row.session)
        return Request(row.timestamp, row.input_length, row.output_length, row.hash_ids, session)


def _row_type(msgspec: Any) -> Any:
    """Return the type for msgspec to decode and check a row."""
    natural = Annotated[int, msgspec.Meta(ge=0)]
    tokens = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    return msgspec.defstruct(
        "Row",
        [
            ("timestamp", natural | Annotated[float, msgspec.Meta(ge=0)]),
            ("input_length", tokens),
            ("output_length", tokens),
            ("hash_ids", tuple[natural, ...]),
            ("session", int | str | None, None),
        ],
        gc=False,
    )


def _checked(line: bytes) -> Request:
    """Parse a line field by field, to report the rule that it breaks and the value."""
    row = json_object(line)
    timestamp = number(field(row, "timestamp"), "timestamp", MAX_MILLISECONDS)
    input_length = integer(field(row, "input_length"), "input_length")
    output_length = integer(field(row, "output_length"), "output_length")
    hash_ids = integer_ids(row)
    session = row.get("session")
    if session is not None and type(session) not in (int, str):
        raise BadLineError(f"session must be a string or an integer, got {describe(session)}")
    session = None if session is None else str(session)
    return Request(timestamp, input_length, output_length, hash_ids, session)


MOONCAKE = Format(
    "mooncake", "JSON Lines with hash_ids, as published with Mooncake", MooncakeParser
)
