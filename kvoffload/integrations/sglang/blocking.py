"""Calls of a `Tier`, from any number of threads, that return when their job has ended.

Structure
    One lock serialises the calls of the tier, as its contract requires; no thread holds it while
    waiting. One waiting thread at a time sleeps on the tier's file descriptor, polls, and passes
    the other threads the ends of their jobs.
Invariants
    A call returns only when its job has ended: until then the tier may use the caller's memory. An
    interrupted tier is closed, which ends its jobs, before a call raises.
    Any thread that polls clears the tier's signal: if it took the ends of other threads' jobs, it
    wakes the sleeping thread through a pipe of this object.
Cost
    One system call per poll, and the cost of the tier's own calls.
"""

from __future__ import annotations

import math
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.tiers import Done, Tier

POLL_S = 1.0
"""Seconds after which the tier is polled without a signal."""
Result = TypeVar("Result")


class BlockingTier:
    """A tier with blocking calls; it has a region and no other user.

    Notes
    -----
    Thread-safety: any thread may call any method at any time. Complexity: as the tier's calls.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._fd = tier.fileno()
        self._turn = threading.Condition()
        self._polling = False  # whether a thread sleeps on the file descriptors
        self._ended: dict[int, Done] = {}
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._woken)
        weakref.finalize(self, os.close, self._wake)

    def query(self, keys: list[bytes]) -> npt.NDArray[np.int8]:
        """Query keys; return a `Status` each, ``(n,)`` int8."""
        return self._end_of(lambda: self._tier.query(keys)).status

    def put(self, keys: list[bytes], ids: npt.NDArray[np.int64]) -> Done:
        """Store the blocks `ids` under `keys`; return the end of the job."""
        return self._end_of(lambda: self._tier.put(keys, ids))

    def get(self, keys: list[bytes], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
        """Load `keys` into the blocks `ids`; return a `Status` each, ``(n,)`` int8."""
        return self._end_of(lambda: self._tier.get(keys, ids)).status

    def lookup(self, keys: list[bytes]) -> npt.NDArray[np.int8]:
        """Return the known state of keys without any I/O, a `State` each, ``(n,)`` int8.

        This polls first, so that it includes stores that ended when they were copied.
        """
        with self._turn:
            self._poll()
            return self._tier.lookup(keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark blocks as recently used, last key first."""
        self._do(lambda: self._tier.touch(keys))

    def forget(self, generation: str) -> bool:
        """Have blocks of another generation from now on; return as `Tier.forget` does."""
        return self._do(lambda: self._tier.forget(generation))

    def stats(self) -> dict[str, int]:
        """Return the counters since the tier was opened, and present sizes."""
        return self._do(self._tier.stats)

    def close(self, timeout_s: float) -> bool:
        """Close the tier; calls that wait return."""
        try:
            return self._do(lambda: self._tier.close(timeout_s))
        finally:
            self._wake_sleeper()

    def _do(self, call: Callable[[], Result]) -> Result:
        with self._turn:
            return call()

    def _end_of(self, submit: Callable[[], int]) -> Done:
        """Submit a job and return its end."""
        with self._turn:
            job = submit()
            self._poll(job)  # a job without I/O has already ended
            while job not in self._ended:
                if self._polling:
                    self._turn.wait()
                else:
                    self._sleep()
            return self._ended.pop(job)

    def _sleep(self) -> None:
        """Wait without the lock for the end of any job, and notify the waiting threads."""
        self._polling = True
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        with suppress(OSError, ValueError):  # closed meanwhile: the poll below has the ends
            poller.register(self._fd, select.POLLIN)
        self._turn.release()
        try:
            poller.poll(POLL_S * 1000)
        finally:
            self._turn.acquire()
            self._polling = False
            self._turn.notify_all()  # they continue when this one releases the lock
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        self._poll()

    def _wake_sleeper(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the sleeper is already woken
            os.write(self._wake, b"1")

    def _take_ends(self) -> None:
        self._ended |= {done.job: done for done in self._tier.poll()}

    def _poll(self, job: int | None = None) -> None:
        """Collect the jobs that ended; if any is not `job`, wake the sleeper."""
        try:
            self._take_ends()
        except Exception:
            self._tier.close(math.inf if self._tier.direct else 0.0)
            self._take_ends()
            raise
        if self._polling and self._ended.keys() - {job}:
            self._wake_sleeper()
