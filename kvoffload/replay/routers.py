"""Routers, which choose an engine for each request.

A router knows the number of requests of each engine and, if its rule needs one, an index of the
blocks' places. It compares exactly, in whole numbers or fractions.

The rules follow the routers of deployed engines, as far as their documentation and sources describe
them: each class names its model.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import sha256
from operator import add
from typing import TYPE_CHECKING

from kvoffload._checks import check_instance, check_word
from kvoffload.errors import describe
from kvoffload.policies.registry import Option, parse_options

from .index import DEVICE, HOST, TIER, Change, EventIndex, History, Leads
from .requests import Blocks
from .rows import Rows

if TYPE_CHECKING:
    from .configuration import Configuration

__all__ = ["ROUTERS", "Router", "RouterSpec", "parse_router"]

PLACES = {"device": DEVICE, "host": HOST, "tier": TIER}
_PERCENT = 100
_X_BYTES = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """An option whose value is one of a set of words."""

    name: str
    default: str
    words: tuple[str, ...]
    summary: str

    def check(self, value: str) -> str:
        """Return the word; ValueError if it is not one of the set."""
        return check_word(self.name, value, self.words)


Value = int | float | str


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """A router with its given options.

    Attributes
    ----------
    name : str
        The router.
    given : mapping
        The given options, checked.
    """

    name: str
    given: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        options = "&".join(f"{name}={value}" for name, value in self.given.items())
        return f"{self.name}?{options}" if options else self.name

    @property
    def router(self) -> type[Router]:
        """The class of the router."""
        return ROUTERS[self.name]

    @property
    def options(self) -> dict[str, Value]:
        """All options by name, defaults included."""
        return {one.name: one.default for one in self.router.options} | dict(self.given)

    @property
    def sees(self) -> int | None:
        """The furthest place whose events its index receives, or None."""
        return PLACES[str(self.options["sees"])] if "sees" in self.options else None


def parse_router(text: str, argument: str = "router") -> RouterSpec:
    """Read a router: ``name`` or ``name?option=value&option=value``.

    Raises
    ------
    TypeError, ValueError
        If the router is no string; if it or an option is unknown, given twice, malformed or out of
        bounds: the message names the known ones.
    """
    name = check_instance(argument, text, str, "a string").partition("?")[0]
    check_word(argument, name, ROUTERS)
    known_options = {one.name: one for one in ROUTERS[name].options}

    def check(key: str, value: str) -> Value:
        if key not in known_options:
            names = ", ".join(known_options) or "none"
            raise ValueError(f"{name} takes the options {names}, got {describe(key)}")
        return known_options[key].check(value)

    return RouterSpec(name, parse_options(text, argument, check))


def _hashed(text: bytes) -> int:
    """Return the first eight bytes of SHA-256 as a number."""
    return int.from_bytes(sha256(text).digest()[:_X_BYTES], "big")


class Router:
    """A rule that chooses an engine for each arriving request.

    Parameters
    ----------
    rows : Rows
        The requests.
    configuration : Configuration
        The engines, and the router with its options and seed.
    """

    name: str
    summary: str
    options: tuple[Option | Choice, ...] = ()

    def __init__(self, rows: Rows, configuration: Configuration) -> None:
        self.num_engines = configuration.engines
        self.open = [0] * self.num_engines
        """Number of open requests per engine: sent and not finished."""
        self.waiting = [0] * self.num_engines
        """Number of requests per engine whose prefill has not begun."""
        self.sent = [0] * self.num_engines
        """Number of requests sent to each engine so far."""
        self._rows = rows
        self._configuration = configuration
        self._given = configuration.spec.options
        self._set_up()

    def _set_up(self) -> None:
        """Set up the state of the rule from the options."""

    def _number(self, name: str) -> int:
        return int(self._given[name])

    def _in_whole_parts(self, *names: str) -> tuple[list[int], int]:
        """Return options in parts of 1, as whole numbers, and how many parts are 1."""
        values = [Fraction(str(self._given[name])) for name in names]  # as they were written
        parts = math.prod(value.denominator for value in values)
        return [int(value * parts) for value in values], parts

    def route(self, row: int) -> int:
        """Choose the engine of an arriving row, and count the row there."""
        engine = self.choose(row)
        self.open[engine] += 1
        self.waiting[engine] += 1
        self.sent[engine] += 1
        self._note(row, engine)
        return engine

    @abstractmethod
    def choose(self, row: int) -> int:
        """Return the engine for a row."""

    def _note(self, row: int, engine: int) -> None:
        """Handle a row sent to an engine."""

    def begins(self, engine: int) -> None:
        """Handle the beginning of a row's prefill."""
        self.waiting[engine] -= 1

    def prefilled(self, row: int, engine: int) -> None:
        """Handle the end of a row's prefill."""

    def finishes(self, row: int, engine: int) -> None:  # noqa: ARG002 - some want the row
        """Handle the finish of a row."""
        self.open[engine] -= 1

    def hear(self, engine: int, changes: Sequence[Change]) -> None:
        """Handle the changes of an engine's caches by a row; rows come in order."""

    def _least(self, costs: Sequence[int]) -> int:
        """Return the engine with the least cost; ties go to the fewest rows, then the lowest."""
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        equal = (engine for engine, cost in enumerate(costs) if cost == least)
        return min(equal, key=self.sent.__getitem__)


class RoundRobin(Router):
    """A router to each engine in turn."""

    name = "round-robin"
    summary = "each engine in turn"

    def choose(self, row: int) -> int:  # noqa: ARG002
        """Return the engine whose turn it is."""
        return sum(self.sent) % self.num_engines


class RandomRouter(Router):
    """A router to a random engine, with a seed."""

    name = "random"
    summary = "any engine, drawn with --seed"

    def choose(self, row: int) -> int:  # noqa: ARG002
        """Return a random engine."""
        return _hashed(b"%d:%d" % (self._configuration.seed, sum(self.sent))) % self.num_engines


class LeastLoaded(Router):
    """A router to the engine with the fewest open requests, as in vLLM and AIBrix."""

    name = "least-loaded"
    summary = "the engine with the fewest open requests"

    def choose(self, row: int) -> int:  # noqa: ARG002
        """Return the engine with the fewest open requests."""
        return self._least(self.open)


class _Homing(Router):
    """A router of each session to the engine that is chosen at its first request."""

    options = (Option("blocks", 4, 1, 2**31, "the block that stands for a session without a name"),)

    def _set_up(self) -> None:
        self._blocks = self._number("blocks")
        self._homes: dict[bytes, int] = {}

    def choose(self, row: int) -> int:
        """Return the session's engine."""
        key = self._key(row)
        if key not in self._homes:
            self._homes[key] = self._home(key)
        return self._homes[key]

    def _key(self, row: int) -> bytes:
        """Return the identity of a row's session: its name, else the key of a leading block."""
        session = self._rows.sessions[row]
        if session >= 0:
            name: bytes = self._rows.names[session]
            return name
        hashes = self._rows.hashes_of(row)
        return hashes[min(self._blocks, len(hashes)) - 1].hex().encode() if hashes else b""

    @abstractmethod
    def _home(self, key: bytes) -> int:
        """Return the engine for a new session."""


class Session(_Homing):
    """A router of each session to one engine by consistent hashing, as in vLLM's production-stack.

    Rendezvous hashing: Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6(1), 1998.
    """

    name = "session"
    summary = "each session to one engine, by hashing its name"

    def _home(self, key: bytes) -> int:
        every = range(self.num_engines)
        return max(every, key=lambda engine: (_hashed(b"%b:%d" % (key, engine)), -engine))


class Sticky(_Homing):
    """A router of each session to the engine least loaded at its first request, as in llm-d."""

    name = "sticky"
    summary = "each session to the engine that was least loaded when it came"

    def _home(self, key: bytes) -> int:  # noqa: ARG002
        return self._least(self.open)


class _Remembering(Router):
    """A router that remembers the blocks that it has sent to each engine."""

    def _set_up(self) -> None:
        super()._set_up()
        self._history = History(
            self._rows.unique_blocks, self.num_engines, self._number("index_blocks")
        )

    def _blocks(self, row: int) -> Blocks:
        """Return the blocks of a row that count."""
        return self._rows.blocks_of(row)

    def _note(self, row: int, engine: int) -> None:
        self._history.add(engine, self._blocks(row))


class Prefix(_Remembering):
    """A router to the engine last sent the longest known prefix, as in SGLang's router.

    Newer releases of SGLang's router have the defaults 64, 1.5 and .3.
    """

    name = "prefix"
    summary = "the engine that was last sent most of the prompt, unless load differs much"
    options = (
        Option("abs", 32, 0, 2**31, "open requests by which engines must differ to go by load"),
        Option("rel", 1.1, 0.0, 2.0**31, "and the factor by which they must differ"),
        Option("threshold", 0.5, 0.0, 1.0, "share of the prompt above which to go by prefix"),
        Option("index_blocks", 0, 0, 2**31, "blocks remembered of each engine; 0: all"),
    )

    def _set_up(self) -> None:
        super()._set_up()
        self._abs = self._number("abs")
        self._rel = float(self._given["rel"])
        self._threshold = float(self._given["threshold"])

    def choose(self, row: int) -> int:
        """Return the engine by load, by prefix, or with the fewest blocks."""
        least, most = min(self.open), max(self.open)
        if most - least > self._abs and most > least * self._rel:
            return self.open.index(least)
        blocks = self._rows.blocks_of(row)
        if len(blocks):
            lead, engine = self._history.lead_and_engine(blocks)
            if lead / len(blocks) > self._threshold:
                return engine
        sizes = self._history.sizes
        return sizes.index(min(sizes))


class _Scoring(Router):
    """A router that weighs an engine's share of the prompt against its waiting requests."""

    def _score(self, shares: Sequence[int], whole: int) -> int:
        """Return the engine with the best weighted sum of prompt share and short queue.

        `shares` are the engines' shares, and `whole` is the share of the whole prompt.
        """
        least, most = min(self.waiting), max(self.waiting)
        span = most - least or 1
        prefix, queue = self._weights
        by_share, by_wait = prefix * span, queue * whole
        if most == least:
            by_wait = 0
        return self._least(
            [
                -(by_share * share + by_wait * (most - wait))
                for share, wait in zip(shares, self.waiting, strict=True)
            ]
        )

    def _set_up(self) -> None:
        super()._set_up()
        self._weights, _ = self._in_whole_parts("prefix", "queue")


def _weight(name: str, default: float, summary: str) -> Option:
    return Option(name, default, 0.0, 1e6, summary)


class Scored(_Remembering, _Scoring):
    """A router to the best score of history and queue, as in llm-d without engines' events."""

    name = "scored"
    summary = "the best of what was sent to each engine and of its queue"
    options = (
        _weight("prefix", 3.0, "weight of what was sent to the engine"),
        _weight("queue", 2.0, "weight of a short queue"),
        Option("index_blocks", 31_250, 0, 2**31, "blocks remembered of each engine; 0: all"),
        Option("match_blocks", 0, 0, 2**31, "leading blocks that are looked at; 0: all"),
    )

    def _set_up(self) -> None:
        super()._set_up()
        self._match = self._number("match_blocks")

    def _blocks(self, row: int) -> Blocks:
        blocks = self._rows.blocks_of(row)
        return blocks[: self._match] if self._match else blocks

    def choose(self, row: int) -> int:
        """Return the engine with the best score."""
        blocks = self._blocks(row)
        return self._score(self._history.leads(blocks), len(blocks) or 1)


def _hearing(sees: str, ahead: int) -> tuple[Option | Choice, ...]:
    """Return the options of a router that receives events, with these defaults."""
    return (
        Choice("sees", sees, tuple(PLACES), "the furthest place that engines tell of"),
        Option("ahead", ahead, 0, 1, "1: count what is under way as on the device"),
        Option("lag_ms", 0.0, 0.0, 1e9, "milliseconds until an event is heard"),
    )


def _worth(host: float, tier: float) -> tuple[Option, ...]:
    """Return the options of a router that credits engines with blocks, with these defaults."""
    return (
        Option("host", host, 0.0, 100.0, "worth of a block in host memory, of 100"),
        Option("tier", tier, 0.0, 100.0, "worth of a block in the tier, of 100"),
    )


class _Hearing(Router):
    """A router that receives events of the blocks that enter and leave engines' caches."""

    def _set_up(self) -> None:
        super()._set_up()
        tier = self._configuration.tier
        is_shared = tier is not None and tier.kind == "shared"
        self._index = EventIndex(self._rows.unique_blocks, self.num_engines, shared_tier=is_shared)
        self._has_ahead = bool(self._number("ahead"))
        if "host" in self._given:
            self._worth, parts = self._in_whole_parts("host", "tier")
            self._unit = _PERCENT * parts  # the worth of a block on the device

    def _leads(self, row: int) -> Leads:
        """Return the number of a row's leading blocks that each engine has."""
        return self._index.leads(self._rows.blocks_of(row))

    def _credits(self, leads: Leads) -> list[int]:
        """Return the worth of each engine's blocks, in units of 1 / `_unit` of a block."""
        host, tier = self._worth
        return [
            self._unit * near + host * (in_host - near) + tier * (far - in_host)
            for near, in_host, far in zip(*leads, strict=True)
        ]

    def _note(self, row: int, engine: int) -> None:
        if self._has_ahead:
            self._index.send(engine, self._rows.blocks_of(row))

    def hear(self, engine: int, changes: Sequence[Change]) -> None:
        """Handle the changes of an engine's caches by a row."""
        self._index.hear(engine, changes)
        if self._has_ahead:
            self._index.arrive(engine)


class _Promising(_Hearing):
    """A router that counts what each row sent to an engine costs until its prefill ends."""

    def _set_up(self) -> None:
        super()._set_up()
        self._promised = [0] * self.num_engines
        self._share: dict[int, int] = {}  # of each row whose prefill has not ended
        self._new: list[int] = []  # of the row being routed, by engine

    def _note(self, row: int, engine: int) -> None:
        super()._note(row, engine)
        self._share[row] = self._new[engine]
        self._promised[engine] += self._new[engine]

    def prefilled(self, row: int, engine: int) -> None:
        """Subtract what was promised."""
        self._promised[engine] -= self._share.pop(row)


class Events(_Hearing, _Scoring):
    """A router to the best score of caches and queue, as in llm-d with engines' events."""

    name = "events"
    summary = "the best of what each engine has, as it tells, and of its queue"
    options = (
        _weight("prefix", 2.0, "weight of what the engine has"),
        _weight("queue", 1.0, "weight of a short queue"),
        *_worth(80.0, 80.0),
        *_hearing("host", 1),
    )

    def choose(self, row: int) -> int:
        """Return the engine with the best score."""
        blocks = len(self._rows.blocks_of(row)) or 1
        return self._score(self._credits(self._leads(row)), self._unit * blocks)


class Cost(_Promising):
    """A router to the engine with the least to compute and hold, as in Dynamo at temperature 0."""

    name = "cost"
    summary = "the least to compute, as engines tell what they have, and to hold"
    options = (
        _weight("weight", 1.0, "weight of what is to be computed against what is held"),
        *_worth(75.0, 25.0),
        *_hearing("host", 0),
    )

    def _set_up(self) -> None:
        super()._set_up()
        self._blocks = [0] * self.num_engines  # of open rows
        (self._weight,), self._parts = self._in_whole_parts("weight")

    def choose(self, row: int) -> int:
        """Return the engine with the least cost."""
        length, size = int(self._rows.tokens[row]), self._rows.groups.block_tokens
        whole, worth = length * self._unit, self._credits(self._leads(row))
        self._new = [max(0, whole - credit * size) for credit in worth]
        weight, held = self._weight, self._parts * self._unit * size
        return self._least(
            [
                weight * (promised + new) + held * blocks
                for promised, new, blocks in zip(
                    self._promised, self._new, self._blocks, strict=True
                )
            ]
        )

    def _note(self, row: int, engine: int) -> None:
        super()._note(row, engine)
        self._blocks[engine] += len(self._rows.blocks_of(row))

    def finishes(self, row: int, engine: int) -> None:
        """Subtract the held blocks."""
        super().finishes(row, engine)
        self._blocks[engine] -= len(self._rows.blocks_of(row))


class Earliest(_Promising):
    """A router to the engine expected to end the prefill first, as in Mooncake; a reference.

    Qin et al., "Mooncake", FAST 2025, section 6.
    """

    name = "earliest"
    summary = "the engine expected to end the prefill first; a reference"
    options = _hearing("host", 0)

    def choose(self, row: int) -> int:
        """Return the engine expected to end the prefill first."""
        length, size = int(self._rows.tokens[row]), self._rows.groups.block_tokens
        prefill_ns = self._configuration.prefill_ns
        self._new = [
            prefill_ns(max(0, length - far * size), in_host - near, far - in_host)
            for near, in_host, far in zip(*self._leads(row), strict=True)
        ]
        return self._least(list(map(add, self._promised, self._new)))


ROUTERS: dict[str, type[Router]] = {
    router.name: router
    for router in (
        *(RoundRobin, RandomRouter, LeastLoaded, Session, Sticky),
        *(Prefix, Scored, Events, Cost, Earliest),
    )
}
"""The routers by name, in the order of the documentation."""
