"""The contracts of the parts of a tier.

`ComposedTier` joins its `Jobs`, a `Catalog` and a `Medium`. A catalog says what is where. The index
of a local tier decides it; on a shared medium it is what was found out, and believed for some time.
A medium starts the threads that move blocks, the `Pool`, and knows how to forget. Threads move
blocks between a region and a `Store`.

A pool is built twice: in Python over any store (``threads``), and compiled over files and memory
(``kvoffload._core.io``), where the threads never take the interpreter's lock.

The words are those of the glossary in ``base``.

Jobs
    `Pool.submit` takes a job's blocks. Threads take *runs* of blocks, not jobs: blocks of one job
    that are adjacent in the store, up to `RUN_BYTES`, move in one call. Reads go first,
    and `READ_ONLY_THREADS` threads never write, so that writes cannot hold reads up.
Direct and staged
    A direct pool hands the region's memory to the store. A staged one moves blocks through buffers
    of its own: a put is copied first, by the keeper, and written from the copy; a get is read into
    a buffer, checked there and copied if its job has not ended meanwhile.
Ends
    A staged put ends when it is copied (``ack="copied"``) or stored (``ack="stored"``), a staged
    get at its deadline at the latest.
The keeper
    A thread of its own that does no I/O, and so cannot hang: it ends jobs at their deadlines and
    copies staged puts, in slices, so that no copy keeps it from ending another job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload._former import former_attribute
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
    "FORGET",
    "LATE",
    "MEET",
    "MOVING",
    "NOBODY",
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
    "Wait",
]

READ = 0
WRITE = 1
QUERY = 2
"""Kind of job beside `READ` and `WRITE`: is a block there?"""

DROP, TOUCH, FORGET, MEET = 0, 1, 2, 3
"""Kinds of chores: remove blocks, mark them as used, write the epoch, read it at the start."""
NOBODY = -1
"""Id of a chore that reports nothing."""

LATE = 1
"""Flag of an entry: the job passed its deadline and the kernel still has its blocks."""
ENDED = 2
"""The blocks of the region are the caller's again; the statuses are those of the job."""
SETTLED = 4
"""No thread works on the job any more; the statuses are those of the store."""
CHORE = 8
"""A chore was done; the one status is its own."""

MOVING = -1
"""Status of a block that is not done yet; no entry shows it."""

RUN_BYTES = 8 * 2**20
"""Bytes that one call moves at most, unless a block is larger."""
SHORT_RUN_BYTES = 2 * 2**20
"""Bytes of a run of which a job is not cut into smaller ones.

Of a larger job each thread gets two runs, up to `RUN_BYTES`: so that the sums of one are made while
the bytes of another move.
"""
RUN_BLOCKS = 1024
"""Blocks that one call moves at most."""
READ_ONLY_THREADS = 2

Wait: TypeAlias = Callable[[Callable[[], bool], float], bool]
"""Collects jobs until a condition holds, or for so many seconds; returns whether it holds."""


# -- what is where, and where the bytes are -------------------------------------------------------


class Catalog(ABC):
    """A catalog: the knowledge of a tier about keys, which are stored keys here.

    Attributes
    ----------
    asks : bool
        Whether there are keys of which only the medium knows.
    generation : int
        How often everything has been forgotten.

    Notes
    -----
    Thread-safety: callers serialise.
    """

    asks = False
    generation = 0

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Epoch of the seals that are written now."""

    @abstractmethod
    def known(self, key: bytes) -> int:
        """Return what is known about a key, a `State`."""

    @abstractmethod
    def states(self, keys: list[bytes]) -> npt.NDArray[np.int8]:
        """Return what is known about keys, ``(n,)`` int8, a `State` each."""

    @abstractmethod
    def wanted(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys of a put that are neither there nor on their way, each once."""

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
            How many at most.
        refused : dict of bytes to Status
            Those that are not stored are added, with the reason.

        Returns
        -------
        tuple
            The keys that are stored, and ``(n,)`` int64, where.
        """

    @abstractmethod
    def readable(self, keys: list[bytes]) -> list[bool]:
        """Return for each key whether it is worth a read."""

    @abstractmethod
    def pin(self, keys: list[bytes]) -> npt.NDArray[np.int64]:
        """Keep readable keys until their get settles; return ``(n,)`` int64, where they are."""

    @abstractmethod
    def is_stale(self, record: Record) -> bool:
        """Return whether everything was forgotten since a job was submitted."""

    @abstractmethod
    def settle(self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        """Record what the store did with a job's blocks.

        `statuses` are those of `record.keys`, and `counts` how many there are of each.
        """

    @abstractmethod
    def touch(self, keys: list[bytes]) -> None:
        """Mark blocks as recently used, last key first."""

    def release(self, keys: list[bytes]) -> None:  # noqa: B027
        """Let blocks leave before all others, where this decides who leaves."""

    @abstractmethod
    def discard(self, keys: list[bytes]) -> None:
        """Drop blocks."""

    @abstractmethod
    def forget(self, records: Iterable[Record]) -> None:
        """Drop everything; `records` are the jobs that have not settled."""

    def tend(self) -> None:  # noqa: B027
        """Do what is due; called whenever jobs were collected."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return present sizes, ``used_bytes`` and others."""


class Medium(ABC):
    """A medium: the place of a tier's blocks, and the threads that move them.

    Attributes
    ----------
    namespace : Namespace
        What the bytes mean.
    direct : bool
        Whether blocks move without a copy; known once there are threads.
    place : str
        What it is called in logs and `repr`; empty for none.
    """

    namespace: Namespace
    direct = False
    place = ""

    @abstractmethod
    def open_pool(self, region: Region) -> Pool:
        """Start the threads."""

    def attached(self, wait: Wait) -> None:  # noqa: B027
        """Do what could not be done without threads."""

    def forget(self) -> None:  # noqa: B027
        """Have everything forgotten that is stored; no waiting."""

    def confirm(self, wait: Wait) -> bool:  # noqa: ARG002
        """Wait a moment until the medium has confirmed the last `forget`; return whether it has."""
        return True

    @property
    def has_forgotten(self) -> bool:
        """Whether the medium has confirmed the last `forget`; no I/O, no waiting."""
        return True

    def tend(self) -> None:  # noqa: B027
        """Do what is due; called whenever jobs were collected."""

    def before_close(self) -> None:  # noqa: B027
        """Make the last use of the threads."""

    def close(self, until: float, *, has_ended: bool) -> bool:  # noqa: ARG002
        """Give files and the like back, when the threads have ended; may be called again.

        Parameters
        ----------
        until : float
            When it should have returned, monotonic seconds.
        has_ended : bool
            Whether all threads have ended; if not, what they use is kept.

        Returns
        -------
        bool
            Whether nothing is left under way.
        """
        return has_ended

    def leave(self) -> None:  # noqa: B027
        """Release everything in a forked child; tell no thread and no other process."""

    def sizes(self) -> dict[str, int]:
        """Return present sizes."""
        return {}


# -- the threads, and what they move blocks to ----------------------------------------------------


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
        epoch: int,
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
        epoch : int
            Epoch of the seals that are written.
        """

    def chore(self, job: int, offset: int, data: bytes, *, sync: bool) -> None:
        """Write bytes to the store's table, in a thread; with `sync`, until they are on the medium.

        Runs of puts that no thread has taken wait for it, so that it cannot undo what they write.
        """

    def cancel(self, job: int) -> bool:
        """Take back a job whose number a call cannot return, because it was interrupted.

        When this returns, the region's blocks are the caller's again: what no thread had taken is
        UNAVAILABLE, and what a thread is writing gets no seal. A direct read is waited for, until
        its deadline at the latest.

        Returns
        -------
        bool
            False where the pool does not have the job: it never came, or it has settled.
        """

    def poll(self) -> deque[Entry]:
        """Return what happened, oldest first: always the same queue, which the caller empties."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return, or `notify` is called."""

    def notify(self) -> None:
        """Make the file descriptor readable, and end a `wait`."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `wait` would not wait."""

    def stats(self) -> dict[str, int]:
        """Return ``late_jobs`` and ``staging_bytes``, the bytes of buffers in use."""

    def close(self, timeout_s: float) -> bool:
        """End the threads, and return whether all ended; what has not started is UNAVAILABLE.

        A call under way has a second more, or a tenth of one where it is late. An exception of a
        signal's handler ends the wait, and a second call goes on with it.
        """

    def abandon(self) -> None:
        """Forget the threads, which a forked child does not have."""


class _Job(Protocol):
    """The job of a block, as a store sees it."""

    taken_back: bool


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A block on its way between a region and a store.

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
        The block's memory, to read from or write to: the region's, or a buffer's.
    slot_views : list of memoryview
        The same with what a buffer has behind it, up to a multiple of 4096 bytes.
    buffer : int
        The staging buffer, -1 for none.
    job : object or None
        What it is a block of.
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

    place = former_attribute("Block", "place", "position")

    @property
    def taken_back(self) -> bool:
        """Whether its memory is the caller's again before its job has ended by itself."""
        return self.job is not None and self.job.taken_back

    def use(self, staging: Staging, buffer: int) -> None:
        """Lie in a staging buffer."""
        self.buffer = buffer
        self.views = [staging.view(buffer)]
        self.slot_views = staging.region.views_unchecked(buffer)


class Store(ABC):
    """A place where blocks are kept, and the calls that threads make of it.

    Attributes
    ----------
    direct : bool
        Whether it is handed the region's memory instead of buffers.
    block_bytes : int
        Bytes per block.
    slot_bytes : int
        Bytes that a block takes in the store.
    keys_per_query : int
        Keys that a query asks for at most in one call.
    """

    direct: bool
    block_bytes: int
    slot_bytes: int
    keys_per_query = 1024

    @property
    def owed(self) -> bool:
        """Whether the medium has yet to take something that no job carries.

        The threads then queue the chore `MEET` again and again until it has. Read in any thread.
        """
        return False

    def use(self, memory: Region) -> None:  # noqa: B027
        """Register the staging buffers, where a client has to know them."""

    def begin(self, deadline: float) -> None:  # noqa: B027
        """Set the deadline of the next calls of this thread, in monotonic seconds."""

    def find(self, run: Sequence[Block]) -> None:
        """Set the statuses of blocks, to OK, MISS, or why it is not known; raise nothing.

        Only stores that take queries have it.
        """
        raise NotImplementedError

    @abstractmethod
    def read(self, run: Sequence[Block]) -> None:
        """Fill the blocks' views and set their statuses, to OK, MISS, CORRUPT or UNAVAILABLE.

        Raises
        ------
        OSError
            If the medium reports an error; each block is then read alone.
        """

    @abstractmethod
    def write(self, run: Sequence[Block], epoch: int) -> None:
        """Store the bytes in the blocks' views and set their statuses.

        Raises
        ------
        OSError
            If the medium reports an error; each block is then written alone.
        """

    def run_length(self, blocks: Sequence[Block], start: int, stop: int) -> int:
        """Return how many of the blocks from `start` on move in one call; here, adjacent slots."""
        end = start + 1
        while end < stop and blocks[end].slot == blocks[end - 1].slot + 1:
            end += 1
        return end - start

    def chore(self, offset: int, data: bytes, *, sync: bool) -> None:
        """Write bytes to a table, where the store has one."""
        raise NotImplementedError
