"""When sessions return, what their next turn adds, and how long blocks are worth keeping."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .request import Request

__all__ = ["KEPT_SECONDS", "KeptCounter", "Returns", "SessionCounter"]

KEPT_SECONDS = (60, 120, 300, 600, 1200, 1800, 3600)

Ids = npt.NDArray[np.uint64]
Times = npt.NDArray[np.float64]


class _LastUses:
    """The time of each id's last use, exact, at 16 bytes per id and up to 32 while it is merged.

    Sorted arrays, each at least twice as long as the next, with a time beside each id.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Ids, Times]] = []

    def replace(self, ids: Ids, times: Times) -> Times:
        """Return the last use of sorted, distinct ids, -inf for those without; set new ones."""
        before = np.full(len(ids), -np.inf)
        for run, used in self._runs:
            positions = np.minimum(np.searchsorted(run, ids), len(run) - 1)
            found = run[positions] == ids
            before[found] = used[positions[found]]
            used[positions[found]] = times[found]
        is_new = np.isneginf(before)
        ids, times = ids[is_new], times[is_new]
        while self._runs and len(self._runs[-1][0]) < 2 * len(ids):
            run, used = self._runs.pop()
            ids, times = np.concatenate((run, ids)), np.concatenate((used, times))
            order = np.argsort(ids, kind="stable")
            ids, times = ids[order], times[order]
        if len(ids):
            self._runs.append((ids, times))
        return before


class KeptCounter:
    """Hits of a cache that keeps each block for some time after its last use, for several times.

    A missed block is stored and used, so the last use of a block is the same for all times.

    Complexity: O(log² n) per block, amortised. Memory: 16 bytes per distinct block, 32 while it is
    merged, and one batch.
    """

    def __init__(self, seconds: Sequence[float] = KEPT_SECONDS, batch: int = 2**18) -> None:
        self.seconds = tuple(seconds)
        self.hits = [0] * len(self.seconds)  # leading blocks of requests used at most that long ago
        self.blocks = 0
        self._batch = batch
        self._uses = _LastUses()
        self._rows: list[tuple[int, ...]] = []
        self._times: list[float] = []
        self._gathered = 0

    def add(self, request: Request) -> None:
        """Add the blocks of a request."""
        if request.hash_ids:
            self._rows.append(request.hash_ids)
            self._times.append(request.timestamp / 1000)
            self._gathered += len(request.hash_ids)
        if self._gathered >= self._batch:
            self.finish()

    def finish(self) -> None:
        """Count the collected blocks."""
        if not self._rows:
            return
        lengths = np.array([len(row) for row in self._rows])
        starts = np.cumsum(lengths) - lengths
        ids = np.concatenate([np.array(row, np.uint64) for row in self._rows])
        now = np.repeat(np.array(self._times), lengths)
        self.blocks += len(ids)
        self._rows.clear()
        self._times.clear()
        self._gathered = 0
        order = np.argsort(ids, kind="stable")
        is_first = np.ones(len(ids), bool)
        is_first[1:] = ids[order][1:] != ids[order][:-1]
        is_last = np.append(is_first[1:], True)
        before = np.empty(len(ids))
        before[order[1:]] = now[order[:-1]]
        before[order[is_first]] = self._uses.replace(ids[order[is_first]], now[order[is_last]])
        ages = now - before
        for index, seconds in enumerate(self.seconds):
            missed = np.where(ages > seconds, np.arange(len(ids)), len(ids))
            first_missed = np.minimum.reduceat(missed, starts)
            self.hits[index] += int(np.minimum(first_missed - starts, lengths).sum())

    @property
    def ratios(self) -> list[float]:
        """The hit ratio for each time."""
        return [hits / self.blocks if self.blocks else 0.0 for hits in self.hits]


class SessionCounter:
    """The turns and gaps of sessions; requests without a session are skipped.

    Memory: the blocks of the last request of each session, and 16 bytes per request.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Ids]] = {}
        self._turns: dict[str, int] = {}
        self._gaps, self._added = array("d"), array("q")
        self._kept = self._before = 0  # blocks of earlier turns: those that the next repeats, all

    def add(self, request: Request) -> None:
        """Add a request."""
        session = request.session
        if session is None:
            return
        ids = np.array(request.hash_ids, np.uint64)
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
        self._last[session] = (request.timestamp, ids)

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
    """Both counters, for one pass over a trace."""

    sessions: SessionCounter = field(default_factory=SessionCounter)
    blocks: KeptCounter = field(default_factory=KeptCounter)
    has_times: bool = False  # whether a timestamp is not 0

    def counting(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield requests and count them."""
        for request in requests:
            self.sessions.add(request)
            self.blocks.add(request)
            self.has_times = self.has_times or bool(request.timestamp)
            yield request
        self.blocks.finish()
