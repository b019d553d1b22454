"""The Mooncake format: JSON Lines of `timestamp`, `input_length`, `output_length`, `hash_ids`.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation" (FAST'25), and the traces
published with it. Timestamps are in milliseconds. The fields of sessions (`session`, `parent`,
`think`, `service`, `stop`, `ends`, `expect`, `type`, `turn`) are an addition that some traces make.
Among the fields that AIPerf 0.13 and Dynamo 1.4 write, `session_id` is the session, and `delay` or
`delay_ms`, plus `tool_wait_ms`, is the wait before a request. A request without a timestamp comes
that long after the end of the requests that `wait_for` names by their `request_id`, else of the
session's previous one. As in Dynamo, `input_tokens`, `output_tokens` and `created_time` are other
names of the lengths and the timestamp; if both are given, the format's own name counts. Contents
that cannot be followed are counted; any other field is ignored, and the last of a repeated field
counts.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Annotated, Any

from kvoffload._extras import require
from kvoffload._printable import plural
from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import MAX_HASH_ID, MAX_MILLISECONDS, Request

from .base import (
    Format,
    Parser,
    bounded_name,
    field,
    integer,
    integer_ids,
    json_object,
    number,
)

ANSWER_MS = 20  # per token, if it is not recorded when a request ended
ALIASES = {
    "timestamp": "created_time",
    "input_length": "input_tokens",
    "output_length": "output_tokens",
}
UNHEEDED = ("branches", "prefix_reset", "tool_events")
# What a field must be, in words, and the types of its values unless it is a number.
WAIT, TOKENS = "a wait", "tokens"
NAME, TEXT, FLAG = "a string or an integer", "a string", "true or false"
NAMES = "a string, an integer or a list of them"
TYPES = {NAME: (int, str), TEXT: (str,), FLAG: (bool,), NAMES: (int, str)}
FIELDS = {
    **dict.fromkeys(("session", "parent", "session_id", "request_id"), NAME),
    **dict.fromkeys(("think", "service", "expect", "delay", "delay_ms", "tool_wait_ms"), WAIT),
    **dict.fromkeys(("stop", "type"), TEXT),
    "turn": TOKENS,
    "ends": FLAG,
    "wait_for": NAMES,
}
OTHER_FIELDS = ("session_id", "request_id", "delay", "delay_ms", "tool_wait_ms", "wait_for")
"""Those of other programs."""
MAX_WAIT_MS = 2**53  # of a wait or an end: the sum of two is still a valid time
REMEMBERED = 2**18  # ends of sessions and of requests, and first ids of sessions, each


class MooncakeParser(Parser):
    """A parser of lines in this format: a typed decoder, and a slow check that finds the error.

    A 16-byte digest and the end are remembered per session and per request that others may wait
    for, and the first id of a `session_id`. The digest is keyed per parser, so that collisions
    cannot be constructed.

    Attributes
    ----------
    has_returns, has_repeats : bool
        Whether a later row of a `session_id` has ids, and whether one repeats its session's first.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._session_ends: dict[bytes, tuple[float, bool]] = {}  # ms; whether it is estimated
        self._request_ends: dict[bytes, tuple[float, bool]] = {}
        self._first_ids: dict[bytes, int] = {}
        self.has_returns = self.has_repeats = False
        self._unheeded = dict.fromkeys(UNHEEDED, 0)
        self._without_time = self._estimated = self._waiting_in_vain = 0
        msgspec = require("msgspec", "reading a trace")
        own, more = _row_types(msgspec)
        self._decode = msgspec.json.Decoder(own).decode
        self._decode_more = msgspec.json.Decoder(more).decode
        self._faults = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        try:
            row = self._decode(line)
        except self._faults:  # a field that is not the format's own, or a fault
            return self._parse_more(line)
        if _is_too_large(row):
            return _checked(line)
        return _request(row, row.timestamp, _name(row.session), row.think)

    def _parse_more(self, line: bytes) -> Request:
        """Parse a line with fields of other programs."""
        try:
            row = self._decode_more(line)
        except self._faults:
            return _checked(line)
        for name, alias in ALIASES.items():
            if getattr(row, name) is None:
                setattr(row, name, getattr(row, alias))
        if row.input_length is None or row.output_length is None or _is_too_large(row):
            return _checked(line)
        session = _name(row.session_id if row.session is None else row.session)
        think, timestamp = row.think, row.timestamp
        delay = row.delay if row.delay_ms is None else row.delay_ms
        if think is None and (delay is not None or row.tool_wait_ms is not None):
            think = (delay or 0) + (row.tool_wait_ms or 0)
        if timestamp is None:
            if think is None and row.wait_for is None:
                return _checked(line)
            timestamp = self._begin(row, session) + (think or 0)
        if row.session_id is not None or row.request_id is not None:
            self._remember(row, session, timestamp)
        if row.session_id is not None and row.session is None and row.hash_ids:
            self._compare(session, row.hash_ids)
        for name in UNHEEDED:
            self._unheeded[name] += getattr(row, name) is not None
        return _request(row, timestamp, session, think)

    @property
    def lists_additions(self) -> bool:
        """Whether sessions return and no later row repeats its session's first id."""
        return self.has_returns and not self.has_repeats

    @property
    def remarks(self) -> list[str]:
        """Contents of the lines so far that could not be followed, in words."""
        found = []
        if self._without_time:
            estimated = f", of {self._estimated:,} after an end estimated at {ANSWER_MS} ms a token"
            found.append(
                f"{plural(self._without_time, 'request')} without a timestamp: it is counted from "
                f"the end of those before{estimated if self._estimated else ''}"
            )
        if self._waiting_in_vain:
            count = plural(self._waiting_in_vain, "request")
            found.append(f"{count} should follow requests that did not come before")
        found += [
            f"{name} of {plural(count, 'request')} is not read"
            for name, count in self._unheeded.items()
            if count
        ]
        return found

    def _begin(self, row: Any, session: str | None) -> float:
        """Return when a request without a timestamp may begin, milliseconds."""
        self._without_time += 1
        if row.wait_for is None:
            ends = [self._session_ends.get(self._digest(session), (0.0, False))]
        else:
            names = row.wait_for if isinstance(row.wait_for, tuple) else (row.wait_for,)
            known = [self._request_ends.get(self._digest(name)) for name in names]
            self._waiting_in_vain += None in known
            ends = [end for end in known if end is not None]
        last, is_estimated = max(ends, default=(0.0, False))
        self._estimated += is_estimated
        return last

    def _remember(self, row: Any, session: str | None, timestamp: float) -> None:
        """Note when a request ends."""
        is_estimated = row.service is None
        service = ANSWER_MS * row.output_length if is_estimated else row.service
        end = min(timestamp + service, MAX_WAIT_MS), is_estimated
        for ends, name in ((self._session_ends, session), (self._request_ends, row.request_id)):
            if name is not None:
                if len(ends) >= REMEMBERED:
                    del ends[next(iter(ends))]
                ends[self._digest(name)] = end

    def _compare(self, session: str | None, hash_ids: tuple[int, ...]) -> None:
        """Note whether a row repeats the first id of its session."""
        digest = self._digest(session)
        first = self._first_ids.get(digest)
        if first is not None:
            self.has_returns = True
            self.has_repeats |= first in hash_ids
        elif len(self._first_ids) < REMEMBERED:
            self._first_ids[digest] = hash_ids[0]

    def _digest(self, name: object) -> bytes:
        return blake2b(str(name).encode(), digest_size=16, key=self._key).digest()


def _is_too_large(row: Any) -> bool:
    """Return whether a row has a number that its type does not bound."""
    return (row.timestamp or 0) > MAX_MILLISECONDS or max(row.hash_ids, default=0) > MAX_HASH_ID


def _request(row: Any, timestamp: float, session: str | None, think: float | None) -> Request:
    return Request(
        timestamp,
        row.input_length,
        row.output_length,
        row.hash_ids,
        session,
        parent=_name(row.parent),
        think=think,
        service=row.service,
        stop=_name(row.stop),
        ends=bool(row.ends),
        expect=row.expect,
        type=_name(row.type),
        turn=row.turn,
    )


def _name(value: int | str | None) -> str | None:
    """Return a name of bounded length; None without one."""
    return None if value is None else bounded_name(str(value))


def _row_types(msgspec: Any) -> tuple[Any, Any]:
    """Return the msgspec types of a row: of this format, and with fields of other programs."""
    natural = Annotated[int, msgspec.Meta(ge=0)]
    tokens = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    time = natural | Annotated[float, msgspec.Meta(ge=0)]
    bounds = msgspec.Meta(ge=0, le=MAX_WAIT_MS)
    types: dict[str, Any] = {
        NAME: int | str,
        WAIT: Annotated[int, bounds] | Annotated[float, bounds],
        TEXT: str,
        TOKENS: tokens,
        FLAG: bool,
        NAMES: int | str | tuple[int | str, ...],
    }
    lengths = [("input_length", tokens), ("output_length", tokens)]
    ids = ("hash_ids", tuple[natural, ...])
    fields = {name: (name, types[kind] | None, None) for name, kind in FIELDS.items()}
    others = [fields.pop(name) for name in OTHER_FIELDS]
    others += [(name, time | None, None) for name in ("timestamp", ALIASES["timestamp"])]
    for name, _ in lengths:
        others += [(each, tokens | None, None) for each in (name, ALIASES[name])]
    others += [(name, Any, None) for name in UNHEEDED]
    own = [("timestamp", time), *lengths, ids, *fields.values()]
    return (
        msgspec.defstruct("Row", own, gc=False, forbid_unknown_fields=True),
        msgspec.defstruct("OtherRow", [ids, *fields.values(), *others], gc=False),
    )


def _checked(line: bytes) -> Request:
    """Parse a line field by field, to report the rule that it breaks and the value."""
    row = json_object(line)
    given = {name: _name_given(row, name) for name in ALIASES}
    time_name, input_name, output_name = given.values()
    timestamp = number(field(row, time_name), time_name, MAX_MILLISECONDS)
    input_length = integer(field(row, input_name), input_name)
    output_length = integer(field(row, output_name), output_name)
    hash_ids = integer_ids(row)
    for name, kind in FIELDS.items():
        if (value := row.get(name)) is not None:
            _check(value, name, kind)
    session = row.get("session", row.get("session_id"))
    return Request(timestamp, input_length, output_length, hash_ids, _name(session))


def _check(value: object, name: str, kind: str) -> None:
    """Check a field of a kind."""
    if kind == WAIT:
        number(value, name, MAX_WAIT_MS)
    elif kind == TOKENS:
        integer(value, name)
    else:
        values = value if kind == NAMES and isinstance(value, list) else [value]
        if not {*TYPES[kind]}.issuperset(map(type, values)):
            raise BadLineError(f"{name} must be {kind}, got {describe(value)}")


def _name_given(row: dict[str, Any], name: str) -> str:
    """Return the name of a field in a row: its own, or the alias if the row has only that."""
    return ALIASES[name] if row.get(name) is None and ALIASES[name] in row else name


MOONCAKE = Format("mooncake", MooncakeParser)
