"""The Mooncake format: JSON Lines of `timestamp`, `input_length`, `output_length`, `hash_ids`.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation" (FAST'25), and the traces
published with it. Timestamps are in milliseconds. What sessions have beside (`session`, `parent`,
`think`, `service`, `stop`, `ends`, `expect`) is an addition that some traces make; any other field
is ignored, and of a field given twice the last counts.
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
        if max(row.think or 0, row.service or 0, row.expect or 0) > MAX_MILLISECONDS:
            return _checked(line)
        return Request(
            row.timestamp,
            row.input_length,
            row.output_length,
            row.hash_ids,
            None if row.session is None else str(row.session),
            parent=None if row.parent is None else str(row.parent),
            think=row.think,
            service=row.service,
            stop=row.stop,
            ends=bool(row.ends),
            expect=row.expect,
        )


def _row_type(msgspec: Any) -> Any:
    """Return the type for msgspec to decode and check a row."""
    natural = Annotated[int, msgspec.Meta(ge=0)]
    tokens = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    milliseconds = natural | Annotated[float, msgspec.Meta(ge=0)]
    return msgspec.defstruct(
        "Row",
        [
            ("timestamp", milliseconds),
            ("input_length", tokens),
            ("output_length", tokens),
            ("hash_ids", tuple[natural, ...]),
            ("session", int | str | None, None),
            ("parent", int | str | None, None),
            ("think", milliseconds | None, None),
            ("service", milliseconds | None, None),
            ("stop", str | None, None),
            ("ends", bool | None, None),
            ("expect", milliseconds | None, None),
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
    names: dict[str, str | None] = {}
    for name in ("session", "parent"):
        value = row.get(name)
        if value is not None and type(value) not in (int, str):
            raise BadLineError(f"{name} must be a string or an integer, got {describe(value)}")
        names[name] = None if value is None else str(value)
    times: dict[str, int | float | None] = {}
    for name in ("think", "service", "expect"):
        value = row.get(name)
        times[name] = None if value is None else number(value, name, MAX_MILLISECONDS)
    stop, ends = row.get("stop"), row.get("ends")
    if stop is not None and type(stop) is not str:
        raise BadLineError(f"stop must be a string, got {describe(stop)}")
    if ends is not None and type(ends) is not bool:
        raise BadLineError(f"ends must be true or false, got {describe(ends)}")
    return Request(
        *(timestamp, input_length, output_length, hash_ids, names["session"]),
        parent=names["parent"],
        think=times["think"],
        service=times["service"],
        stop=stop,
        ends=bool(ends),
        expect=times["expect"],
    )


MOONCAKE = Format(
    "mooncake", "JSON Lines with hash_ids, as published with Mooncake", MooncakeParser
)
