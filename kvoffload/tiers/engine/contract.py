"""The contracts of the parts of a tier.

`ComposedTier` joins its `Jobs`, a `Catalog` and a `Medium`. A catalog has the location of every
key. The index of a local tier decides it; on a shared medium it consists of verdicts, which are
valid for some time. A medium starts the threads that move blocks, the `Pool`, and forgets its
blocks. Threads move blocks between a region and a `Store`.

There are two pools: in Python over any store (``threads``), and compiled over files and memory
(``kvoffload._core.io``), whose threads never take the interpreter's lock.

The terms are those of the glossary in ``base``.

Jobs
    `Pool.submit` takes a job's blocks. Threads take *runs* of blocks, not jobs: blocks of one job
    that are adjacent in the store, up to `RUN_BYTES`, move in one call. Reads go first,
    and `READ_ONLY_THREADS` threads never write, so that writes cannot hold reads up.
Direct and staged
    A direct pool passes the region's memory to the store. A staged one moves blocks through buffers
    of its own: a put is copied first, by the keeper, and written from the copy; a get is read into
    a buffer, checked there and copied if its job has not ended meanwhile.
Ends
    A staged put ends when it is copied (``ack="copied"``) or stored (``ack="stored"``), a staged
    get at its deadline at the latest.
The keeper
    A separate thread that does no I/O and so cannot hang. It ends jobs at their deadlines and
    copies staged puts in slices, so that no copy delays the end of another job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Status
from kvoffload.tiers.namespace import Namespace
from kvoffload.tiers.region import Region

from .transfer import Staging

if TYPE_CHECKING:
    from .jobs import Record

__all__ = [
    "CHORE",
    "DROP",
    "ENDED",
    "LATE",
    "MOVING",
    "QUERY",
    "READ",
    "READ_ONLY_THREADS",
    "RUN_BLOCKS",
    "RUN_BYTES",
    "SETTLED",
    "SHORT_RUN_BYTES",
    "TOUCH",
    "WRITE",
    "Block",
    "Catalog",
    "Entry",
    "Medium",
    "Pool",
    "Store",
]

READ = 0
WRITE = 1
QUERY = 2
"""Kind of job besides `READ` and `WRITE`: whether blocks are present."""

DROP, TOUCH = 0, 1
"""Kinds of chores of a shared medium: remove blocks, mark them as used."""

LATE = 1
"""Flag of an entry: the job passed its deadline and the kernel still has its blocks."""
ENDED = 2
"""The blocks of the region are the caller's again; the statuses are those of the job."""
SETTLED = 4
"""No thread works on the job any longer; the statuses are those of the store."""
CHORE = 8
"""A chore has ended; its status is the only one."""

MOVING = -1
"""Status of an unfinished block; no entry has it."""

RUN_BYTES = 8 * 2**20
"""Most bytes that one call moves, unless a block is larger."""
SHORT_RUN_BYTES = 2 * 2**20
"""Bytes below which a job is not cut into smaller runs.

Each thread gets two runs of a larger job, up to `RUN_BYTES` each, so that the sums of one are
computed while the bytes of the other move.
"""
RUN_BLOCKS = 1024
"""Most blocks that one call moves."""
READ_ONLY_THREADS = 2


# -- catalogs and media ----------------------------------------------------------------------------


class Catalog(ABC):
    """The states and locations of a tier's keys, which are stored keys here.

    Attributes
    ----------
    asks : bool
        Whether the medium may have keys that the catalog does not know.
    forgets : int
        Number of times that everything has been forgotten.

    Notes
    -----
    Thread-safety: callers serialise.
    """

    asks = False
    forgets = 0

    @abstractmethod
    def known(self, key: bytes) -> int:
        """Return the known `State` of a key."""

    @abstractmethod
    def states(self, keys: list[bytes]) -> npt.NDArray[np.int8]:
        """Return the known state of keys, ``(n,)`` int8, a `State` each."""

    @abstractmethod
    def wanted(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys of a put that are neither present nor being stored, each once."""

    @abstractmethod
    def take(
        self, keys: list[bytes], room: int, refused: dict[bytes, Status]
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Begin to store keys.

        Parameters
        ----------
        keys : list of bytes
            From `wanted`.
        room : int
            Most keys to store.
        refused : dict of bytes to Status
            Keys that are not stored are added, with the reason.

        Returns
        -------
        tuple
            The keys that are stored, and their slots, ``(n,)`` int64.
        """

    @abstractmethod
    def readable(self, keys: list[bytes]) -> list[bool]:
        """Return per key whether a read may find it."""

    @abstractmethod
    def pin(self, keys: list[bytes]) -> npt.NDArray[np.int64]:
        """Pin readable keys until their get settles; return their slots, ``(n,)`` int64."""

    @abstractmethod
    def is_stale(self, record: Record) -> bool:
        """Return whether everything was forgotten since a job was submitted."""

    @abstractmethod
    def settle(self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        """Record the results of a job's blocks.

        `statuses` are those of `record.keys`, and `counts` has the number of each.
        """

    @abstractmethod
    def touch(self, keys: list[bytes]) -> None:
        """Mark blocks as recently used, last key first."""

    def release(self, keys: list[bytes]) -> None:  # noqa: B027
        """Let blocks leave before all others, if this catalog decides which blocks leave.

        Blocks that several sessions share stay.
        """

    def served_at_once(self, keys: list[bytes], own: set[bytes]) -> None:  # noqa: B027
        """Note the session of a request that has stored `own` of its blocks."""

    @abstractmethod
    def discard(self, keys: list[bytes]) -> None:
        """Drop blocks."""

    @abstractmethod
    def forget(self, records: Iterable[Record]) -> None:
        """Know no block any longer; `records` are the jobs that have not settled."""

    def tend(self) -> None:  # noqa: B027
        """Do periodic work; called whenever jobs were collected."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return present sizes, ``used_bytes`` and others."""


class Medium(ABC):
    """The place of a tier's blocks, and the threads that move them.

    Attributes
    ----------
    namespace : Namespace
        The namespace of the bytes.
    direct : bool
        Whether blocks move without a copy; set once there are threads.
    place : str
        Its name in logs and `repr`; may be empty.
    """

    namespace: Namespace
    direct = False
    place = ""

    @abstractmethod
    def open_pool(self, region: Region) -> Pool:
        """Start the threads."""

    def attached(self) -> None:  # noqa: B027
        """Do the work of opening that needs threads."""

    def forget(self) -> None:  # noqa: B027
        """Begin to keep blocks of the present generation only; no waiting."""

    def confirm(self) -> bool:
        """Wait a moment until `forget` holds even if power fails; return whether it does."""
        return True

    def tend(self) -> None:  # noqa: B027
        """Do periodic work; called whenever jobs were collected."""

    def before_close(self) -> None:  # noqa: B027
        """Make the last use of the threads."""

    def close(self, until: float, *, has_ended: bool) -> bool:  # noqa: ARG002
        """Release files and other resources when the threads have ended; may be called again.

        Parameters
        ----------
        until : float
            Deadline for the return, monotonic seconds.
        has_ended : bool
            Whether all threads have ended; if not, the resources that they use are kept.

        Returns
        -------
        bool
            Whether no call is left under way.
        """
        return has_ended

    def leave(self) -> None:  # noqa: B027
        """Release everything in a forked child without notifying a thread or another process."""

    def sizes(self) -> dict[str, int]:
        """Return present sizes."""
        return {}


# -- threads and stores ----------------------------------------------------------------------------


class Entry(NamedTuple):
    """An event in the life of a job."""

    job: int  # the id that it was submitted under
    flags: int  # `LATE`, `ENDED`, `SETTLED` or `CHORE`, added up
    statuses: npt.NDArray[np.int8]  # (n,), in the order of submission; empty with `LATE`


class Pool(Protocol):
    """Threads that move blocks.

    Notes
    -----
    Thread-safety: callers serialise, except `notify` and `wait`.
    """

    def submit(
        self,
        job: int,
        op: int,
        keys: Sequence[bytes],
        slots: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        *,
        timeout_s: float,
        generation: int,
    ) -> None:
        """Take a job; it ends within `timeout_s` seconds, or is late.

        Parameters
        ----------
        job : int
            A number that no job under way has.
        op : int
            `READ`, `WRITE` or, of a store that takes queries, `QUERY`, which uses neither `slots`
            nor `ids`.
        keys : sequence of bytes
            The stored keys, at least one.
        slots, ids : numpy.ndarray
            ``(n,)`` int64: where each block is in the store and in the region; checked by the
            caller.
        timeout_s : float
            Seconds.
        generation : int
            The number of the job's generation.
        """

    def chore(self, job: int, offset: int, data: bytes) -> None:
        """Write bytes to the store's table in a thread.

        Runs of puts that no thread has taken wait for it, so that it cannot undo what they write.
        """

    def cancel(self, job: int) -> bool:
        """Take back a job whose number a call cannot return, because it was interrupted.

        When this returns, the region's blocks are the caller's again: blocks that no thread had
        taken are UNAVAILABLE, and those being written get no seal. This waits for a direct read,
        until its deadline at the latest.

        Returns
        -------
        bool
            False if the pool does not have the job: it was never submitted, or it has settled.
        """

    def poll(self) -> deque[Entry]:
        """Return the entries, oldest first: always the same queue, which the caller empties."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return, or `notify` is called."""

    def notify(self) -> None:
        """Make the file descriptor readable, and end a `wait`."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `wait` would not wait."""

    def stats(self) -> dict[str, int]:
        """Return ``late_jobs`` and ``staging_bytes``, the bytes of buffers in use."""

    def close(self, timeout_s: float) -> bool:
        """End the threads and return whether all ended; blocks not started are UNAVAILABLE.

        A call under way has another second, or a tenth of one if it is late. An exception of a
        signal handler ends the wait, and a second call continues it.
        """

    def abandon(self) -> None:
        """Forget the threads, which a forked child does not have."""


class _Job(Protocol):
    """The part of a block's job that a store uses."""

    taken_back: bool


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A block in transfer between a region and a store.

    A `RemoteStore` reads `key` and ``views[0]``, and sets `status`.

    Attributes
    ----------
    key : bytes
        Its stored key.
    slot, block_id : int
        Where it is in the store and in the region.
    position : int
        Its position in the job.
    status : int
        `MOVING`, or its `Status`.
    views : list of memoryview
        The block's memory to read from or write to, in the region or in a buffer.
    slot_views : list of memoryview
        The same with a buffer's padding, up to a multiple of 4096 bytes.
    buffer : int
        The staging buffer, -1 for none.
    job : object or None
        The job of the block.
    """

    key: bytes
    slot: int
    block_id: int
    position: int
    status: int = field(default=MOVING, init=False)
    views: list[memoryview] = field(default_factory=list, init=False)
    slot_views: list[memoryview] = field(default_factory=list, init=False)
    buffer: int = field(default=-1, init=False)
    job: _Job | None = field(default=None, init=False)

    @property
    def taken_back(self) -> bool:
        """Whether its memory is the caller's again before its job has ended by itself."""
        return self.job is not None and self.job.taken_back

    def use(self, staging: Staging, buffer: int) -> None:
        """Move the block to a staging buffer."""
        self.buffer = buffer
        self.views = [staging.view(buffer)]
        self.slot_views = staging.region.views_unchecked(buffer)


class Store(ABC):
    """A place where blocks are kept, with the calls that threads make.

    Attributes
    ----------
    direct : bool
        Whether it gets the region's memory instead of buffers.
    block_bytes : int
        Bytes per block.
    slot_bytes : int
        Bytes that a block takes in the store.
    keys_per_query : int
        Most keys that a query asks for in one call.
    """

    direct: bool
    block_bytes: int
    slot_bytes: int
    keys_per_query = 1024

    def use(self, memory: Region) -> None:  # noqa: B027
        """Register the staging buffers, if the medium's client needs that."""

    def begin(self, deadline: float) -> None:  # noqa: B027
        """Set the deadline of the next calls of this thread, in monotonic seconds."""

    def find(self, run: Sequence[Block], generation: int) -> None:
        """Set the statuses of blocks, to OK, MISS, or why the state is unknown; raise nothing.

        Only stores that take queries have it.
        """
        raise NotImplementedError

    @abstractmethod
    def read(self, run: Sequence[Block], generation: int) -> None:
        """Fill the blocks' views and set their statuses, to OK, MISS, CORRUPT or UNAVAILABLE.

        Raises
        ------
        OSError
            If the medium reports an error; the blocks are then read one by one.
        """

    @abstractmethod
    def write(self, run: Sequence[Block], generation: int) -> None:
        """Store the bytes in the blocks' views and set their statuses.

        Raises
        ------
        OSError
            If the medium reports an error; the blocks are then written one by one.
        """

    def run_length(self, blocks: Sequence[Block], start: int, stop: int) -> int:
        """Return how many blocks from `start` on move in one call; by default adjacent slots."""
        end = start + 1
        while end < stop and blocks[end].slot == blocks[end - 1].slot + 1:
            end += 1
        return end - start

    def chore(self, offset: int, data: bytes) -> None:
        """Write bytes to the store's table, if it has one."""
        raise NotImplementedError
