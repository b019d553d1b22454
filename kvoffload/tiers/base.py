"""The contract of every tier, which keeps blocks that left host memory.

A tier keeps blocks, equal pieces of a `Region` of host memory, under their keys. It returns them as
they were stored or not at all. Work is submitted as *jobs* and reported by `Tier.poll`.

Glossary
    job: a query, a put or a get, identified by its number.
    ends: a job ends when the blocks of the region are the caller's again; `Tier.poll` then has its
        `Done`.
    settles: a job settles when no thread works on it any more. A staged put ends when it is copied
        and settles when it is stored; a staged call that hangs ends at its deadline and settles
        when the call returns. In a direct tier both are one.
    late: a direct job whose deadline has passed while the kernel still has its blocks.
    taken back: a job whose number the caller never got, because an exception ended the call; its
        blocks are the caller's again.
    interrupted: a tier in which an exception from outside ended a call in the middle.
    chore: the tier's own work in a thread, such as clearing a seal or removing blocks.
    direct: moving blocks between the region and the medium without a copy.
    staged: moving blocks through buffers of the tier's own.
    run: blocks of one job that move in one call of the medium.
    seal: 64 bytes that tie a block's bytes to its key, its namespace and its generation.
    generation: the name of the weights that computed a block; a tier sees those of its own only.
    verdict: the last known state of a key on a shared medium, valid for some time.
    breaker: a switch that refuses calls at once while the medium does not answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvoffload.errors import OffloadError

from .region import Region

if TYPE_CHECKING:
    from typing_extensions import Self

Operation = Literal["query", "put", "get"]
BlockIDs = Sequence[int] | npt.NDArray[np.integer]


class Status(IntEnum):
    """The outcome of one key of a job.

    To an engine, everything except `OK` is a miss: the block has to be computed.

    Attributes
    ----------
    OK
        Stored, loaded, or present.
    MISS
        Not present.
    CORRUPT
        Present but wrong: damaged, of another key, or of another layout. It was dropped.
    FULL
        Not stored: no room, on the medium or in the queue.
    DECLINED
        Not stored: the policy does not admit it.
    TIMEOUT
        Not finished by the deadline.
    UNAVAILABLE
        Not tried, or not answered: the state of the key is unknown.
    FAILED
        The medium reported an error.
    """

    OK = 0
    MISS = 1
    CORRUPT = 2
    FULL = 3
    DECLINED = 4
    TIMEOUT = 5
    UNAVAILABLE = 6
    FAILED = 7


class State(IntEnum):
    """The state of a key, known without any I/O.

    The numbers are those of the corresponding `Status`: compare with a name, not as a truth value.

    Attributes
    ----------
    HIT
        Present and readable: `Status.OK`.
    MISS
        Not present, or not readable now.
    UNKNOWN
        Unknown until a `Tier.query`, as after `Status.UNAVAILABLE`.
    """

    HIT = 0
    MISS = 1
    UNKNOWN = 6


@dataclass(slots=True, eq=False)
class Done:
    """The end of a job.

    Attributes
    ----------
    job : int
        The number that `Tier.query`, `Tier.put` or `Tier.get` returned.
    op : str
        ``"query"``, ``"put"`` or ``"get"``.
    status : numpy.ndarray
        ``(n,)`` int8: a `Status` per key, in the order of the keys.
    nbytes : int
        Bytes of blocks that were moved.
    seconds : float
        Time from the submission to the end, including queueing.
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
        Whether they left; if not, they became readable.
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
        States of the two breakers: ``"closed"`` (normal), ``"open"`` (every call is refused at
        once), ``"probing"`` (one call under way tests whether the medium is back), or ``"stopped"``
        (too many corrupt blocks; ``health(reset=True)`` resumes reads).
    late_jobs : int
        Jobs whose deadline has passed and whose call has not returned.
    interrupted : bool
        Whether an exception from outside ended a call in the middle: close the tier and open it
        again.
    """

    reads: str
    writes: str
    late_jobs: int
    interrupted: bool = field(default=False, kw_only=True)

    @property
    def ok(self) -> bool:
        """Whether both breakers are closed, no job is late, and no call was interrupted."""
        closed = self.reads == self.writes == "closed"
        return closed and not self.late_jobs and not self.interrupted


class TierError(OffloadError):
    """A tier that cannot be opened or used."""


class TierSpaceError(TierError):
    """A medium with too little space for a tier's capacity."""


class TierInUseError(TierError):
    """A tier that another process, or another object of this one, has open.

    Attributes
    ----------
    pid : int or None
        The process, if it is known.
    """

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class TierInterruptedError(TierError, RuntimeError):
    """A tier in which an exception from outside ended a call in the middle: open it again."""


class Closing:
    """Something with a method `close`, which a ``with`` statement calls at its end."""

    __slots__ = ()
    close: Callable[..., object]

    def __enter__(self) -> Self:
        """Return the object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class Tier(Closing, ABC):
    """A store of blocks of host memory under their keys, on some medium.

    A **key** is any ``bytes``. Keys of 1 to 40 bytes are stored unchanged, others as their
    BLAKE2b-32 (`kvoffload.tiers.stored_key`). A tier is **write-once**: equal keys mean equal
    bytes, so that a `put` of a key that is present or being stored is OK with 0 bytes moved.

    `query`, `put` and `get` submit a **job** and return its number at once. `poll` returns the jobs
    that ended since the last call. One caller at a time, in any thread.

    All arguments are checked first: a wrong one raises, and nothing has changed. Lists and arrays
    are copied: the caller may change them afterwards.
    **An error of the medium is a status, never an exception.**

    **Ownership.** From its submission to its `Done`, a job owns the blocks `ids` of the region: the
    caller must not write or reuse them, nor read those of a `get`. After the `Done` the tier never
    touches them. Any subset of a `get` may be OK; the contents of the other blocks are undefined.

    **Exceptions from outside.** A signal handler may raise inside any method, and so may a policy
    of the caller's own. If that ends a method in the middle of a change, the tier is *interrupted*:
    every later call except `close`, `stats` and `health` raises `TierInterruptedError`. Close the
    tier and open it again; a persistent tier then has its blocks at once. The blocks of the call
    that raised are the caller's again, and blocks that were not stored by then are not stored
    later. For a `get` of a direct tier the exception propagates when the kernel has returned, at
    the latest at the deadline. Blocks of other jobs are the caller's when `close` has returned
    True. No wrong byte is ever served.

    **Deadlines.** If the tier moves blocks through buffers of its own (`direct` is False), a job
    ends at most 50 ms after its deadline, with `Status.TIMEOUT` for unfinished blocks. A direct
    tier has the kernel read and write the caller's memory, and nothing can stop the kernel: a late
    job ends when its call returns. The default is 0.1 s for a query, and 1 s and 50 MB/s for a
    transfer.

    **Seal.** Each block is sealed to its key and to the tier's namespace. A block that does not
    match - a flipped bit, a torn write, the bytes of another key or of another model - is
    `Status.CORRUPT` and dropped.

    Attributes
    ----------
    name : str
        Label of the tier in metrics, events and logs.
    capacity_bytes : int or None
        Most bytes of blocks that the tier keeps; None if it does not decide.
    direct : bool
        Whether blocks move without a copy; see *Deadlines*.
    generation : str
        The name of the weights whose blocks are stored and served; see `forget`.

    Notes
    -----
    Thread-safety: callers serialise; the tier's own threads are internal.

    A tier belongs to the process that opened it. In a forked child every method raises a
    RuntimeError that names this process, except `stats` and `health`, which report the state at the
    fork without the threads, and `close`, which does nothing and returns True. No method waits for
    a thread that the child does not have, and none touches a file.

    Complexity: `state` is O(1), every other method O(n) in its keys, except `forget`, whose writes
    are O(1); a tier with an index of its own also clears it, O(blocks).
    """

    name: str
    capacity_bytes: int | None
    direct: bool
    generation: str

    @abstractmethod
    def attach(self, region: Region) -> None:
        """Set the host memory that jobs move blocks from and to.

        Call it before the first job; a repeated call with the same region is allowed. No server is
        called. If this raises, the tier has no region, no thread and no buffer, and another call
        may succeed.

        Raises
        ------
        MemoryError
            If there is no memory, or no thread, for the tier.
        ValueError
            If the region's blocks do not have the tier's size, or the tier already has another
            region.
        """

    @abstractmethod
    def lookup(self, keys: Iterable[bytes]) -> npt.NDArray[np.int8]:
        """Return the known state of keys, ``(n,)`` int8, a `State` each; no I/O, no waiting."""

    @abstractmethod
    def state(self, key: bytes) -> int:
        """Return the known `State` of one key; no I/O, no waiting."""

    @abstractmethod
    def query(self, keys: Iterable[bytes], deadline_s: float | None = None) -> int:
        """Ask the medium for keys: the job's statuses are OK, MISS, or why the state is unknown.

        Afterwards `state` returns the answer for some time. On a shared medium, all queries under
        way together ask for at most 100,000 keys; further keys are UNAVAILABLE at once.

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
            The keys. If a key is repeated, its first occurrence is stored.
        ids : sequence of int or numpy.ndarray
            The same number of block ids of the region.
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
            The same number of distinct block ids of the region.
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
            Jobs; one that ended before, or is unknown, counts as ended.
        timeout_s : float
            Most seconds to wait, >= 0.

        Returns
        -------
        bool
            Whether all have ended.
        """

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark blocks as recently used, **last key first**; unknown keys are ignored."""

    def release(self, keys: Iterable[bytes]) -> None:
        """Let blocks leave before all others, last key first; unknown keys are ignored.

        By default this does nothing: one client's session must not decide what a shared medium
        keeps.
        """

    def end_request(self, keys: Iterable[bytes], own: Iterable[bytes], num_last: int = 1) -> None:
        """Note that a request has ended, for `release`: which blocks several sessions share.

        By default this does nothing, as `release`.

        Parameters
        ----------
        keys : iterable of bytes
            The blocks of the request, first block first.
        own : iterable of bytes
            Those of them that the request has stored.
        num_last : int
            Number of blocks from the last of the prompt on, the answer's included: the session's
            next request may go on after each of them.
        """

    @abstractmethod
    def discard(self, keys: Iterable[bytes]) -> None:
        """Drop blocks; unknown keys are ignored. A get that is under way may still be OK.

        From then on they are misses, even if the medium does not answer. If more than 200,000
        blocks wait to be removed from a shared medium, the tier forgets everything instead, like
        `forget`: a discarded block must not come back, and the tier does not keep more keys than
        that. Removals that a shared medium has not made when the tier is closed are lost.
        """

    @abstractmethod
    def forget(self, generation: str | None = None) -> bool:
        """Serve and store blocks of another generation from now on, for example of new weights.

        A generation is a name that whoever changes the weights gives them, such as a trainer's
        step. It is a part of each block's name on the medium, and seeds its seal: a tier has the
        blocks of its own generation, and no others. Jobs that were not polled under the old one
        store nothing under the new one, and their gets are MISS. With the present generation
        nothing changes.

        Parameters
        ----------
        generation : str, optional
            At most 64 printable characters. By default a random one: everything is forgotten, and
            nothing is shared with another tier until it has the same name.

        Returns
        -------
        bool
            Whether it holds even if power fails from now on. A shared medium needs no call, so it
            is always True there. A slab, which has the blocks of one generation, writes this to
            its disk; False if that fails or takes more than a second. Then it still holds for this
            tier, and the slab is not opened with its old blocks again if the disk obeys at all; if
            it does not, a line in the log names the file.

        Raises
        ------
        TypeError, ValueError
            If `generation` is no such text.
        """

    @abstractmethod
    def health(self, *, reset: bool = False) -> Health:
        """Return the health of the tier; with `reset`, close both breakers first."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Return the counters since the tier was opened, and the present sizes.

        At least ``put_ok put_bytes get_ok get_miss get_bytes`` and ``queued_bytes``.
        """

    @abstractmethod
    def take_events(self) -> Iterator[TierEvent]:
        """Return the events since the last call, oldest first, and forget them.

        Empty unless the tier was made with ``enable_events=True``.
        """

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> bool:
        """Let jobs under way end, and release everything.

        A second call waits only for calls that the first has left.

        Blocks that have not started within `timeout_s` seconds end with `Status.UNAVAILABLE`; a
        call under way then has another second, or a tenth of one if a job is late. Afterwards
        `poll` and `take_events` return what is left, `stats` and `health` still work, and every
        other method raises RuntimeError. An exception of a signal handler, such as
        KeyboardInterrupt, ends the wait: the tier stays open until a second call. Blocks of jobs
        that an interrupted tier had not ended have `Status.UNAVAILABLE`.

        Returns
        -------
        bool
            Whether all jobs ended. If not, some call has not returned: its thread and the memory
            that it may still write to are kept until the process ends. A direct tier has no `Done`
            of its job until it returns.
        """
