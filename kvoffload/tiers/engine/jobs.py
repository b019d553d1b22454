"""The jobs of a tier: numbers, room in the queue, breakers, and ends.

Structure
    A `Job` that needs I/O is submitted to the `Pool`. `Jobs.collect` processes the pool's entries
    in the caller's thread: it completes a job when it ends, which is then its `Done`, and notifies
    the tier's `Medium` when it settles.
Invariants
    Every job whose number was returned is exactly one `Done`. It is kept from before the submission
    to the settling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Done, Operation, Status
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.metrics import Events, TierMetrics, write_seldom
from kvoffload.tiers.native import require_extensions
from kvoffload.tiers.options import TierOptions

from .breaker import Breaker
from .contract import CHORE, ENDED, LATE, QUERY, READ, SETTLED, WRITE, Medium

QUERY_DEADLINE_S = 0.1
MAX_QUEUED_KEYS = 100_000
"""Most keys that the queries under way ask for together."""
LEAST_QUEUED_KEYS = 16
"""Least number of keys that a query is counted as, for its memory besides the keys."""

_ANSWERED = (Status.OK, Status.CORRUPT, Status.MISS)
"""Statuses that show an answer of the medium."""
_FAILING = (Status.TIMEOUT, Status.UNAVAILABLE, Status.FAILED)
NO_STATUS = np.empty(0, np.int8)
_KINDS = {"get": READ, "put": WRITE, "query": QUERY}


@dataclass(slots=True, eq=False, repr=False)
class Job(Done):
    """A job of `n` keys, and its `Done`; `m` of its blocks move."""

    started: float  # when it was submitted, seconds
    generation: Generation  # that of its submission; another object, even if equal: forgotten since
    positions: npt.NDArray[np.int64] | None = None  # (m,) in `status`, those that move; None: all
    keys: list[bytes] = field(init=False)  # m stored keys
    slots: npt.NDArray[np.int64] = field(init=False)  # (m,): where they are in the store
    has_ended: bool = False  # its blocks are the caller's again
    has_failed: bool = False  # it was counted as a failure

    def __repr__(self) -> str:
        return Done.__repr__(self).replace("Job", "Done", 1)


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
        self.pool: Any = None  # the threads, once there is a region
        self.reads = Breaker()  # whether the medium is asked
        self.writes = Breaker()
        self.metrics = TierMetrics()
        self.events = Events(self.metrics, are_kept=options.enable_events)
        self.unsettled: dict[int, Job] = {}  # those in the pool, by id
        self._is_shared = is_shared
        self._last_id = 0
        self.done: list[Done] = []  # those that `Tier.poll` has not returned, in order
        self._chores: dict[int, Callable[[int], None]] = {}
        self._queued_bytes = 0
        self._logged: dict[str, float] = {}
        self._queued_keys = 0

    # -- the beginning -----------------------------------------------------------------------

    def new(self, op: Operation, started: float) -> Job:
        """Return a new job; its statuses are the caller's to set."""
        return Job(self._new_id(), op, NO_STATUS, 0, 0.0, started, self.generation)

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def is_stale(self, job: Job) -> bool:
        """Return whether everything was forgotten since a job was submitted."""
        return job.generation is not self.generation

    def room(self) -> int:
        """Return how many blocks the queue has room for."""
        return max(0, (self.options.max_queued_bytes - self._queued_bytes) // self.block_bytes)

    def room_for_keys(self) -> int:
        """Return how many more keys queries may ask for."""
        return max(0, MAX_QUEUED_KEYS - self._queued_keys)

    def breaker(self, op: Operation) -> Breaker:
        """Return the breaker of an operation."""
        return self.writes if op == "put" else self.reads

    def submit(
        self,
        job: Job,
        keys: list[bytes],
        slots: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        timeout_s: float,
    ) -> None:
        """Pass a job's blocks to the pool; `timeout_s` counts from the beginning of the call."""
        job.keys, job.slots = keys, slots
        self.unsettled[job.job] = job
        self._queue(job, 1)
        self.require_pool().submit(
            job.job,
            _KINDS[job.op],
            keys,
            slots,
            ids,
            timeout_s=max(0.0, timeout_s - (time.monotonic() - job.started)),
            generation=job.generation.number,
        )

    def chore(self, done: Callable[[int], None], kind: int, data: bytes) -> None:
        """Have a thread do a chore; call `done` with its status when it is collected.

        `kind` and `data` are those of `Pool.chore`: for a file, an offset and the bytes to write
        there.
        """
        chore_id = self._new_id()
        self._chores[chore_id] = done
        self.require_pool().chore(chore_id, kind, data)

    def finish_at_once(self, job: Job) -> None:
        """End a job that needs no I/O."""
        self._finish(job)
        self.require_pool().notify()

    def require_pool(self) -> Any:
        """Return the threads; RuntimeError if there is no region."""
        if self.pool is None:
            raise RuntimeError(f"tier {self.options.name!r} has no region: call attach() first")
        return self.pool

    def _queue(self, job: Job, sign: int) -> None:
        """Count a job's share of the queue."""
        if job.op == "query":
            self._queued_keys += sign * max(LEAST_QUEUED_KEYS, len(job.keys))
        else:
            self._queued_bytes += sign * len(job.keys) * self.block_bytes

    # -- the end -----------------------------------------------------------------------------

    def collect(self, medium: Medium) -> None:
        """Process the entries of the pool."""
        entries = self.require_pool().poll()
        while entries:
            job, flags, statuses = entries.popleft()
            if flags & CHORE:
                self._chores.pop(job)(int(statuses[0]))
            else:
                self._take_in(self.unsettled[job], flags, statuses, medium)

    def withdraw(self, job_id: int) -> None:
        """Drop a job whose number was not returned."""
        self.unsettled.pop(job_id, None)
        self.done = [done for done in self.done if done.job != job_id]

    def end_all(self) -> None:
        """End the jobs whose results will not be collected."""
        ended = {done.job for done in self.done}
        for job in self.unsettled.values():
            if not job.has_ended and job.job not in ended:
                job.has_ended = True
                job.status = np.full(len(job.status), Status.UNAVAILABLE, np.int8)
                self._finish(job)

    def have_ended(self, jobs: Collection[int]) -> bool:
        """Return whether jobs have ended; unknown ones count as ended."""
        unsettled = self.unsettled
        return all(job not in unsettled or unsettled[job].has_ended for job in jobs)

    def gauges(self) -> dict[str, int]:
        """Return present sizes."""
        return {
            "queued_bytes": self._queued_bytes,
            "unsettled_jobs": len(self.unsettled) + len(self._chores),
        }

    def log_corrupt(self, place: str) -> None:
        """Log a line about corrupt blocks that were dropped, unless there was one of late."""
        count = self.metrics.evicted["corrupt"]
        self.say("dropped corrupt blocks; %s had %d so far", place or "it", count)

    def say(self, message: str, *arguments: object) -> None:
        """Log a line about the tier; repeat the same message at most once a minute."""
        line = f"tier %r {message}"
        write_seldom(self._logged, message, logging.WARNING, line, self.options.name, *arguments)

    def _take_in(
        self, job: Job, flags: int, statuses: npt.NDArray[np.int8], medium: Medium
    ) -> None:
        """Process an entry of the pool."""
        if flags & LATE:
            self._trip(job)
            return
        counts: list[int] = np.bincount(statuses, minlength=len(Status)).tolist()
        if flags & ENDED:
            self._queue(job, -1)
            self._end(job, statuses, counts)
            job.has_ended = True
        if flags & SETTLED:
            del self.unsettled[job.job]
            self._count(job, counts)
            medium.settle(job, statuses, counts)

    def _end(self, job: Job, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        """End a job that moved blocks or asked for them."""
        self._blame_silence(job, counts)
        if not job.has_failed and not _any(counts, _ANSWERED) and _any(counts, _FAILING):
            job.has_failed = True
            self.breaker(job.op).fail()
        job.nbytes = 0 if job.op == "query" else counts[Status.OK] * self.block_bytes
        if job.op != "put" and self.is_stale(job):
            # blocks forgotten meanwhile are not served
            statuses = np.where(statuses == Status.OK, np.int8(Status.MISS), statuses)
        if job.positions is None:
            job.status = statuses
        else:
            job.status[job.positions] = statuses
        self._finish(job)

    def _finish(self, job: Job) -> None:
        """Complete a job, which is its `Done` from now on."""
        job.seconds = time.monotonic() - job.started
        self.done.append(job)
        self.metrics.count(job.op, np.bincount(job.status, minlength=len(Status)).tolist())
        self.metrics.nbytes[job.op] += job.nbytes
        self.metrics.observe(job.op, job.seconds)

    def _count(self, job: Job, counts: list[int]) -> None:
        """Count the results of a job, and report them to its breaker."""
        self._blame_silence(job, counts)
        breaker = self.breaker(job.op)
        if job.op == "put":
            self.metrics.count("store", counts)
        elif job.op == "get":
            breaker.count_corrupt(counts[Status.CORRUPT], counts[Status.OK])
        if _any(counts, _ANSWERED):
            breaker.succeed()
        elif not job.has_failed:
            breaker.fail()

    def _blame_silence(self, job: Job, counts: list[int]) -> None:
        """Open the breaker of a shared medium that has not answered by the deadline."""
        is_silent = counts[Status.TIMEOUT] and not _any(counts, _ANSWERED)
        if is_silent and self._is_shared and not job.has_failed:
            self._trip(job)

    def _trip(self, job: Job) -> None:
        job.has_failed = True
        self.breaker(job.op).trip()


def _any(counts: list[int], statuses: tuple[Status, ...]) -> bool:
    return any(counts[status] for status in statuses)
