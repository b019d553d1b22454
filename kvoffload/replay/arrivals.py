"""Arrivals of a trace's requests: as recorded, or each after its predecessor in the session."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.traces import Request

__all__ = ["Arrivals", "ArrivalsCollector", "Collector", "NoSessionsError", "followers"]

_NANOSECONDS_A_MS = 10**6
_MOST_NS = 2**62
NONE = -1

Times = npt.NDArray[np.int64]


class NoSessionsError(ValueError):
    """A trace has no sessions whose requests could wait for each other."""


@dataclass(frozen=True, slots=True)
class Arrivals:
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
        ValueError
            If a time is 2**62 ns or later.
        TraceError
            As the trace does.
        """
        collector = ArrivalsCollector()
        for request in requests:
            collector.add(request)
        return collector.arrivals()

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

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name: ``Arrivals(**arrivals.arrays())`` equals them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Collector:
    """A pass over a trace that notes the sessions and the times of its requests."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of the sessions
        self._sessions, self._times = array("q"), array("d")  # ms

    def add(self, request: Request) -> None:
        """Note a request."""
        session = request.session
        self._sessions.append(
            NONE if session is None else self._numbers.setdefault(session, len(self._numbers))
        )
        self._times.append(request.timestamp)

    def collecting(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield requests and note them."""
        for request in requests:
            self.add(request)
            yield request


class ArrivalsCollector(Collector):
    """A pass over a trace that finds its `Arrivals`."""

    def __init__(self) -> None:
        super().__init__()
        self._answers = array("q")
        self._think, self._service = array("d"), array("d")  # ms

    def add(self, request: Request) -> None:
        """Note a request."""
        super().add(request)
        self._answers.append(request.output_length)
        self._think.append(math.nan if request.think is None else request.think)
        self._service.append(0 if request.service is None else request.service)

    def arrivals(self) -> Arrivals:
        """Return the arrivals."""
        sessions = np.array(self._sessions, dtype=np.int64)
        recorded, service = _nanoseconds(self._times), _nanoseconds(self._service)
        order = np.lexsort((recorded, sessions))  # stable: equal times are ordered by place
        before, after = followers(sessions, order)
        following, wait = np.full(len(sessions), NONE), np.zeros(len(sessions), dtype=np.int64)
        following[before] = after
        wait[after] = recorded[after] - recorded[before]
        think = np.array(self._think)
        known = after[~np.isnan(think[after])]
        wait[known] = _nanoseconds(think[known])
        answers = np.array(self._answers, dtype=np.int64)
        names = [name.encode("utf-8", "surrogatepass") for name in self._numbers]
        return Arrivals(
            recorded,
            wait,
            service,
            answers,
            following,
            sessions,
            np.frombuffer(b"".join(names), dtype=np.uint8),
            np.cumsum([0, *map(len, names)], dtype=np.int64),
        )


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
        raise ValueError(f"times must be below {_MOST_NS} ns, got {times.max():.0f}")
    return times.astype(np.int64)
