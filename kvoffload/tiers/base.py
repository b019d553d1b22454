"""The contract of every tier: where blocks are kept that left host memory.

A tier keeps blocks, equal pieces of a `Region` of host memory, under their keys. It gives them back
as they were stored or not at all. Work is submitted as *jobs* and reported by `Tier.poll`.

Glossary
    job: a query, a put or a get, known by its number.
    ends: a job ends when the blocks of the region are the caller's again; `Tier.poll` then has its
        `Done`.
    settles: a job settles when no thread works on it any more. A staged put ends when it is copied
        and settles when it is stored; a staged call that hangs ends at its deadline and settles
        when the call returns. In a direct tier both are one.
    late: a direct job whose deadline has passed while the kernel still has its blocks.
    taken back: a job whose number the caller never got, because an exception ended the call; its
        blocks are the caller's again.
    interrupted: a tier of which an exception from outside ended a call in the middle.
    chore: work of the tier's own that a thread does, such as clearing a seal, removing blocks or
        writing an epoch.
    direct: moving blocks between the region and the medium without a copy.
    staged: moving blocks through buffers of the tier's own.
    run: blocks of one job that move in one call of the medium.
    seal: 64 bytes that tie a block's bytes to its key, its namespace and its epoch.
    epoch: a number that only rises; `Tier.forget` raises it, and blocks of lower ones are gone.
    verdict: what a tier on a shared medium found out about a key, believed for some time.
    breaker: what has calls answered at once while the medium does not answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvoffload.errors import OffloadError

from .region import Region

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "BlockIDs",
    "Done",
    "Health",
    "Operation",
    "State",
    "Status",
    "Tier",
    "TierError",
    "TierEvent",
    "TierInUseError",
    "TierInterruptedError",
    "TierSpaceError",
]

Operation = Literal["query", "put", "get"]
BlockIDs = Sequence[int] | npt.NDArray[np.integer]


class Status(IntEnum):
    """The outcome of one key of a job.

    To an engine, everything but `OK` is a miss: the block has to be computed.
    """

    OK = 0
    """Stored, loaded, or there."""
    MISS = 1
    """Not there."""
    CORRUPT = 2
    """There and wrong: damaged, of another key, or of another layout. It was dropped."""
    FULL = 3
    """Not stored: no room, on the medium or in the queue."""
    DECLINED = 4
    """Not stored: the policy does not admit it."""
    TIMEOUT = 5
    """Not done by the deadline."""
    UNAVAILABLE = 6
    """Not tried, or not answered: nothing is known about the key."""
    FAILED = 7
    """The medium reported an error."""


class State(IntEnum):
    """The state of a key, known without any I/O.

    The numbers are those that a `Status` has for the same: compare by name, not by truth.
    """

    HIT = 0
    """There, and readable: `Status.OK`."""
    MISS = 1
    """Not there, or not readable now."""
    UNKNOWN = 6
    """Not known: `Tier.query` finds out. As after `Status.UNAVAILABLE`."""


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """The end of a job.

    Attributes
    ----------
    job : int
        What `Tier.query`, `Tier.put` or `Tier.get` returned.
    op : str
        ``"query"``, ``"put"`` or ``"get"``.
    status : numpy.ndarray
        ``(n,)`` int8: a `Status` for each key, in the order of the keys.
    nbytes : int
        Bytes of blocks that were really moved.
    seconds : float
        Time from the submission to the end, queueing included.
    """

    job: int
    op: Operation
    status: npt.NDArray[np.int8]
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierEvent:
    """Blocks that became readable in a tier, or that left it.

    Attributes
    ----------
    keys : list of bytes
        The blocks, as the tier stores their keys (see `Tier`). Empty with the reason
        ``"forgotten"``, which means all blocks.
    removed : bool
        True: they left. False: they can be read from now on.
    reason : str
        Why they left: ``"evicted"``, ``"discarded"``, ``"corrupt"``, ``"failed"`` or
        ``"forgotten"``. Empty for blocks that were stored.
    """

    keys: list[bytes]
    removed: bool = field(kw_only=True)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a tier's breakers and of its medium.

    Attributes
    ----------
    reads, writes : str
        State of the two breakers: ``"closed"`` (all is well), ``"open"`` (every call is answered at
        once), ``"probing"`` (one call is under way to see whether the medium is back), or
        ``"stopped"`` (too many corrupt blocks; ``health(reset=True)`` starts reads again).
    late_jobs : int
        Jobs whose deadline has passed and whose call has not returned.
    forgotten : bool
        Whether the medium has confirmed the last `Tier.forget`; True where there was none. While it
        is False the tier tries again by itself, and a restart may find what was forgotten.
    interrupted : bool
        Whether an exception from outside ended a call in the middle: the tier has to be closed, and
        opened again.
    """

    reads: str
    writes: str
    late_jobs: int
    forgotten: bool = field(default=True, kw_only=True)
    interrupted: bool = field(default=False, kw_only=True)

    @property
    def ok(self) -> bool:
        """Whether reads and writes are let through, nothing is late, interrupted or to forget."""
        closed = self.reads == self.writes == "closed"
        return closed and not self.late_jobs and self.forgotten and not self.interrupted


class TierError(OffloadError):
    """A tier that cannot be opened or used."""


class TierSpaceError(TierError):
    """A medium with too little space for a tier's capacity."""


class TierInUseError(TierError):
    """A tier that another process, or another object of this one, has open.

    Attributes
    ----------
    pid : int or None
        The process, where it is known.
    """

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class TierInterruptedError(TierError, RuntimeError):
    """A tier of which an exception from outside ended a call in the middle: open it again."""


class Tier(ABC):
    """Blocks of host memory, kept under their keys on some medium.

    A **key** is any ``bytes``. Keys of 1 to 40 bytes are stored as they are, others as their
    BLAKE2b-32 (`kvoffload.tiers.stored_key`). A tier is **write-once**: equal keys mean equal
    bytes, so that a `put` of a key that is present, or on its way, is OK with 0 bytes moved.

    `query`, `put` and `get` submit a **job** and return its number at once. `poll` returns the jobs
    that ended since the last call. One caller at a time, in any thread.

    All arguments are checked before anything happens: a wrong one raises, and nothing has changed.
    **Trouble with the medium is a status, never an exception.**

    **Ownership.** From its submission to its `Done`, a job owns the blocks `ids` of the region: the
    caller neither writes nor reuses them, nor reads those of a `get`. After the `Done` the tier
    never touches them. Any subset of a `get` may be OK; the bytes of the other blocks are
    undefined.

    **Exceptions from outside.** A signal's handler may raise inside any method, and a policy of the
    caller's own where it is called. Where that ends a method in the middle of a change, the tier is
    *interrupted*: every later call but `close`, `stats` and `health` raises `TierInterruptedError`.
    Close the tier and open it again; one that keeps its blocks has them at once. The blocks of the
    call that raised are the caller's again, and what was not stored by then is not stored later.
    For a `get` of a direct tier that takes until the kernel has returned, and not after its
    deadline. Blocks of other jobs are the caller's when `close` has returned True. No wrong byte is
    ever served.

    **Deadlines.** A job ends by its deadline and at most 50 ms, with `Status.TIMEOUT` for what was
    not done, where the tier moves blocks through buffers of its own (`direct` is False). A direct
    tier has the kernel read and write the caller's memory, and nothing can stop the kernel: a job
    that is late ends when its call returns. The default is 0.1 s for a query, and 1 s and 50 MB/s
    for a transfer.

    **Seal.** Each block is sealed to its key and to the tier's namespace. What does not match - a
    flipped bit, a torn write, the bytes of another key or of another model - is `Status.CORRUPT`,
    and dropped.

    Attributes
    ----------
    name : str
        Label of the tier in metrics, events and logs.
    capacity_bytes : int or None
        Bytes of blocks that the tier keeps at most; None where it does not decide.
    direct : bool
        Whether blocks move without a copy; see *Deadlines*.

    Notes
    -----
    Thread-safety: callers serialise; the tier's own threads are hidden.

    A tier belongs to the process that opened it. In a forked child every method raises a
    RuntimeError that names this process, but for `stats` and `health`, which answer as of the fork
    without the threads, and `close`, which does nothing there and is True. None waits for a thread
    that the child does not have, and none touches a file.

    Complexity: `state` is O(1), every other method O(n) in its keys, except `forget`, which writes
    as much whatever is stored; a tier with an index of its own also clears that, O(blocks).
    """

    name: str
    capacity_bytes: int | None
    direct: bool

    @abstractmethod
    def attach(self, region: Region) -> None:
        """Name the host memory that jobs move blocks from and to.

        Before the first job. The region that it has already may be named again. A tier on a server
        waits for its answer, 2 s at most; if there is none, that is not an error. Where it raises,
        the tier has no region, no thread and no buffer, and another call may succeed.

        Raises
        ------
        MemoryError
            If there is no memory, or no thread, for it.
        ValueError
            If the region's blocks are not of the size that the tier was made for, or the tier has
            another region already.
        """

    @abstractmethod
    def lookup(self, keys: Iterable[bytes]) -> npt.NDArray[np.int8]:
        """Return what is known about keys, ``(n,)`` int8, a `State` each; no I/O, no waiting."""

    @abstractmethod
    def state(self, key: bytes) -> int:
        """Return what is known about one key, a `State`. No I/O, no waiting."""

    @abstractmethod
    def query(self, keys: Iterable[bytes], deadline_s: float | None = None) -> int:
        """Ask the medium for keys: the job's statuses are OK, MISS, or why it is not known.

        Afterwards `state` knows, for some time. The queries of a tier on a shared medium that
        have not ended ask for 100,000 keys together; further keys are UNAVAILABLE at once.

        Returns
        -------
        int
            The job.
        """

    @abstractmethod
    def put(self, keys: Iterable[bytes], ids: BlockIDs, deadline_s: float | None = None) -> int:
        """Store the block ``ids[i]`` of the region under ``keys[i]``.

        Parameters
        ----------
        keys : iterable of bytes
            The keys. Of a key that is given twice, the first occurrence is stored.
        ids : sequence of int or numpy.ndarray
            As many block ids of the region.
        deadline_s : float, optional
            Seconds from now, > 0.

        Returns
        -------
        int
            The job.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong.
        RuntimeError
            If the tier has no region or is closed.
        """

    @abstractmethod
    def get(self, keys: Iterable[bytes], ids: BlockIDs, deadline_s: float | None = None) -> int:
        """Load ``keys[i]`` into the block ``ids[i]`` of the region.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.
        ids : sequence of int or numpy.ndarray
            As many block ids of the region, no two the same.
        deadline_s : float, optional
            Seconds from now, > 0.

        Returns
        -------
        int
            The job.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong.
        RuntimeError
            If the tier has no region or is closed.
        """

    @abstractmethod
    def poll(self) -> list[Done]:
        """Return the jobs that ended since the last call, in the order in which they ended."""

    @abstractmethod
    def fileno(self) -> int:
        """Return a file descriptor that is readable while `poll` has something to return."""

    @abstractmethod
    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        """Wait until jobs have ended; `poll` still returns them.

        Parameters
        ----------
        jobs : collection of int
            Jobs; one that ended before, or is not known, counts as ended.
        timeout_s : float
            Seconds to wait at most, >= 0.

        Returns
        -------
        bool
            Whether all have ended.
        """

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark blocks as recently used, **last key first**; unknown keys are no error."""

    def release(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """Let blocks leave before all others, last key first; unknown keys are no error.

        By default nothing: what a shared medium keeps is not for one client's session to say.
        """

    @abstractmethod
    def discard(self, keys: Iterable[bytes]) -> None:
        """Drop blocks; unknown keys are no error. A get that is under way may still be OK.

        From then on they are misses, whether the medium answers or not. If more than 200,000 blocks
        wait to be removed from a shared medium, the tier forgets everything instead, as `forget`
        does: a block that was discarded must not come back, and no more keys are kept.
        """

    @abstractmethod
    def forget(self) -> bool:
        """Drop everything, as after an update of the model's weights.

        What was stored before is never served again: not by jobs under way either, whose blocks are
        MISS, nor after a restart. On a medium that several processes share it holds for what any of
        them has put, stored or still on its way: such puts are OK for their callers, dropped, and
        counted (``dropped`` of `stats`).

        Returns
        -------
        bool
            Whether that is certain even if power fails from now on. False where the medium did not
            confirm it within a second; it still holds for this process, which goes on trying
            (`Health.forgotten`), and for a restart as far as the medium was reached. False before
            `attach`, too, where the medium needs it to be reached.

        Notes
        -----
        Two cases are beyond this promise. A process that ends before the medium has confirmed may
        not have told any other. And after a shared medium is restored from a snapshot older than
        everything that living processes have seen of it, no process knows what was forgotten since.
        """

    @abstractmethod
    def health(self, *, reset: bool = False) -> Health:
        """Return whether the tier answers; with `reset`, close both breakers first."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Return the counters since the tier was opened, and present sizes."""

    @abstractmethod
    def take_events(self) -> Iterator[TierEvent]:
        """Return the events since the last call, oldest first, and forget them.

        Empty unless the tier was made with ``enable_events=True``.
        """

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> bool:
        """Let jobs under way end, and give everything back. A second call does nothing.

        What has not started by `timeout_s` seconds ends with `Status.UNAVAILABLE`; a call under way
        then has a second more, or a tenth of one where a job is late. `poll` and `take_events`
        return what is left, `stats` and `health` still answer; every other method then raises
        RuntimeError. An exception of a signal's handler, such as KeyboardInterrupt, ends the wait:
        the tier is open until a second call. The jobs of a tier that was interrupted have no
        `Done`.

        Returns
        -------
        bool
            Whether all ended. If not, some call has not returned: its thread and the memory that it
            may still write to are kept until the process ends.
        """

    def __enter__(self) -> Self:
        """Return the tier."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the tier."""
        self.close()
