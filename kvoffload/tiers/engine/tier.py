"""A tier composed of jobs and a medium.

Structure
    `ComposedTier` checks arguments, looks keys up in the `Medium`, and passes blocks that need I/O
    to the `Jobs`. The classes that users open differ only in these parts.
Exceptions from outside
    A signal handler may raise between any two instructions of a call. `_is_ready` is False while a
    call changes something; a call that finds it False raises. Nothing is repaired. The job of an
    interrupted call is taken back from the pool, since its blocks are the caller's again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvoffload._checks import check_bool, check_instance, check_int
from kvoffload._metrics import Sample
from kvoffload.errors import describe
from kvoffload.tiers.base import (
    BlockIDs,
    Done,
    Health,
    Operation,
    Status,
    Tier,
    TierEvent,
    TierInterruptedError,
)
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import MAX_KEY_BYTES, stored_key, stored_keys

from .contract import ABSENT, HIT, MISS, OK, UNKNOWN, Medium
from .jobs import QUERY_DEADLINE_S, Job

LONGEST_DEADLINE_S = 86_400.0
TRANSFER_DEADLINE_S = 1.0
TRANSFER_BYTES_PER_S = 50_000_000
EXIT_S = 1.0
"""Seconds for the jobs under way of all tiers together when the interpreter ends."""


class ComposedTier(Tier):
    """A tier composed of its parts; the jobs have its options and the size of a block."""

    def __init__(self, medium: Medium, capacity_bytes: int | None) -> None:
        self._medium = medium
        self._jobs = jobs = medium.jobs
        self.name = jobs.options.name
        self.namespace = medium.namespace
        self.capacity_bytes = capacity_bytes
        self.block_bytes = jobs.block_bytes
        self.max_queued_bytes = jobs.options.max_queued_bytes
        self._region: Region | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._has_ended = True  # whether all threads ended when it was closed
        self._is_ready = True  # no call is changing something
        self._starting = 0  # the job being submitted, now or when a call was interrupted
        _OPEN.add(self)

    @property
    def direct(self) -> bool:  # type: ignore[override]
        """Whether blocks move without a copy."""
        return self._medium.direct

    def __repr__(self) -> str:
        place = f"{self._medium.place!r}, " if self._medium.place else ""
        size = "" if self.capacity_bytes is None else f"capacity_bytes={self.capacity_bytes}, "
        return f"{type(self).__name__}({place}{size}name={self.name!r})"

    # -- the beginning and the end of calls --------------------------------------------------

    def _require_ready(self) -> None:
        """Begin a call that needs no region."""
        if not self._is_ready:
            self._refuse()

    def _refuse(self) -> NoReturn:
        """Raise the error of a tier that is closed, interrupted or another process's."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"tier {self.name!r} belongs to process {self._pid}")
        if self._is_closed:
            raise RuntimeError(f"tier {self.name!r} is closed")
        raise TierInterruptedError(
            f"tier {self.name!r} was interrupted: an exception, such as a signal's, ended a call "
            "in the middle; close it and open it again"
        )

    def _enter(self) -> Any:
        """Begin a call that needs a region; return the threads."""
        self._require_ready()
        return self._jobs.require_pool()

    def _change(self, change: Callable[..., None], *arguments: Any) -> None:
        """Make a change, in a call that needs no region.

        An exception during it leaves the tier interrupted.
        """
        self._require_ready()
        self._is_ready = False
        change(*arguments)
        self._is_ready = True

    def _start(
        self, op: Operation, started: float, begin: Callable[..., None], *arguments: Any
    ) -> int:
        """Begin a job and return its number; if an exception ends this, take the job back."""
        job = self._jobs.new(op, started)
        try:
            self._is_ready = False
            self._starting = job.job
            begin(job, *arguments)
            self._starting = 0
            self._is_ready = True
            return job.job
        except BaseException:
            self._is_ready = False
            self._starting = job.job
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Return the blocks of a job whose number the caller never got."""
        if self._starting and self._jobs.pool is not None:
            self._jobs.pool.cancel(self._starting)
            self._jobs.withdraw(self._starting)
        self._starting = 0

    def _collect(self) -> None:
        """Process the results of the threads."""
        self._is_ready = False
        self._jobs.collect(self._medium)
        self._medium.tend()
        self._is_ready = True

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Collect jobs until a condition holds or the time is over; return whether it holds."""
        pool = self._enter()
        until = time.monotonic() + timeout_s
        try:
            while True:
                self._collect()
                left = until - time.monotonic()
                if (holds := is_done()) or left <= 0:
                    return holds
                pool.wait(left)
        finally:
            if self._jobs.done:
                pool.notify()  # `poll` has something to return

    # -- jobs --------------------------------------------------------------------------------

    def attach(self, region: Region) -> None:
        self._require_ready()
        check_region("region", region, self.block_bytes)
        if self._region is region:
            return
        if self._region is not None:
            raise ValueError(f"region must be attached once, and tier {self.name!r} has one")
        self._jobs.pool = self._medium.open_pool(region)
        self._region = region
        self._medium.attached()

    def query(self, keys: Iterable[bytes], deadline_s: float | None = None) -> int:
        started = time.monotonic()
        pool = self._enter()
        seconds, stored = check_deadline(deadline_s, QUERY_DEADLINE_S), stored_keys(keys)
        self._collect()  # blocks stored meanwhile are known
        if self._jobs.done:
            pool.notify()  # `poll` has something to return
        return self._start("query", started, self._query, stored, seconds)

    def _query(self, job: Job, stored: list[bytes], timeout_s: float) -> None:
        """Begin a query for the keys whose state is unknown."""
        medium = self._medium
        states = medium.states(stored) if medium.asks else self._states(stored)
        job.status = np.where(states == HIT, OK, MISS)
        unknown, room = np.flatnonzero(states == UNKNOWN), self._jobs.room_for_keys()
        self._read(job, stored, unknown, timeout_s, room=room, beyond=Status.UNAVAILABLE)

    def _read(
        self,
        job: Job,
        stored: list[bytes],
        positions: npt.NDArray[np.int64],
        timeout_s: float,
        *,
        room: int,
        beyond: Status,
        ids: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Submit the keys at positions, those with room; the others get the status `beyond`."""
        jobs = self._jobs
        if len(positions) and not jobs.reads.allow():
            job.status[positions] = Status.UNAVAILABLE
            positions = positions[:0]
        elif len(positions) > room:
            job.status[positions[room:]] = beyond
            positions = positions[:room]
            if not room:
                jobs.reads.withdraw()
        if not len(positions):
            jobs.finish_at_once(job)
            return
        if len(positions) < len(stored):
            job.positions = positions
        keys = [stored[position] for position in positions.tolist()]  # `stored` may be the caller's
        if ids is None:
            jobs.submit(job, keys, positions, positions, timeout_s)
        else:
            jobs.submit(job, keys, self._medium.pin(keys), ids[positions], timeout_s)

    def put(self, keys: Iterable[bytes], ids: BlockIDs, deadline_s: float | None = None) -> int:
        started = time.monotonic()
        stored, checked, timeout_s = self._transfer(keys, ids, deadline_s, distinct=False)
        return self._start("put", started, self._put, stored, checked, timeout_s)

    def _put(
        self, job: Job, stored: list[bytes], ids: npt.NDArray[np.int64], timeout_s: float
    ) -> None:
        """Begin a put."""
        jobs, medium = self._jobs, self._medium
        job.status = status = np.zeros(len(stored), np.int8)
        taken: list[bytes] = []
        wanted = medium.wanted(stored)
        if wanted:
            refused: dict[bytes, Status] = {}
            if jobs.writes.allow():
                taken, slots = medium.take(wanted, jobs.room(), refused)
                if not taken:
                    jobs.writes.withdraw()
            else:
                refused = dict.fromkeys(wanted, Status.UNAVAILABLE)
            if refused:
                status[:] = [refused.get(key, Status.OK) for key in stored]
        if not taken:
            jobs.finish_at_once(job)
            return
        if len(taken) != len(stored) or taken != stored:
            first: dict[bytes, int] = {}
            for position, key in enumerate(stored):
                first.setdefault(key, position)
            job.positions = np.array([first[key] for key in taken], np.int64)
            ids = ids[job.positions]
        jobs.submit(job, taken, slots, ids, timeout_s)

    def get(self, keys: Iterable[bytes], ids: BlockIDs, deadline_s: float | None = None) -> int:
        started = time.monotonic()
        stored, checked, timeout_s = self._transfer(keys, ids, deadline_s, distinct=True)
        return self._start("get", started, self._get, stored, checked, timeout_s)

    def _get(
        self, job: Job, stored: list[bytes], ids: npt.NDArray[np.int64], timeout_s: float
    ) -> None:
        """Begin a get."""
        job.status = np.full(len(stored), MISS)
        there, room = np.flatnonzero(self._medium.readable(stored)), self._jobs.room()
        self._read(job, stored, there, timeout_s, room=room, beyond=Status.FULL, ids=ids)

    def _transfer(
        self, keys: Iterable[bytes], ids: BlockIDs, deadline_s: float | None, *, distinct: bool
    ) -> tuple[list[bytes], npt.NDArray[np.int64], float]:
        """Check the arguments of a put or get; return stored keys, ids and seconds."""
        self._enter()
        stored = stored_keys(keys)
        checked = block_ids(ids)
        if len(checked) != len(stored):
            raise ValueError(f"ids must be as many as keys, {len(stored)}, got {len(checked)}")
        if len(checked) and self._region is not None:
            lowest, highest = int(checked.min()), int(checked.max())
            if lowest < 0 or highest >= self._region.num_blocks:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(f"ids must be in 0 ... {self._region.num_blocks - 1}, got {wrong}")
            if distinct and (twice := first_repeat(checked)) is not None:
                raise ValueError(f"ids must be distinct, got {twice} twice")
        nbytes = len(stored) * self.block_bytes
        return stored, checked, check_deadline(deadline_s, transfer_deadline(nbytes))

    def poll(self) -> list[Done]:
        if not self._is_closed:
            self._enter()
            self._collect()
        elif os.getpid() != self._pid:
            self._refuse()
        elif self.direct and not self._has_ended:
            self.close(0.0)
        done, self._jobs.done = self._jobs.done, []
        return done

    def fileno(self) -> int:
        fd: int = self._enter().fileno()
        return fd

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        timeout_s = check_timeout(timeout_s)
        check_instance("jobs", jobs, Collection, "a collection of jobs")
        return self._wait_until(lambda: self._jobs.have_ended(jobs), timeout_s)

    # -- keys --------------------------------------------------------------------------------

    def state(self, key: bytes) -> int:
        if type(key) is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            key = stored_key(key)
        if not self._is_ready:
            self._refuse()
        jobs = self._jobs
        reads, metrics = jobs.reads, jobs.metrics
        state = self._medium.known(key) if reads.closed or reads.would_allow() else ABSENT
        metrics.lookups[state] += 1
        return state

    def lookup(self, keys: Iterable[bytes]) -> npt.NDArray[np.int8]:
        self._require_ready()
        return self._states(stored_keys(keys))

    def _states(self, stored: list[bytes]) -> npt.NDArray[np.int8]:
        """Return and count the known states of stored keys."""
        metrics = self._jobs.metrics
        if not self._jobs.reads.would_allow():
            metrics.lookups[ABSENT] += len(stored)
            return np.full(len(stored), ABSENT, np.int8)
        states = self._medium.states(stored)
        for state, count in enumerate(np.bincount(states).tolist()):
            metrics.lookups[state] += count
        return states

    def touch(self, keys: Iterable[bytes]) -> None:
        self._change(self._medium.touch, stored_keys(keys))

    def release(self, keys: Iterable[bytes]) -> None:
        self._change(self._medium.release, stored_keys(keys))

    def end_request(self, keys: Iterable[bytes], own: Iterable[bytes], num_last: int = 1) -> None:
        num_last = check_int("num_last", num_last, 0)
        others = set(stored_keys(own))
        self._change(self._medium.served_at_once, stored_keys(keys), others, num_last)

    def discard(self, keys: Iterable[bytes]) -> None:
        self._change(self._medium.discard, stored_keys(keys))

    @property
    def generation(self) -> str:  # type: ignore[override]
        """The name of the weights whose blocks are stored and served."""
        return self._jobs.generation.name

    def forget(self, generation: str | None = None) -> bool:
        self._require_ready()
        chosen = Generation.random() if generation is None else Generation.of(generation)
        if chosen != self._jobs.generation:
            self._change(self._forget, chosen)
        return self._medium.confirm()

    def _forget(self, generation: Generation) -> None:
        self._jobs.generation = generation
        self._medium.forget()

    # -- health and counters -----------------------------------------------------------------

    def health(self, *, reset: bool = False) -> Health:
        reads, writes = self._jobs.reads, self._jobs.writes
        if check_bool("reset", reset):
            reads.reset()
            writes.reset()
        return Health(
            reads.state,
            writes.state,
            self._threads().get("late_jobs", 0),
            interrupted=not (self._is_ready or self._is_closed),
        )

    def stats(self) -> dict[str, int]:
        return {**self._jobs.metrics.stats(), **self._gauges()}

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics for an exporter; ``kvoffload.tiers.prometheus`` has one."""
        jobs = self._jobs
        breakers = {"get": int(not jobs.reads.closed), "put": int(not jobs.writes.closed)}
        return jobs.metrics.samples(self._gauges(), breakers)

    def _gauges(self) -> dict[str, int]:
        found = {**self._jobs.gauges(), "staging_bytes": 0, "late_jobs": 0}
        if self.capacity_bytes is not None:
            found["capacity_bytes"] = self.capacity_bytes
            tokens, groups = self.namespace.tokens_per_block, self.namespace.groups
            if tokens and isinstance(groups, list | tuple) and len(groups) < 2:  # else unknown
                blocks = self.capacity_bytes // self.block_bytes
                found["capacity_tokens"] = blocks * tokens
        return {**found, **self._threads(), **self._medium.sizes()}

    def _threads(self) -> dict[str, int]:
        """Return the numbers of the threads, if there are any."""
        pool = self._jobs.pool
        return {} if pool is None or self._is_closed else pool.stats()

    def take_events(self) -> Iterator[TierEvent]:
        if not (self._is_ready or self._is_closed) or os.getpid() != self._pid:
            self._refuse()
        return self._jobs.events.take()

    # -- the end -----------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> bool:
        timeout_s = check_timeout(timeout_s)
        until = time.monotonic() + timeout_s
        if os.getpid() != self._pid:
            return True
        if not self._is_closed:
            self._end_threads(timeout_s)
            self._is_closed = True
            self._is_ready = False
            _OPEN.discard(self)
        elif not self._has_ended:
            self._has_ended = self._jobs.pool.close(timeout_s)
        if self._has_ended or not self.direct:
            self._jobs.end_all()
        return self._medium.close(until, has_ended=self._has_ended)

    def _end_threads(self, timeout_s: float) -> None:
        """Let jobs under way end."""
        pool = self._jobs.pool
        if pool is None:
            return
        if self._is_ready:
            self._change(self._medium.before_close)
        self._take_back()
        self._has_ended = pool.close(timeout_s)
        if self._is_ready:
            self._change(self._jobs.collect, self._medium)
        if not self._has_ended:
            _KEPT.append(self)

    def _leave(self) -> None:
        """Release everything in a forked child without notifying a thread or another process."""
        self._is_closed = True
        self._is_ready = False
        if self._jobs.pool is not None:
            self._jobs.pool.abandon()
        self._medium.leave()

    def __del__(self) -> None:
        """Close a tier that was left open."""
        if not getattr(self, "_is_closed", True) and os.getpid() == self._pid:
            self.close(0.0)


# -- arguments ----------------------------------------------------------------------------------


def block_ids(ids: BlockIDs) -> npt.NDArray[np.int64]:
    """Return block ids as ``(n,)`` int64; TypeError, ValueError if they are invalid."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids must have one dimension, got {array.ndim}")
    if len(array) and array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {array.dtype}")
    if array.dtype == np.uint64 and len(array) and int(array.max()) >= 2**63:
        raise ValueError(f"ids must be < 2**63, got {array.max()}")
    return array.astype(np.int64)


def first_repeat(ids: npt.NDArray[np.int64]) -> int | None:
    """Return the least number that occurs twice, or None.

    This avoids `numpy.unique`: since numpy 2.3 it waits for the interpreter's lock in a C++
    destructor, which aborts the process if a daemon thread is in it when the interpreter ends.
    """
    ordered = np.sort(ids)
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeats[0]) if len(repeats) else None


def check_region(name: str, region: Any, block_bytes: int) -> None:
    """Check that `region` is a region with blocks of a size."""
    check_instance(name, region, Region, "a Region")
    if region.block_bytes != block_bytes:
        raise ValueError(
            f"{name} must have blocks of {block_bytes} bytes, got {region.block_bytes}"
        )


def check_deadline(deadline_s: float | None, default: float) -> float:
    """Return a deadline in seconds, > 0, or the default; TypeError, ValueError if it is invalid."""
    if deadline_s is None:
        return default
    return _seconds("deadline_s", deadline_s, at_least_zero=False)


def transfer_deadline(nbytes: int) -> float:
    """Return the default deadline of a transfer, seconds."""
    return TRANSFER_DEADLINE_S + nbytes / TRANSFER_BYTES_PER_S


def check_timeout(timeout_s: float) -> float:
    """Return the seconds, >= 0, that a call may wait, at most a day; TypeError, ValueError."""
    return _seconds("timeout_s", timeout_s, at_least_zero=True)


def _seconds(name: str, value: Any, *, at_least_zero: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a number of seconds, got {describe(value)}")
    seconds = float(max(-1, min(value, LONGEST_DEADLINE_S)))  # -1 for nan, too
    if seconds < 0 or (seconds == 0 and not at_least_zero):
        bound = ">= 0" if at_least_zero else "> 0"
        raise ValueError(f"{name} must be {bound}, got {describe(value)}")
    return seconds


# -- the end of the process, and forked children -------------------------------------------------

_OPEN: weakref.WeakSet[ComposedTier] = weakref.WeakSet()
_KEPT: list[ComposedTier] = []
"""Tiers with a call that has not returned: their memory may still be written to."""


def _close_at_exit() -> None:
    """Close the tiers that were left open, while their threads can still be waited for."""
    until = time.monotonic() + EXIT_S
    for tier in list(_OPEN):
        tier.close(max(0.0, until - time.monotonic()))


atexit.register(_close_at_exit)


def _after_fork_in_child() -> None:
    """Release the parent's files, so that its lock ends when it does."""
    for tier in [*_OPEN, *_KEPT]:
        with contextlib.suppress(OSError):  # an error of one tier must not keep another open
            tier._leave()
    _OPEN.clear()
    _KEPT.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
