"""The jobs of a tier: numbers, room in the queue, breakers, and ends.

Structure
    A job that needs I/O is submitted to the `Pool`, with a `Record` until it settles.
    `Jobs.collect` processes the pool's entries in the caller's thread: it makes a `Done` when a job
    ends, and notifies the tier's `Catalog` when it settles.
Invariants
    Every job whose number was returned gives exactly one `Done`. A record is kept from before the
    submission to the settling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Done, Operation, Status
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.metrics import Events, TierMetrics
from kvoffload.tiers.native import require_extensions
from kvoffload.tiers.options import TierOptions

from .breaker import Breaker
from .contract import CHORE, ENDED, LATE, QUERY, READ, SETTLED, WRITE, Catalog, Pool

__all__ = ["QUERY_DEADLINE_S", "Jobs", "Record"]

QUERY_DEADLINE_S = 0.1
MAX_QUEUED_KEYS = 100_000
"""Most keys that the queries under way ask for together."""
LEAST_QUEUED_KEYS = 16
"""Least number of keys that a query is counted as, for its memory besides the keys."""

_ANSWERED = (Status.OK, Status.CORRUPT, Status.MISS)
"""Statuses that show an answer of the medium."""
_FAILING = (Status.TIMEOUT, Status.UNAVAILABLE, Status.FAILED)
_KINDS = {"get": READ, "put": WRITE, "query": QUERY}


@dataclass(slots=True, eq=False)
class Record:
    """A job in the pool, with `m` blocks that move, of `n` keys."""

    job: int  # its id
    op: Operation
    started: float  # when it was submitted, seconds
    status: npt.NDArray[np.int8]  # (n,); those of blocks that move are filled in at the end
    positions: npt.NDArray[np.int64] | None  # (m,) in `status`, those that move; None: all
    keys: list[bytes]  # m stored keys
    slots: npt.NDArray[np.int64]  # (m,): where they are in the store
    forgets: int  # those of the catalog when it was submitted
    generation: int  # the number of that at the submission
    has_ended: bool = False  # its blocks are the caller's again
    has_failed: bool = False  # it was counted as a failure


class Jobs:
    """The jobs of one tier.

    Parameters
    ----------
    options : TierOptions
        The tier's.
    block_bytes : int
        Bytes per block.
    is_shared : bool
        Whether the medium is shared over a network. A job without an answer by its deadline then
        opens the breaker at once, since every further one would also cost its deadline.

    Attributes
    ----------
    generation : Generation
        The present one; `Tier.forget` sets another.

    Notes
    -----
    Thread-safety: callers serialise. Complexity: O(n) in the blocks of a job.
    """

    def __init__(self, options: TierOptions, block_bytes: int, *, is_shared: bool = False) -> None:
        require_extensions()  # the pool's
        self.options = options
        self.generation = Generation.of(options.generation)
        self.block_bytes = block_bytes
        self.pool: Pool | None = None  # once there is a region
        self.reads = Breaker()  # whether the medium is asked
        self.writes = Breaker()
        self.metrics = TierMetrics()
        self.events = Events(self.metrics, are_kept=options.enable_events)
        self.records: dict[int, Record] = {}  # of jobs that have not settled, by id
        self._is_shared = is_shared
        self._last_id = 0
        self._done: list[Done] = []  # those that `take_done` has not returned
        self._chores: dict[int, Callable[[int], None]] = {}
        self._queued_bytes = 0
        self._queued_keys = 0

    # -- the beginning -----------------------------------------------------------------------

    def new_id(self) -> int:
        """Return the id of a new job."""
        self._last_id += 1
        return self._last_id

    def room(self) -> int:
        """Return how many blocks the queue has room for."""
        return max(0, (self.options.max_queued_bytes - self._queued_bytes) // self.block_bytes)

    def room_for_keys(self) -> int:
        """Return how many more keys queries may ask for."""
        return max(0, MAX_QUEUED_KEYS - self._queued_keys)

    def breaker(self, op: Operation) -> Breaker:
        """Return the breaker of an operation."""
        return self.writes if op == "put" else self.reads

    def submit(self, record: Record, ids: npt.NDArray[np.int64], timeout_s: float) -> None:
        """Pass a job's blocks to the pool; `timeout_s` counts from the beginning of the call."""
        self.records[record.job] = record
        self._queue(record, 1)
        self._pool().submit(
            record.job,
            _KINDS[record.op],
            record.keys,
            record.slots,
            ids,
            timeout_s=max(0.0, timeout_s - (time.monotonic() - record.started)),
            generation=record.generation,
        )

    def chore(self, done: Callable[[int], None], kind: int, data: bytes) -> None:
        """Have a thread do a chore; call `done` with its status when it is collected.

        `kind` and `data` are those of `Pool.chore`: for a file, an offset and the bytes to write
        there.
        """
        chore_id = self.new_id()
        self._chores[chore_id] = done
        self._pool().chore(chore_id, kind, data)

    def finish_at_once(
        self, job: int, op: Operation, started: float, status: npt.NDArray[np.int8]
    ) -> None:
        """Make the `Done` of a job that needs no I/O."""
        self._finish(job, op, started, status, 0)
        self._pool().notify()

    def _pool(self) -> Pool:
        if self.pool is None:
            raise RuntimeError(f"tier {self.options.name!r} has no region: call attach() first")
        return self.pool

    def _queue(self, record: Record, sign: int) -> None:
        """Count a job's share of the queue."""
        if record.op == "query":
            self._queued_keys += sign * max(LEAST_QUEUED_KEYS, len(record.keys))
        else:
            self._queued_bytes += sign * len(record.keys) * self.block_bytes

    # -- the end -----------------------------------------------------------------------------

    def collect(self, catalog: Catalog) -> None:
        """Process the entries of the pool."""
        entries = self._pool().poll()
        while entries:
            job, flags, statuses = entries.popleft()
            if flags & CHORE:
                self._chores.pop(job)(int(statuses[0]))
            else:
                self._take_in(self.records[job], flags, statuses, catalog)

    def take_done(self) -> list[Done]:
        """Return the jobs that ended since the last call, in the order in which they ended."""
        done, self._done = self._done, []
        return done

    def has_done(self) -> bool:
        """Return whether `take_done` has something to return."""
        return bool(self._done)

    def have_ended(self, jobs: Collection[int]) -> bool:
        """Return whether jobs have ended; unknown ones count as ended."""
        records = self.records
        return all(job not in records or records[job].has_ended for job in jobs)

    def gauges(self) -> dict[str, int]:
        """Return present sizes."""
        return {
            "queued_bytes": self._queued_bytes,
            "unsettled_jobs": len(self.records) + len(self._chores),
        }

    def _take_in(
        self, record: Record, flags: int, statuses: npt.NDArray[np.int8], catalog: Catalog
    ) -> None:
        """Process an entry of the pool."""
        if flags & LATE:
            self._trip(record)
            return
        counts: list[int] = np.bincount(statuses, minlength=len(Status)).tolist()
        if flags & ENDED:
            record.has_ended = True
            self._queue(record, -1)
            self._end(record, statuses, counts, catalog)
        if flags & SETTLED:
            del self.records[record.job]
            self._count(record, counts)
            catalog.settle(record, statuses, counts)

    def _end(
        self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int], catalog: Catalog
    ) -> None:
        """Make the `Done` of a job that moved blocks or asked for them."""
        self._blame_silence(record, counts)
        if not record.has_failed and not _any(counts, _ANSWERED) and _any(counts, _FAILING):
            record.has_failed = True
            self.breaker(record.op).fail()
        nbytes = 0 if record.op == "query" else counts[Status.OK] * self.block_bytes
        if record.op != "put" and catalog.is_stale(record):
            # blocks forgotten meanwhile are not served
            statuses = np.where(statuses == Status.OK, np.int8(Status.MISS), statuses)
        if record.positions is None:
            record.status = statuses
        else:
            record.status[record.positions] = statuses
        self._finish(record.job, record.op, record.started, record.status, nbytes)

    def _finish(
        self, job: int, op: Operation, started: float, status: npt.NDArray[np.int8], nbytes: int
    ) -> None:
        """Make the `Done` of a job."""
        seconds = time.monotonic() - started
        self._done.append(Done(job, op, status, nbytes, seconds))
        self.metrics.count(op, np.bincount(status, minlength=len(Status)).tolist())
        self.metrics.nbytes[op] += nbytes
        self.metrics.observe(op, seconds)

    def _count(self, record: Record, counts: list[int]) -> None:
        """Count the results of a job, and report them to its breaker."""
        self._blame_silence(record, counts)
        breaker = self.breaker(record.op)
        if record.op == "put":
            self.metrics.count("store", counts)
        elif record.op == "get":
            breaker.count_corrupt(counts[Status.CORRUPT], counts[Status.OK])
        if _any(counts, _ANSWERED):
            breaker.succeed()
        elif not record.has_failed:
            breaker.fail()

    def _blame_silence(self, record: Record, counts: list[int]) -> None:
        """Open the breaker of a shared medium that has not answered by the deadline."""
        is_silent = counts[Status.TIMEOUT] and not _any(counts, _ANSWERED)
        if is_silent and self._is_shared and not record.has_failed:
            self._trip(record)

    def _trip(self, record: Record) -> None:
        record.has_failed = True
        self.breaker(record.op).trip()


def _any(counts: list[int], statuses: tuple[Status, ...]) -> bool:
    return any(counts[status] for status in statuses)
