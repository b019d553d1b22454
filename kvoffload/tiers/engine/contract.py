"""The contracts of the parts of a tier.

`ComposedTier` joins its `Jobs` and a `Medium`, which has the location of every key and starts the
threads that move blocks, the pool. A local medium has an index, which decides the locations; a
shared one has verdicts, which are valid for some time. Threads move blocks between a region and a
store.

The pool and its stores are compiled (``kvoffload._core.io``). The threads never take the
interpreter's lock where blocks are in files or in memory. Shared media are called in Python, by
threads of Python that take their work from the same queues: sums, seals and copies need no lock
there, either.

The terms are those of the glossary in ``base``.

Jobs
    ``Pool.submit`` takes a job's blocks. Threads take *runs* of blocks, not jobs: blocks of one job
    that are adjacent in the store, up to 8 MiB, move in one call. Reads go first, and two threads
    of more than two never write, so that writes cannot hold reads up.
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import State, Status
from kvoffload.tiers.namespace import Namespace
from kvoffload.tiers.region import Region

if TYPE_CHECKING:
    from .jobs import Job, Jobs

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

OK, MISS = np.int8(Status.OK), np.int8(Status.MISS)
HIT, ABSENT, UNKNOWN = int(State.HIT), int(State.MISS), int(State.UNKNOWN)
"""Statuses and states, as they are compared per block."""

MOVING = -1
"""Status of an unfinished block; no entry has it."""


# -- media ----------------------------------------------------------------------------------------


class Medium(ABC):
    """The place of a tier's blocks: what it knows of their keys, and the threads that move them.

    Keys are stored keys here.

    Attributes
    ----------
    jobs : Jobs
        The tier's.
    namespace : Namespace
        The namespace of the bytes.
    asks : bool
        Whether the place may have keys that are not known here.
    direct : bool
        Whether blocks move without a copy; set once there are threads.
    place : str
        Its name in logs and `repr`; may be empty.

    Notes
    -----
    Thread-safety: callers serialise.
    """

    asks = False
    direct = False
    place = ""

    def __init__(self, jobs: Jobs, namespace: Namespace) -> None:
        self.jobs = jobs
        self.namespace = namespace

    # -- keys --------------------------------------------------------------------------------

    @abstractmethod
    def known(self, key: bytes) -> int:
        """Return the known `State` of a key."""

    def states(self, keys: list[bytes]) -> npt.NDArray[np.int8]:
        """Return the known state of keys, ``(n,)`` int8, a `State` each."""
        return np.array([self.known(key) for key in keys], np.int8)

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
    def settle(self, job: Job, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        """Record the results of a job's blocks.

        `statuses` are those of `job.keys`, and `counts` has the number of each.
        """

    @abstractmethod
    def touch(self, keys: list[bytes]) -> None:
        """Mark blocks as recently used, last key first."""

    def release(self, keys: list[bytes]) -> None:  # noqa: B027
        """Let blocks leave before all others, if it is decided here which blocks leave.

        Blocks that several sessions share stay.
        """

    def served_at_once(self, keys: list[bytes], own: set[bytes], num_last: int) -> None:  # noqa: B027
        """Do what `Tier.end_request` says."""

    @abstractmethod
    def discard(self, keys: list[bytes]) -> None:
        """Drop blocks."""

    @abstractmethod
    def forget(self) -> None:
        """Know no block any longer; the jobs have another generation. No waiting."""

    def confirm(self) -> bool:
        """Wait a moment until a `forget` holds even if power fails; return whether it does."""
        return True

    def tend(self) -> None:  # noqa: B027
        """Do periodic work; called whenever jobs were collected."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return present sizes, ``used_bytes`` and others."""

    # -- threads -----------------------------------------------------------------------------

    @abstractmethod
    def open_pool(self, region: Region) -> Any:
        """Start the threads; return their ``kvoffload._core.io.Pool``."""

    def attached(self) -> None:  # noqa: B027
        """Do the work of opening that needs threads."""

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


# -- calls ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A block in transfer between a buffer and a store.

    Attributes
    ----------
    key : bytes
        Its stored key.
    slot : int
        Where it is in the store, if an index decides that.
    views : list of memoryview
        Its buffer, for the block and its seal; none in a query.
    status : int
        `MOVING`, or the `Status` that a call has found.
    """

    key: bytes
    slot: int
    views: list[memoryview]
    status: int = field(default=MOVING, init=False)
