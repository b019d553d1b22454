"""When sessions return, what their next turn adds, and how long blocks are worth keeping."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .id_map import IdMap, Ids, Numbers, flattened
from .request import Request

KEPT_SECONDS = (60, 120, 300, 600, 1200, 1800, 3600)
BATCH = 2**18
"""Blocks that are collected before they are counted: 2 MiB of ids, large enough to merge."""
REQUEST_BLOCKS = 8
"""Blocks that a collected request counts for beside its own: it takes as much memory."""

Times = npt.NDArray[np.float64]


class KeptCounter:
    """Hits of a cache that keeps each block for some time after its last use, for several times.

    A missed block is stored and used, so the last use of a block is the same for all times. Without
    bounds, a block is kept forever.

    Complexity: O(log² n) per block, amortised. Memory: 16 bytes per distinct block, 9 if no times
    are counted, and twice that while it is merged.
    """

    def __init__(self, seconds: Sequence[float] = KEPT_SECONDS) -> None:
        self.seconds = tuple(seconds)
        self.hits = [0] * len(self.seconds)  # leading blocks of requests used at most that long ago
        self.ideal_hits = 0  # leading blocks of requests that were in an earlier request
        self.blocks = 0
        self._uses = IdMap()

    def add(self, ids: Ids, lengths: Numbers, times: Sequence[float] | Times) -> None:
        """Add the blocks of many requests, and their lengths and arrivals, seconds."""
        self.blocks += len(ids)
        if not len(ids):
            return
        starts = np.cumsum(lengths) - lengths
        now = np.repeat(np.array(times), lengths) if self.seconds else np.zeros(len(ids), np.int8)
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        changes = ordered[1:] != ordered[:-1]
        is_first, is_last = np.append(True, changes), np.append(changes, True)
        before = np.empty(len(ids))
        before[order[1:]] = now[order[:-1]]
        before[order[is_first]] = self._used(ordered[is_first], now[order[is_last]])
        ages = now - before
        for index, seconds in enumerate(self.seconds):
            self.hits[index] += _leading(ages <= seconds, starts, lengths)
        self.ideal_hits += _leading(ages <= math.inf, starts, lengths)

    def _used(self, ids: Ids, times: npt.NDArray[np.generic]) -> Times:
        """Return the last use of sorted, distinct ids, NaN for those without; set new ones."""
        before = np.full(len(ids), np.nan)
        for which, used, places in self._uses.found(ids):
            before[which] = used[places]
            used[places] = times[which]
        is_new = np.isnan(before)
        self._uses.add(ids[is_new], times[is_new])
        return before

    @property
    def unique_blocks(self) -> int:
        """Number of distinct blocks."""
        return len(self._uses)

    @property
    def ratios(self) -> list[float]:
        """The hit ratio for each time."""
        return [hits / self.blocks if self.blocks else 0.0 for hits in self.hits]


def _leading(is_hit: npt.NDArray[np.bool_], starts: Numbers, lengths: Numbers) -> int:
    """Return how many blocks are hit before the first miss of their request."""
    missed = np.append(np.flatnonzero(~is_hit), len(is_hit))
    first_missed = missed[np.searchsorted(missed, starts)]
    return int(np.minimum(first_missed - starts, lengths).sum())


class SessionCounter:
    """The turns and gaps of sessions; requests without a session are skipped.

    Memory: the blocks of the last request of each session, and 16 bytes per request.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Ids]] = {}
        self._turns: dict[str, int] = {}
        self._gaps, self._added = array("d"), array("q")
        self._kept = self._before = 0  # blocks of earlier turns: those that the next repeats, all

    def add(self, request: Request, ids: Ids) -> None:
        """Add a request; `ids` are its blocks, which are copied."""
        session = request.session
        if session is None:
            return
        self._turns[session] = self._turns.get(session, 0) + 1
        if session in self._last:
            time, before = self._last[session]
            shorter = min(len(before), len(ids))
            differing = np.flatnonzero(before[:shorter] != ids[:shorter])
            same = int(differing[0]) if len(differing) else shorter
            self._gaps.append((request.timestamp - time) / 1000)
            self._added.append(len(ids) - same)
            self._kept += same
            self._before += len(before)
        self._last[session] = (request.timestamp, ids.copy())

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return len(self._turns)

    @property
    def turns(self) -> npt.NDArray[np.int64]:
        """``(sessions,)`` requests of each."""
        return np.fromiter(self._turns.values(), np.int64, len(self._turns))

    @property
    def gaps(self) -> Times:
        """Seconds between consecutive requests of a session."""
        return np.array(self._gaps)

    @property
    def added(self) -> npt.NDArray[np.int64]:
        """Blocks of a turn that the previous turn did not have."""
        return np.array(self._added)

    @property
    def kept(self) -> float | None:
        """Share of the blocks of turns that the next turn repeats; None without a next turn."""
        return self._kept / self._before if self._before else None


@dataclass(slots=True)
class Returns:
    """Both counters, for one pass over a trace.

    Memory: that of the counters, and one batch, the requests collected before they are counted.
    """

    sessions: SessionCounter = field(default_factory=SessionCounter)
    blocks: KeptCounter = field(default_factory=KeptCounter)
    counts_sessions: bool = True
    batch: int = BATCH
    has_times: bool = False  # whether a timestamp is not 0
    _requests: list[Request] = field(default_factory=list)
    _gathered: int = 0

    def add(self, request: Request) -> None:
        """Add a request."""
        self._requests.append(request)
        self._gathered += REQUEST_BLOCKS + len(request.hash_ids)
        if self._gathered >= self.batch:
            self.finish()

    def add_each(self, times: Times, ids: Ids) -> None:
        """Add many requests of one block, at times in milliseconds; without sessions."""
        self.finish()
        self.has_times |= bool(times.any())
        self.blocks.add(ids, np.ones(len(ids), np.int64), times / 1000)

    def finish(self) -> None:
        """Count the collected requests."""
        ids, lengths = flattened([request.hash_ids for request in self._requests])
        times = [request.timestamp / 1000 for request in self._requests]
        self.has_times |= any(times)
        self.blocks.add(ids, lengths, times)
        if self.counts_sessions:
            end = 0
            for request in self._requests:
                start, end = end, end + len(request.hash_ids)
                self.sessions.add(request, ids[start:end])
        self._requests.clear()
        self._gathered = 0
