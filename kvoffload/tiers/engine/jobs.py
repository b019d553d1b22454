"""Tiers over a pool of threads: their jobs, deadlines, breakers, metrics and events.

Structure
    A tier submits the blocks that need I/O to its `Pool` and keeps a `Record` of the job until it
    settles. `_collect` processes the pool's entries, in the caller's thread: it makes a `Done` when
    a job ends, and hands the job to the tier (`_settled`) when it settles.
Invariants
    Every job whose number was returned gives exactly one `Done`. A record is kept from before the
    submission to the settling.
Exceptions from outside
    A signal's handler may raise between any two instructions of a call. While a call changes
    something, `_calling` has its job and its keys. A call that finds them there when it begins, or
    catches what ends it, calls `_mend`: the job is taken back, and everything else is worked out
    again from the records and the pool. Entries of the pool stay in its queue until they have been
    processed, and processing one twice is the same as once.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload._checks import check_bool
from kvoffload._metrics import Sample
from kvoffload.errors import describe
from kvoffload.tiers.base import BlockIDs, Done, Health, Operation, Status, Tier, TierEvent
from kvoffload.tiers.metrics import TierMetrics
from kvoffload.tiers.options import TierOptions
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import stored_keys

from .breaker import Breaker
from .contract import CHORE, ENDED, LATE, READ, SETTLED, WRITE, Pool

__all__ = ["PooledTier", "Record"]

QUERY_DEADLINE_S = 0.1
TRANSFER_DEADLINE_S = 1.0
TRANSFER_BYTES_PER_S = 50_000_000
LONGEST_DEADLINE_S = 86_400.0
EXIT_S = 1.0
"""Seconds that jobs under way have, of all tiers together, when the interpreter ends."""

_FAILING = (Status.TIMEOUT, Status.UNAVAILABLE, Status.FAILED)
ANSWERED = (Status.OK, Status.CORRUPT, Status.MISS)
"""Statuses of blocks about which the medium has said something."""


@dataclass(slots=True, eq=False)
class Record:
    """A job that the pool has.

    Attributes
    ----------
    job : int
        Its number.
    op : str
        ``"put"`` or ``"get"``.
    started : float
        When it was submitted, seconds.
    status : numpy.ndarray
        ``(n,)`` int8: the statuses of all keys; those of blocks that move are filled in at the end.
    places : numpy.ndarray or None
        ``(m,)`` positions in `status` of the blocks that move; None: all.
    keys : list of bytes
        ``m`` stored keys, of the blocks that move.
    slots : numpy.ndarray
        ``(m,)`` int64: where they are in the store.
    generation : int
        How often `Tier.forget` had been called.
    failed : bool
        Whether the job has been counted as a failure.
    epoch : int
        The epoch that it was submitted under.
    taken_back : bool
        Whether the call that submitted it raised: its number was never returned.
    """

    job: int
    op: Operation
    started: float
    status: npt.NDArray[np.int8]
    places: npt.NDArray[np.int64] | None
    keys: list[bytes]
    slots: npt.NDArray[np.int64]
    generation: int
    failed: bool = False
    epoch: int = 0
    taken_back: bool = False


class PooledTier(Tier):
    """A tier whose blocks are moved by a pool of threads.

    Parameters
    ----------
    options : TierOptions
        Threads, buffers and the like.
    capacity_bytes : int or None
        Bytes of blocks that are kept at most.
    block_bytes : int
        Bytes per block.
    """

    def __init__(self, options: TierOptions, capacity_bytes: int | None, block_bytes: int) -> None:
        self._options = options
        self.name = options.name
        self.capacity_bytes = capacity_bytes
        self.direct = False
        self.block_bytes = block_bytes
        self.max_queued_bytes = options.max_queued_bytes
        self._region: Region | None = None
        self._pool: Pool | None = None
        self._pid = os.getpid()
        self._closed = True  # until `_open`
        self._clean = True
        self._next_job = 0
        self._generation = 0
        self._done: dict[int, Done] = {}  # those that `poll` has not returned
        self._records: dict[int, Record] = {}  # of jobs that have not settled
        # Jobs that have not ended -> bytes of their blocks, and keys that they ask for.
        self._moving: dict[int, tuple[int, int]] = {}
        # Job (0: none) and keys of the call that changes something now.
        self._calling: tuple[int, Sequence[bytes]] | None = None
        self._chores: dict[int, Any] = {}  # job -> what `_chore_done` is told
        self._queued_bytes = 0
        self._queued_keys = 0
        self._reads = Breaker()
        self._writes = Breaker()
        self._metrics = TierMetrics()
        self._events: list[TierEvent] | None = [] if options.enable_events else None

    def _open(self) -> None:
        """Open the tier for calls; the last step of a constructor."""
        self._closed = False
        _OPEN.add(self)

    # -- for the tiers that build on it ------------------------------------------------------

    @abstractmethod
    def _make_pool(self, region: Region) -> Pool:
        """Start the threads; sets `direct`."""

    @abstractmethod
    def _query(
        self, job: int, started: float, stored: list[bytes], deadline_s: float | None
    ) -> None:
        """Begin a query."""

    @abstractmethod
    def _put(
        self,
        job: int,
        started: float,
        stored: list[bytes],
        ids: npt.NDArray[np.int64],
        timeout_s: float,
    ) -> None:
        """Begin a put: `_finish_at_once` or `_submit` is its end."""

    @abstractmethod
    def _get(
        self,
        job: int,
        started: float,
        stored: list[bytes],
        ids: npt.NDArray[np.int64],
        timeout_s: float,
    ) -> None:
        """Begin a get: `_finish_at_once` or `_submit` is its end."""

    @abstractmethod
    def _settled(self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        """Record what the store did with a job's blocks; a second call changes nothing.

        `statuses` are those of `record.keys`, and `counts` how many there are of each.
        """

    def _chore_done(self, what: Any, status: int) -> None:
        """Record that a chore is done; may be called twice."""

    def _give_back(self) -> None:
        """Close files and the like, when the threads have ended."""

    def _leave(self) -> None:
        """Release everything in a forked child, without a word to threads or other processes."""
        self._closed = True
        if self._pool is not None:
            self._pool.abandon()

    def _sizes(self) -> dict[str, int]:
        """Return the gauges of the tier itself, ``used_bytes`` and others."""
        return {}

    def _new_job(self) -> int:
        self._next_job += 1
        return self._next_job

    def _start(
        self, begin: Callable[..., None], started: float, stored: list[bytes], *arguments: Any
    ) -> int:
        """Begin a job and return its number; take it back if an exception ends this."""
        job = self._new_job()
        try:
            self._calling = (job, stored)
            begin(job, started, stored, *arguments)
            self._calling = None
            return job
        except BaseException:
            self._calling = (job, stored)
            self._mend()
            raise

    def _change(self, change: Callable[[list[bytes]], None], stored: list[bytes]) -> None:
        """Make a change that is not a job; mend it if an exception ends it."""
        try:
            self._calling = (0, stored)
            change(stored)
            self._calling = None
        except BaseException:
            self._mend()
            raise

    def _register(self, record: Record, nbytes: int, num_keys: int = 0) -> None:
        """Add the record of a job that the pool is about to get."""
        self._moving[record.job] = nbytes, num_keys
        self._queued_bytes += nbytes
        self._queued_keys += num_keys
        self._records[record.job] = record

    def _submit(self, record: Record, ids: npt.NDArray[np.int64], timeout_s: float) -> None:
        """Hand a job's blocks to the pool."""
        pool = self._pool_or_raise()
        record.epoch = self._epoch
        self._register(record, len(record.keys) * self.block_bytes)
        pool.submit(
            record.job,
            READ if record.op == "get" else WRITE,
            record.keys,
            record.slots,
            ids,
            timeout_s=max(0.0, timeout_s - (time.monotonic() - record.started)),
            epoch=record.epoch,
        )

    def _mend(self) -> None:
        """Make records, pool and counters agree again, after an exception has ended a call.

        An exception in here leaves the rest to the next call.
        """
        if self._calling is None:
            return
        job, keys = self._calling
        pool = self._pool
        if pool is not None and job:
            self._take_back(pool, job)
        self._moving = {job: sizes for job, sizes in self._moving.items() if job in self._records}
        self._queued_bytes = sum(nbytes for nbytes, _ in self._moving.values())
        self._queued_keys = sum(num_keys for _, num_keys in self._moving.values())
        self._agree(keys)
        if pool is not None:
            pool.notify()  # whoever has slept may have been told of less than there is
        self._calling = None

    def _take_back(self, pool: Pool, job: int) -> None:
        """End a job whose number was never returned; its blocks are the caller's again."""
        self._reads.withdraw()
        self._writes.withdraw()
        record = self._records.get(job)
        if record is not None:
            record.taken_back = True
            if not pool.cancel(job) and not any(entry[0] == job for entry in list(pool.poll())):
                del self._records[job]  # the pool never had it
        self._done.pop(job, None)

    def _agree(self, keys: Sequence[bytes]) -> None:
        """Make what is known of `keys`, and of the keys of jobs, agree with the records."""

    @property
    def _epoch(self) -> int:
        """Epoch of the seals that are written now."""
        return 0

    def _chore(self, what: Any, offset: int, data: bytes, *, sync: bool = False) -> int:
        """Write to the store's table, in a thread; `_chore_done` is told."""
        job = self._new_job()
        pool = self._pool_or_raise()
        try:
            self._chores[job] = what
            pool.chore(job, offset, data, sync)
        except BaseException:
            self._chores.pop(job, None)  # its entry is ignored
            raise
        return job

    def _finish(
        self,
        job: int,
        op: Operation,
        started: float,
        status: npt.NDArray[np.int8],
        nbytes: int = 0,
    ) -> None:
        """Make the `Done` of a job."""
        seconds = time.monotonic() - started
        self._done[job] = Done(job, op, status, nbytes, seconds)
        metrics = self._metrics
        metrics.count(op, _counts(status))
        metrics.nbytes[op] += nbytes
        metrics.observe(op, seconds)

    def _finish_at_once(
        self, job: int, op: Operation, started: float, status: npt.NDArray[np.int8]
    ) -> None:
        """Make the `Done` of a job that needs no I/O."""
        self._finish(job, op, started, status)
        self._pool_or_raise().notify()

    def _emit(self, keys: list[bytes], *, removed: bool, reason: str = "") -> None:
        if removed:
            self._metrics.evicted[reason] += len(keys)
        if self._events is not None and (keys or reason == "forgotten"):
            self._events.append(TierEvent(list(keys), removed, reason))

    def _room(self) -> int:
        """Return how many blocks the queue has room for."""
        return max(0, (self.max_queued_bytes - self._queued_bytes) // self.block_bytes)

    # -- arguments ---------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        """Begin a call of a tier that may have no region."""
        if self._closed:
            self._refuse()
        if self._calling is not None:
            self._mend()

    def _refuse(self) -> None:
        """Raise what every call of a tier raises that is closed, or another process's."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"tier {self.name!r} belongs to process {self._pid}")
        raise RuntimeError(f"tier {self.name!r} is closed")

    def _enter(self) -> Pool:
        """Begin a call of a tier that must have a region."""
        self._refuse_closed()
        return self._pool_or_raise()

    def _pool_or_raise(self) -> Pool:
        if self._closed:
            self._refuse()
        if self._pool is None:
            raise RuntimeError(f"tier {self.name!r} has no region: call attach() first")
        return self._pool

    def _transfer(
        self, keys: Iterable[bytes], ids: BlockIDs, deadline_s: float | None, *, distinct: bool
    ) -> tuple[list[bytes], npt.NDArray[np.int64], float]:
        """Check the arguments of a put or get; return stored keys, ids and seconds."""
        self._enter()
        region = self._region
        stored = stored_keys(keys)
        checked = block_ids(ids)
        if len(checked) != len(stored):
            raise ValueError(f"ids must be as many as keys, {len(stored)}, got {len(checked)}")
        if len(checked) and region is not None:
            lowest, highest = int(checked.min()), int(checked.max())
            if lowest < 0 or highest >= region.num_blocks:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(f"ids must be in 0 ... {region.num_blocks - 1}, got {wrong}")
            if distinct and (twice := _first_repeat(checked)) is not None:
                raise ValueError(f"ids must be distinct, got {twice} twice")
        seconds = check_deadline(deadline_s)
        if seconds is None:
            nbytes = len(stored) * self.block_bytes
            seconds = TRANSFER_DEADLINE_S + nbytes / TRANSFER_BYTES_PER_S
        return stored, checked, seconds

    # -- the contract ------------------------------------------------------------------------

    def attach(self, region: Region) -> None:
        """Name the host memory that jobs move blocks from and to."""
        self._refuse_closed()
        check_region("region", region, self.block_bytes)
        if self._region is region:
            return
        if self._region is not None:
            raise ValueError(f"region must be attached once, and tier {self.name!r} has one")
        self._pool = self._make_pool(region)
        self._region = region

    def query(self, keys: Iterable[bytes], deadline_s: float | None = None) -> int:
        """Find out about keys."""
        started = time.monotonic()
        pool = self._enter()
        seconds, stored = check_deadline(deadline_s), stored_keys(keys)
        self._collect(pool)  # what was stored meanwhile is there
        return self._start(self._query, started, stored, seconds)

    def put(self, keys: Iterable[bytes], ids: BlockIDs, deadline_s: float | None = None) -> int:
        """Store the block ``ids[i]`` of the region under ``keys[i]``."""
        started = time.monotonic()
        stored, checked, timeout_s = self._transfer(keys, ids, deadline_s, distinct=False)
        return self._start(self._put, started, stored, checked, timeout_s)

    def get(self, keys: Iterable[bytes], ids: BlockIDs, deadline_s: float | None = None) -> int:
        """Load ``keys[i]`` into the block ``ids[i]`` of the region."""
        started = time.monotonic()
        stored, checked, timeout_s = self._transfer(keys, ids, deadline_s, distinct=True)
        return self._start(self._get, started, stored, checked, timeout_s)

    def poll(self) -> list[Done]:
        """Return the jobs that ended since the last call."""
        if not self._closed:
            self._collect(self._enter())
        elif os.getpid() != self._pid:
            self._refuse()
        done = self._done
        try:
            self._done = {}
            return list(done.values())
        except BaseException:
            self._done = {**done, **self._done}
            if self._pool is not None:
                self._pool.notify()
            raise

    def fileno(self) -> int:
        """Return a file descriptor that is readable while `poll` has something to return."""
        return self._enter().fileno()

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        """Wait until jobs have ended; `poll` still returns them."""
        timeout_s = check_timeout(timeout_s)
        if not isinstance(jobs, Iterable):
            raise TypeError(f"jobs must be a collection of jobs, got {describe(jobs)}")
        pool = self._enter()
        until = time.monotonic() + timeout_s
        try:
            while True:
                self._collect(pool)
                left = until - time.monotonic()
                ended = self._moving.keys().isdisjoint(jobs)
                if ended or left <= 0:
                    if self._done:
                        pool.notify()
                    return ended
                pool.wait(left)
        except BaseException:
            pool.notify()
            raise

    def health(self, reset: bool = False) -> Health:
        """Return whether the tier answers."""
        if check_bool("reset", reset):
            self._reads.reset()
            self._writes.reset()
        late = 0 if self._pool is None or self._closed else self._pool.stats()["late_jobs"]
        return Health(self._reads.state, self._writes.state, late, self._forget_confirmed())

    def _forget_confirmed(self) -> bool:
        """Return whether the medium has confirmed the last `forget`; no I/O, no waiting."""
        return True

    def stats(self) -> dict[str, int]:
        """Return the counters since the tier was opened, and present sizes."""
        return {**self._metrics.stats(), **self._gauges()}

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics for an exporter; ``kvoffload.tiers.prometheus`` has one."""
        breakers = {"get": int(not self._reads.closed), "put": int(not self._writes.closed)}
        return self._metrics.samples(self._gauges(), breakers)

    def _gauges(self) -> dict[str, int]:
        found = {
            "queued_bytes": self._queued_bytes,
            "staging_bytes": 0,
            "late_jobs": 0,
            "unsettled_jobs": len(self._records) + len(self._chores),
        }
        if self.capacity_bytes is not None:
            found["capacity_bytes"] = self.capacity_bytes
        if self._pool is not None and not self._closed:
            found.update(self._pool.stats())
        found.update(self._sizes())
        return found

    def take_events(self) -> Iterator[TierEvent]:
        """Return the events since the last call, oldest first, and forget them."""
        if self._closed and os.getpid() != self._pid:
            self._refuse()
        if not self._events:
            return iter(())
        events, self._events = self._events, []
        return iter(events)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let jobs under way end, and give everything back."""
        timeout_s = check_timeout(timeout_s)
        if self._closed:
            return self._clean
        self._refuse_closed()
        if self._pool is not None:
            self._before_close()
            self._clean = self._pool.close(timeout_s)
            self._collect(self._pool)
        if self._clean:
            self._give_back()
        else:
            _KEPT.append(self)
        self._closed = True
        _OPEN.discard(self)
        return self._clean

    def _before_close(self) -> None:
        """Make the last use of the threads."""

    def __del__(self) -> None:
        """Close a tier that was left open."""
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            self.close(0.0)

    # -- entries of the pool -----------------------------------------------------------------

    def _collect(self, pool: Pool) -> None:
        try:
            news = pool.poll()
            while news:
                self._calling = self._calling or (0, ())
                self._take_in(*news[0])
                news.popleft()
                self._calling = None
        except BaseException:
            self._calling = self._calling or (0, ())
            self._mend()
            raise

    def _take_in(self, job: int, flags: int, statuses: npt.NDArray[np.int8]) -> None:
        """Process an entry; a second time, do only what the first has left to do."""
        if flags & CHORE:
            if job in self._chores:
                self._chore_done(self._chores[job], int(statuses[0]))
                del self._chores[job]
            return
        record = self._records.get(job)
        if record is None:
            return
        if flags & LATE:
            self._breaker(record).trip()
            record.failed = True
            return
        counts = _counts(statuses)
        if flags & ENDED and job in self._moving:
            if not record.taken_back:
                self._ended(record, statuses, counts)
            nbytes, num_keys = self._moving[job]
            self._queued_bytes -= nbytes
            self._queued_keys -= num_keys
            del self._moving[job]
        if flags & SETTLED:
            if not record.taken_back:
                self._count(record, counts)
            self._settled(record, statuses, counts)
            del self._records[job]

    def _ended(self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        """Make the `Done` of a job that moved blocks."""
        if not record.failed and not _any(counts, ANSWERED) and _any(counts, _FAILING):
            record.failed = True
            self._breaker(record).fail()
        moved = counts[Status.OK] * self.block_bytes
        if record.op == "get" and record.generation != self._generation:
            # what was forgotten meanwhile is not served
            statuses = np.where(statuses == Status.OK, np.int8(Status.MISS), statuses)
        if record.places is None:
            record.status = statuses
        else:
            record.status[record.places] = statuses
        self._finish(record.job, record.op, record.started, record.status, moved)

    def _count(self, record: Record, counts: list[int]) -> None:
        """Report the outcome of a job to its breaker."""
        breaker = self._breaker(record)
        if record.op == "put":
            self._metrics.count("store", counts)
        else:
            breaker.count_corrupt(counts[Status.CORRUPT], counts[Status.OK])
        if _any(counts, ANSWERED):
            breaker.succeed()
        elif not record.failed:
            breaker.fail()

    def _breaker(self, record: Record) -> Breaker:
        return self._reads if record.op == "get" else self._writes


def _counts(statuses: npt.NDArray[np.int8]) -> list[int]:
    """Return how many of the statuses are each `Status`."""
    counts: list[int] = np.bincount(statuses, minlength=len(Status)).tolist()
    return counts


def _any(counts: list[int], statuses: tuple[Status, ...]) -> bool:
    return any(counts[status] for status in statuses)


def block_ids(ids: BlockIDs) -> npt.NDArray[np.int64]:
    """Return block ids as ``(n,)`` int64.

    Raises
    ------
    TypeError, ValueError
        If they are not integers in one dimension.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids must have one dimension, got {array.ndim}")
    if len(array) and array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {array.dtype}")
    if array.dtype == np.uint64 and len(array) and int(array.max()) >= 2**63:
        raise ValueError(f"ids must be < 2**63, got {array.max()}")
    return array.astype(np.int64)


def _first_repeat(numbers: npt.NDArray[np.int64]) -> int | None:
    """Return the least number that occurs twice, None if there is none.

    Not by `numpy.unique`: since numpy 2.3 it waits for the interpreter's lock in a C++ destructor,
    which aborts the process where a daemon thread is in it when the interpreter ends.
    """
    ordered = np.sort(numbers)
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeats[0]) if len(repeats) else None


def check_region(name: str, region: Any, block_bytes: int) -> None:
    """Check that `region` is a region with blocks of a size.

    Raises
    ------
    TypeError, ValueError
        If it is not.
    """
    if not isinstance(region, Region):
        raise TypeError(f"{name} must be a Region, got {describe(region)}")
    if region.block_bytes != block_bytes:
        raise ValueError(
            f"{name} must have blocks of {block_bytes} bytes, got {region.block_bytes}"
        )


def check_deadline(deadline_s: float | None) -> float | None:
    """Return a deadline in seconds, None for none given.

    Raises
    ------
    TypeError, ValueError
        If it is not a number > 0.
    """
    return None if deadline_s is None else _seconds("deadline_s", deadline_s, at_least_zero=False)


def check_timeout(timeout_s: float) -> float:
    """Return the seconds that a call may wait, a day at most.

    Raises
    ------
    TypeError, ValueError
        If it is not a number >= 0.
    """
    return _seconds("timeout_s", timeout_s, at_least_zero=True)


def _seconds(name: str, value: Any, *, at_least_zero: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a number of seconds, got {describe(value)}")
    bound = ">= 0" if at_least_zero else "> 0"
    if math.isnan(value) or value < 0 or (value == 0 and not at_least_zero):
        raise ValueError(f"{name} must be {bound}, got {describe(value)}")
    return min(float(value), LONGEST_DEADLINE_S)


# -- the end of the process, and forked children -------------------------------------------------

_OPEN: weakref.WeakSet[PooledTier] = weakref.WeakSet()
_KEPT: list[PooledTier] = []
"""Tiers with a call that has not returned: their memory may still be written to."""


def _close_at_exit() -> None:
    """Close the tiers that were left open, while their threads can still be waited for."""
    until = time.monotonic() + EXIT_S
    for tier in list(_OPEN):
        tier.close(max(0.0, until - time.monotonic()))


atexit.register(_close_at_exit)


def _after_fork_in_child() -> None:
    """Release what belongs to the parent: its files, so that its lock ends when it does."""
    for tier in [*_OPEN, *_KEPT]:
        with contextlib.suppress(OSError):  # what one tier meets keeps no other from letting go
            tier._leave()
    _OPEN.clear()
    _KEPT.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
