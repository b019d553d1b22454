"""Hints of a trace's clients on their sessions: the time of the return, or the end.

A recorded session shows the hints that its client could have given: the time to its next request,
and its end. Noise, silence and false hints make them realistic. The hints of each request are drawn
once per trace, by session, independently of the replayed policy and capacity.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload import Hints
from kvoffload._checks import check_int, check_word
from kvoffload.errors import describe
from kvoffload.traces import Request

from .arrivals import NONE, Arrays, Collector, followers

__all__ = [
    "HINT_KINDS",
    "HintKind",
    "HintOptions",
    "NothingToldError",
    "Told",
    "TraceHints",
]

HintKind = Literal["ends", "expect", "both"]
HINT_KINDS: tuple[HintKind, ...] = ("ends", "expect", "both")
"""Kinds of hints: the end of a session, the time of its next request, both."""

MOST_NOISE = 1e6
LEAST_MS = 1.0  # the resolution of most traces; shorter times are not expected
LIE_S = 1.0
ROWS_AT_ONCE = 1024  # converted to Python objects

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


class NothingToldError(ValueError):
    """A trace holds no data for hints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintOptions:
    """The hints of a replayed trace's clients, and their quality.

    Attributes
    ----------
    told : str
        ``"ends"``, ``"expect"`` or ``"both"``: the fields of `kvoffload.Hints` that clients fill.
    noise : float
        Factor of the noise, one standard deviation: an expected time is multiplied by exp(n), n
        normal with mean 0 and deviation ln(noise). 1 is without noise, 1e6 the maximum.
    share : float
        Share of the truthful sessions that give hints.
    liars : float
        Share of all sessions that always say 1 second, and never that they end. They are of the
        same source as the others, so that they gain at the expense of these.
    seed : int
        Seed of all draws, which depend only on it and on the session's name.

    Raises
    ------
    TypeError, ValueError
        If a value breaks its rule, or noise or liars are given without expected times.
    """

    told: HintKind
    noise: float = 1.0
    share: float = 1.0
    liars: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_word("told", self.told, HINT_KINDS)
        for name, least, most in (("noise", 1, MOST_NOISE), ("share", 0, 1), ("liars", 0, 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {describe(value)}")
            if not least <= value <= most:
                raise ValueError(f"{name} must be {least:g} ... {most:g}, got {describe(value)}")
        check_int("seed", self.seed, 0)
        if self.told == "ends":
            for name, truth in (("noise", 1), ("liars", 0)):
                if getattr(self, name) != truth:
                    value = getattr(self, name)
                    raise ValueError(f"{name} must go with expect or both, got {value:g} with ends")


class Told(NamedTuple):
    """The hints of one request's client."""

    now_s: float  # its arrival on the trace's clock
    at_begin: Hints | None
    at_finish: Hints | None


@dataclass(frozen=True, slots=True)
class TraceHints(Arrays):
    """The hints of each request of a trace, in order: 18 bytes per request.

    A request that ends its session says so at its finish and gives no time; any other says at its
    beginning when the next is expected.

    Attributes
    ----------
    now_s : (requests,) float64
        Arrival, seconds: the clock of a replay with hints.
    expect_s : (requests,) float64
        Seconds to the session's next request, according to the client; NaN without a hint.
    ends : (requests,) bool
        Whether the client says that the session ends.
    lies : (requests,) bool
        Whether the session is one of the liars.
    """

    now_s: Times
    expect_s: Times
    ends: Flags
    lies: Flags

    @classmethod
    def of(cls, requests: Iterable[Request], options: HintOptions) -> TraceHints:
        """Return the hints of a trace, which is iterated over once.

        An expected time is the request's own `expect`, else the time to the session's next request,
        at least 1 ms. If neither is known and no end is told, for example because a trace was cut
        off, a time is drawn from all known ones: a return that never comes. A session ends with its
        last request if that has `ends`. A request without a session gives only its own hints.

        Raises
        ------
        ValueError
            If the trace holds no data for the requested hints.
        TraceError
            As the trace does.
        """
        return cls.of_collected(Collector(requests), options)

    @classmethod
    def of_collected(
        cls, collector: Collector, options: HintOptions, *, by_arrival: bool = False
    ) -> TraceHints:
        """Return the hints of the requests of a collector, each session's in this order."""
        times, sessions = np.array(collector.times), np.array(collector.sessions)
        order = np.lexsort((times * by_arrival, sessions))  # stable
        before, after = followers(sessions, order)
        gaps = np.full(len(times), np.nan)
        gaps[before] = times[after] - times[before]
        own = np.array(collector.expect)
        gaps = np.where(np.isnan(own), gaps, own)
        ends = np.frombuffer(collector.ends, dtype=np.bool_).copy()
        ends[before] = False
        _check_known(options, gaps, ends)
        gaps = np.maximum(gaps, LEAST_MS) / 1000
        return cls(times / 1000, *_said(collector, options, order, gaps, ends))

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.now_s)

    @property
    def num_expecting(self) -> int:
        """Number of requests with an expected time."""
        return self.num_requests - int(np.isnan(self.expect_s).sum())

    @property
    def num_ending(self) -> int:
        """Number of requests whose client says that the session ends."""
        return int(self.ends.sum())

    def of_each(self, order: Numbers | None = None) -> Iterator[Told]:
        """Yield the hints of each request, or of those at some places of the trace."""
        order = np.arange(self.num_requests) if order is None else order
        for start in range(0, len(order), ROWS_AT_ONCE):
            rows = order[start : start + ROWS_AT_ONCE]
            told = (column[rows].tolist() for column in (self.now_s, self.expect_s, self.ends))
            for now_s, expect_s, ends in zip(*told, strict=True):
                hints = None if math.isnan(expect_s) else Hints(expect_s=expect_s)
                yield Told(now_s, hints, _ENDS if ends else hints)


_ENDS = Hints(ends=True)


def _check_known(options: HintOptions, gaps: Times, ends: Flags) -> None:
    """Raise NothingToldError if the trace has no data for the requested hints."""
    told, count = options.told, len(gaps)
    missing = []
    if told != "expect" and not ends.any():
        missing.append("ends a session")
    if told != "ends" and not (gaps > 0).any():
        missing.append("has a time until the session's next one")
    if len(missing) == (2 if told == "both" else 1):
        raise NothingToldError(
            f"told must be what the trace knows, got {told!r}, and none of {count:,} requests "
            f"{' or '.join(missing)}"
        )


def _said(
    collector: Collector, options: HintOptions, order: Numbers, gaps: Times, ends: Flags
) -> tuple[Times, Flags, Flags]:
    """Return the expected times and the ends that clients say, and who lies.

    `order` is by session.
    """
    names = list(collector.numbers)
    tells_ends, tells_times = options.told != "expect", options.told != "ends"
    known = gaps[~np.isnan(gaps)].tolist()
    deviation = math.log(options.noise)
    expect_s = np.full(len(gaps), np.nan)
    is_ending, is_lying = (np.zeros(len(gaps), dtype=np.bool_) for _ in range(2))
    session, says, lies = None, False, False
    for row in order.tolist():
        number, gap = collector.sessions[row], float(gaps[row])
        if number == NONE and math.isnan(gap) and not ends[row]:
            continue
        if number == NONE or number != session:
            session = number
            name = f"request {row}" if number == NONE else f"session {names[number]}"
            key = f"{options.seed} {name}".encode(errors="surrogatepass")
            dice = random.Random(hashlib.sha256(key).digest())  # noqa: S311
            lies, says = dice.random() < options.liars, dice.random() < options.share
        chosen, wobble = dice.random(), dice.gauss(0, 1)
        if lies:
            expect_s[row], is_lying[row] = LIE_S, True
        elif says and tells_ends and ends[row]:
            is_ending[row] = True
        elif says and tells_times:
            if math.isnan(gap):
                gap = known[int(chosen * len(known))] if known else math.nan
            expect_s[row] = gap * math.exp(deviation * wobble)
    return expect_s, is_ending, is_lying
