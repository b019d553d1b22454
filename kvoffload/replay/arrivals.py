"""Arrivals of a trace's requests: as recorded, or each after its predecessor in the session."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.traces import Request, TraceError

__all__ = ["Arrays", "Arrivals", "Collector", "NoSessionsError", "followers"]

_NANOSECONDS_A_MS = 10**6
_MOST_NS = 2**62
NONE = -1

Times = npt.NDArray[np.int64]


class NoSessionsError(ValueError):
    """A trace has no sessions whose requests could wait for each other."""


class Arrays:
    """A dataclass whose fields are arrays, and optional further parts."""

    __slots__ = ()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name: keyword arguments of its constructor for one that equals it.

        Further parts are left out.
        """
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, slots=True)
class Arrivals(Arrays):
    """The arrival of each request of a trace and its place in its session: 48 bytes per request.

    Attributes
    ----------
    recorded : (requests,) int64
        Recorded arrival, nanoseconds.
    wait : (requests,) int64
        Nanoseconds from the end of the previous request in its session to its arrival: its `think`,
        or, if that is unknown, the recorded time between their arrivals.
    service : (requests,) int64
        Recorded service time, nanoseconds; 0 if unknown.
    answers : (requests,) int64
        Its answer, tokens.
    following : (requests,) int64
        The next request of its session, or -1. Within a session, requests are ordered by arrival,
        then by their place in the trace.
    sessions : (requests,) int64
        Number of its session, from 0 in the order of first appearance; -1 for none.
    names : (n,) uint8
        The names of all sessions in UTF-8, one after the other.
    name_starts : (sessions + 1,) int64
        Start of each name in `names`, then the length of `names`.
    """

    recorded: Times
    wait: Times
    service: Times
    answers: Times
    following: Times
    sessions: Times
    names: npt.NDArray[np.uint8]
    name_starts: Times

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Arrivals:
        """Return the arrivals of a trace, which is iterated over once.

        Raises
        ------
        TraceError
            As the trace does, and if a time is 2**62 ns or later.
        """
        return cls.of_collected(Collector(requests))

    @classmethod
    def of_collected(cls, collector: Collector) -> Arrivals:
        """Return the arrivals of the requests of a collector."""
        sessions = np.array(collector.sessions, dtype=np.int64)
        recorded, service = _nanoseconds(collector.times), _nanoseconds(collector.service)
        order = np.lexsort((recorded, sessions))  # stable: equal times are ordered by place
        before, after = followers(sessions, order)
        following, wait = np.full(len(sessions), NONE), np.zeros(len(sessions), dtype=np.int64)
        following[before] = after
        wait[after] = recorded[after] - recorded[before]
        think = np.array(collector.think)
        known = after[~np.isnan(think[after])]
        wait[known] = _nanoseconds(think[known])
        names = [name.encode("utf-8", "surrogatepass") for name in collector.numbers]
        return cls(
            recorded,
            wait,
            service,
            np.array(collector.answers, dtype=np.int64),
            following,
            sessions,
            np.frombuffer(b"".join(names), dtype=np.uint8),
            np.cumsum([0, *map(len, names)], dtype=np.int64),
        )

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.recorded)

    @property
    def has_sessions(self) -> bool:
        """Whether any session has two requests."""
        return bool((self.following != NONE).any())

    def check_sessions(self) -> None:
        """Raise `NoSessionsError` if no session has two requests."""
        if not self.has_sessions:
            raise NoSessionsError(
                f"the trace must have sessions of several requests, got {self.num_requests:,} "
                "requests without"
            )

    def session_names(self) -> list[bytes]:
        """Return the name of each session, by its number."""
        names = self.names.tobytes()
        return [names[start:end] for start, end in itertools.pairwise(self.name_starts.tolist())]


class Collector:
    """A pass over a trace that notes what arrivals and hints depend on: 49 bytes per request.

    Attributes
    ----------
    numbers : dict
        The number of each session by its name, from 0 in the order of first appearance.
    sessions : array of int
        Number of each request's session, -1 for none.
    answers : array of int
        Its answer, tokens.
    times, think, service, expect : array of float
        Its times, milliseconds; NaN where unknown, 0 for `service`.
    ends : bytearray
        Whether it ends its session.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.numbers: dict[str, int] = {}
        self.sessions, self.answers = array("q"), array("q")
        self.times, self.service = array("d"), array("d")
        self.think, self.expect = array("d"), array("d")
        self.ends = bytearray()
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Note a request."""
        session = request.session
        self.sessions.append(
            NONE if session is None else self.numbers.setdefault(session, len(self.numbers))
        )
        self.answers.append(request.output_length)
        self.times.append(request.timestamp)
        self.service.append(0 if request.service is None else request.service)
        self.think.append(math.nan if request.think is None else request.think)
        self.expect.append(math.nan if request.expect is None else request.expect)
        self.ends.append(request.ends)


def followers(
    sessions: Times, order: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the requests that another of their session follows in an order, and those others.

    `order` is by session.
    """
    before, after = order[:-1], order[1:]
    follows = (sessions[before] == sessions[after]) & (sessions[before] != NONE)
    return before[follows], after[follows]


def _nanoseconds(milliseconds: Any) -> Times:
    """Return times in whole nanoseconds, rounded half to even."""
    times = np.rint(np.array(milliseconds, dtype=np.float64) * _NANOSECONDS_A_MS)
    if times.max(initial=0) >= _MOST_NS:
        rule = f"times must be below {_MOST_NS} ns, got {times.max():.0f}"
        raise TraceError("the trace", None, rule)
    return times.astype(np.int64)
