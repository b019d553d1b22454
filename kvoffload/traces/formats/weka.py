"""Sessions of coding agents: a JSON object per session, as kv-cache-tester publishes them.

Source: callanjfox/kv-cache-tester and SemiAnalysis' ``cc-traces-weka`` exports. A session has
`requests` in the order of their times `t`, seconds; among them are subagents, each with requests of
its own, up to `MOST_NESTED` deep. `hash_ids` are chained already, and stand for full blocks only.
An id counts together with the model that was asked, and under the scope ``"local"`` with its
session too.

`think_time` is not read: if `api_time` is given it agrees with the times, else it is often longer
than the whole gap.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import MAX_HASH_ID, Request

from .base import (
    MAX_SECONDS,
    Agreed,
    Format,
    Parser,
    are_integers,
    bounded_name,
    integer,
    json_object,
    number,
    text,
)
from .base import field as field_of

MOST_NESTED = 32  # subagents of subagents


@dataclass(slots=True)
class Row:
    """A request of a session, whose time is not known yet."""

    seconds: float  # since the stream's own zero
    marker: float  # where that zero is, seconds since the session's start, if it is the marker's
    request: Request  # its timestamp is ignored


@dataclass(slots=True)
class Session:
    """A session: the rows of its streams, and how their times count."""

    rows: list[Row] = field(default_factory=list)
    counts_from_markers: bool = False  # a nested time is before its marker's


@dataclass(slots=True)
class _Stream:
    """The requests of one agent in a session."""

    name: str
    parent: str | None
    marker: float
    depth: int


class WekaParser(Parser):
    """A parser of sessions.

    Parameters
    ----------
    block_tokens : int or None
        Tokens of the blocks to make: a multiple of each session's; None: as they are.
    shared_prompts : bool
        Whether the leading blocks of tools and system prompt are the same in all sessions with
        equal token counts of both.
    """

    def __init__(self, block_tokens: int | None, *, shared_prompts: bool) -> None:
        self.block_tokens = self._wanted_tokens = block_tokens
        self._shared_prompts = shared_prompts
        self._tokens = Agreed()

    def session(self, line: bytes) -> Session:
        """Parse a session.

        Raises
        ------
        BadLineError
            If it breaks a rule of the format.
        """
        given = json_object(line)
        size = integer(field_of(given, "block_size"), "block_size", least=1)
        tokens = self._wanted_tokens or size
        if tokens % size:
            raise BadLineError(f"block_size must divide {tokens} tokens, got {size}")
        scope = given.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise BadLineError(f"hash_id_scope must be local or global, got {describe(scope)}")
        name = text(field_of(given, "id"), "id")
        reader = _SessionReader(size, tokens // size, name if scope == "local" else None)
        if self._shared_prompts:
            reader.share(given)
        session = Session()
        reader.read(given, _Stream(name, None, 0.0, 0), session)
        self.block_tokens = self._tokens.with_one(tokens)
        return session


class _SessionReader:
    """The reader of one session."""

    def __init__(self, size: int, merged: int, scope: str | None) -> None:
        self._size = size
        self._merged = merged  # ids of the session in a block
        self._scope = scope
        self._before: dict[tuple[str, int], int] = {}  # the id before each id
        self._prompt: tuple[str, int] | None = None  # of shared blocks: the name, how many
        self._first: tuple[str, list[int]] | None = None  # the first row's model and blocks
        # By model: the ids of its latest row, most of which the next repeats, and their blocks.
        self._latest: dict[str, tuple[list[int], list[int]]] = {}

    def share(self, given: dict[str, Any]) -> None:
        """Treat the leading blocks of tools and system prompt as those of every session."""
        tools = integer(given.get("tool_tokens", 0), "tool_tokens")
        system = integer(given.get("system_tokens", 0), "system_tokens")
        self._prompt = f"{tools} {system}", (tools + system) // (self._size * self._merged)

    def read(self, given: dict[str, Any], stream: _Stream, session: Session) -> None:
        """Read a stream, then those of its subagents."""
        listed = field_of(given, "requests")
        if not isinstance(listed, list):
            raise BadLineError(f"requests must be a list of objects, got {describe(listed)}")
        rows: list[Row] = []
        nested: list[tuple[dict[str, Any], _Stream]] = []
        last_end: float | None = None
        for row in listed:
            if not isinstance(row, dict):
                raise BadLineError(f"requests must be a list of objects, got {describe(row)}")
            seconds = float(number(field_of(row, "t"), "t", MAX_SECONDS))
            if row.get("type") == "subagent":
                nested.append((row, self._subagent(row, stream, seconds)))
                continue
            if rows and seconds < rows[-1].seconds:
                raise BadLineError(f"t must be >= {rows[-1].seconds}, got {seconds}")
            if not rows and seconds < stream.marker:
                session.counts_from_markers = True
            think = None if last_end is None else max(0, round(1000 * (seconds - last_end)))
            service = row.get("api_time")
            if service is not None:
                service = number(service, "api_time", MAX_SECONDS)
            last_end = seconds + (service or 0.0)
            rows.append(Row(seconds, stream.marker, self._request(row, stream, think, service)))
        session.rows += rows
        for row, its in nested:
            self.read(row, its, session)

    def _subagent(self, row: dict[str, Any], stream: _Stream, seconds: float) -> _Stream:
        agent = text(field_of(row, "agent_id"), "agent_id")
        if stream.depth >= MOST_NESTED:
            raise BadLineError(f"subagents must be at most {MOST_NESTED} deep, got another")
        name = bounded_name(f"{stream.name}/{agent}")
        return _Stream(name, stream.name, stream.marker + seconds, stream.depth + 1)

    def _request(
        self, row: dict[str, Any], stream: _Stream, think: int | None, service: float | None
    ) -> Request:
        model, stop = text(field_of(row, "model"), "model"), row.get("stop")
        length = integer(field_of(row, "in"), "in")
        return Request(
            0,
            length,
            integer(field_of(row, "out"), "out"),
            self._blocks(row, length, model, is_nested=stream.depth > 0),
            stream.name,
            parent=stream.parent,
            think=think,
            service=None if service is None else round(1000 * service),
            stop=None if stop is None else text(stop, "stop"),
        )

    def _blocks(
        self, row: dict[str, Any], length: int, model: str, *, is_nested: bool
    ) -> tuple[int, ...]:
        """Return the ids of a row's blocks."""
        ids = field_of(row, "hash_ids")
        if not isinstance(ids, list):
            raise BadLineError(f"hash_ids must be a list of integers, got {describe(ids)}")
        if len(ids) != length // self._size:
            raise BadLineError(f"hash_ids must be {length // self._size} ids, got {len(ids)}")
        known, digests = self._latest.get(model, ([], []))
        same = _num_equal(ids, known) if are_integers(ids) else 0
        before = ids[same - 1] if same else -1
        for index, hash_id in enumerate(itertools.islice(ids, same, None), same):
            integer(hash_id, f"hash_ids[{index}]", largest=MAX_HASH_ID)
            if self._before.setdefault((model, hash_id), before) != before:
                raise BadLineError(f"hash_ids[{index}] must follow one id, got {hash_id} twice")
            before = hash_id
        blocks = ids[self._merged - 1 :: self._merged]
        digests = digests[: same // self._merged]
        digests += _digests(self._scope, model, blocks[len(digests) :])
        self._latest[model] = ids, digests
        shared = 0 if is_nested else self._num_shared(model, blocks)
        return *_digests("shared", self._prompt, range(shared)), *digests[shared:]

    def _num_shared(self, model: str, blocks: list[int]) -> int:
        """Return how many leading blocks are those of every session's prompt."""
        if self._prompt is None:
            return 0
        if self._first is None:
            self._first = model, blocks[: self._prompt[1]]
        first_model, first = self._first
        return _num_equal(blocks, first) if model == first_model else 0


def _num_equal(one: list[int], other: list[int]) -> int:
    """Return how many leading items are equal."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(itertools.compress(itertools.count(), map(operator.ne, one, other)))


def _digests(scope: str | None, name: object, numbers: Iterable[int]) -> list[int]:
    """Return ids of 63 bits for numbered blocks; the same in every file."""
    start = repr((scope, name)).encode().removesuffix(b")")
    return [
        int.from_bytes(blake2b(b"%b, %d)" % (start, number), digest_size=8).digest(), "big") >> 1
        for number in numbers
    ]


WEKA = Format("weka", has_hashes=True)
