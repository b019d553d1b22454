"""What every store past this machine has in common: an epoch, deadlines, errors, and its threads.

A medium that several processes share, and that may hang, needs three things that a local one does
not: questions that need I/O, calls that know when to give up, and one place that says which blocks
are forgotten.

Structure
    `RemotePool` is the pool of ``_io_py`` with a third kind of job, the query, whose blocks need no
    memory. Its threads call `RemoteStore.find`, `read` and `write`, which look after the epoch and
    errors and call what a medium implements: `_find`, `_fetch`, `_store` and others.
Epochs
    An epoch is a random number that lies on the medium, beside the namespace. It is part of every
    block's name and seeds its seal: a new one forgets everything at once, for every process. A
    process that finds another epoch than its own takes that one over.
Invariants
    No call outlasts its deadline where the medium's client can be told one. Nothing that a client
    or a server says is logged: texts of errors may hold credentials.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import _io_py
from ._io_py import Block, Store
from .base import Status
from .namespace import Namespace
from .pool import MOVING, READ, WRITE, Entry
from .region import Region
from .seal import SEAL_BYTES, Seal

__all__ = [
    "DROP",
    "FORGET",
    "QUERY",
    "TOUCH",
    "OtherEpochError",
    "RemotePool",
    "RemoteStore",
    "pack_keys",
]

log = logging.getLogger("kvoffload.tiers")

QUERY = 2
"""Kind of job beside `READ` and `WRITE`: is a block there?"""
DROP, TOUCH, FORGET, MEET = 0, 1, 2, 3
"""Kinds of chores: remove blocks, mark them as used, write the epoch, read it at the start."""
NOBODY = 0
"""Number of a chore of which nobody is told; jobs begin at 1."""
CHORE_S = 1.0
"""Seconds that a chore has."""
EPOCH_S = 2.0
"""Seconds that reading or writing the epoch has: a job may end meanwhile, the next one has it."""
LEAST_S = 0.005
"""Seconds that a call has at least."""
LOG_S = 60.0
"""Seconds between two lines of log of the same kind."""
MAX_NAMESPACE_BYTES = 2**20
"""Bytes of the namespace's JSON that are read at most."""


class OtherEpochError(Exception):
    """Say that the medium has another epoch than a call went by.

    Attributes
    ----------
    epoch : int or None
        The medium's; None: it has none any more.
    """

    def __init__(self, epoch: int | None) -> None:
        super().__init__()
        self.epoch = epoch


class ForeignNamespaceError(Exception):
    """Say that the place of this namespace has the JSON of another one."""


class _Seen(NamedTuple):
    """What a call goes by: how often this process forgot, and the epoch."""

    generation: int
    epoch: int


class _Call(threading.local):
    """What the present thread is doing."""

    deadline = 0.0


class RemoteStore(Store):
    """Blocks on a medium that other processes share.

    A block is kept as its bytes and behind them its seal. A buffer has room for both.

    Parameters
    ----------
    name : str
        The tier's label, for logs.
    namespace : Namespace
        What the bytes mean.

    Attributes
    ----------
    blocks_per_call : int
        Blocks that a read or a write moves at most.
    keys_per_query : int
        Keys that a query asks for at most in one call.
    epoch_s : float
        Seconds that an epoch is believed before it is read again.
    adopted : int
        How often an epoch of another process was taken over.
    """

    direct = False
    blocks_per_call = 8
    keys_per_query = 1024
    epoch_s = 1.0

    def __init__(self, name: str, namespace: Namespace) -> None:
        self.name = name
        self.namespace = namespace
        self.fingerprint = namespace.fingerprint
        self.content_bytes = namespace.block_bytes
        self.block_bytes = self.slot_bytes = namespace.block_bytes + SEAL_BYTES
        self.adopted = 0
        self.late_reads = 0
        self._call = _Call()
        self._epoch_lock = threading.Lock()
        self._medium_lock = threading.Lock()  # held while an epoch is read or written
        self._seen = _Seen(0, 0)  # epoch 0: not known
        self._unsaved = False  # the epoch is of this process, and the medium may not have it
        self._read_at = -np.inf  # when the epoch was last read
        self._logged: dict[str, float] = {}

    # -- what a medium implements ------------------------------------------------------------

    @abstractmethod
    def _load_epoch(self, candidate: int) -> int:
        """Return the medium's epoch, after giving it `candidate` where it has none.

        The namespace's JSON is compared, see `_compare`, or written where there is none.
        """

    @abstractmethod
    def _save_epoch(self, epoch: int) -> None:
        """Give the medium an epoch."""

    @abstractmethod
    def _find(self, run: Sequence[Block], epoch: int) -> None:
        """Set the statuses of blocks to OK or MISS."""

    @abstractmethod
    def _fetch(self, run: Sequence[Block], epoch: int) -> None:
        """Read blocks, check them with `_check`, which sets `Block.views`, and set statuses."""

    @abstractmethod
    def _store(self, run: Sequence[Block], epoch: int) -> None:
        """Write buffers, which have bytes and seal, where there is no block; set statuses."""

    @abstractmethod
    def _drop(self, keys: Sequence[bytes], epoch: int) -> None:
        """Remove blocks."""

    def _touch(self, keys: Sequence[bytes], epoch: int) -> None:
        """Mark blocks as used, where the medium does not do so itself."""

    @abstractmethod
    def _status_of(self, error: Exception) -> Status:
        """Return what an error means for blocks of which nothing else is known."""

    def use(self, memory: Region) -> None:
        """Take note of the buffers that blocks lie in, where a client has to know them."""

    def close(self) -> None:
        """Give connections back."""

    # -- for these ---------------------------------------------------------------------------

    def seconds_left(self) -> float:
        """Return how long the present call may take."""
        return max(LEAST_S, self._call.deadline - time.monotonic())

    def _compare(self, found: bytes) -> None:
        """Refuse the JSON of another namespace.

        Raises
        ------
        ForeignNamespaceError
            If it is.
        """
        if found != self.namespace.json.encode("ascii"):
            raise ForeignNamespaceError

    def _check(self, block: Block, found: memoryview, epoch: int) -> None:
        """Let a block have the bytes that were found, if they are its own."""
        block.status = Status.CORRUPT
        if len(found) != self.block_bytes:
            return
        content = found[: self.content_bytes]
        seal = Seal.unpack(bytes(found[self.content_bytes :]), epoch)
        if seal is not None and seal == Seal.of(self.fingerprint, block.key, content):
            block.views = [content]
            block.status = Status.OK

    def say(self, what: str, level: int = logging.WARNING) -> None:
        """Log a line about the tier; the same line once a minute."""
        now = time.monotonic()
        if now - self._logged.get(what, -LOG_S) >= LOG_S:
            self._logged[what] = now
            log.log(level, "tier %r %s", self.name, what)

    # -- epochs ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch as far as it is known, 0 where it is not."""
        return self._seen.epoch

    def forget(self) -> None:
        """Go by a new epoch from now on; a chore gives it to the medium."""
        with self._epoch_lock:
            self._seen = _Seen(self._seen.generation + 1, new_epoch())
            self._unsaved = True

    def _known_epoch(self) -> _Seen:
        """Return what to go by, which the medium knows too."""
        now = time.monotonic()
        seen, unsaved = self._seen, self._unsaved
        if seen.epoch and not unsaved and now - self._read_at <= self.epoch_s:
            return seen
        deadline = self._call.deadline
        with self._medium_lock:  # or an older epoch could be written after a newer one
            self.begin(max(deadline, now + EPOCH_S))
            with self._epoch_lock:
                seen, unsaved = self._seen, self._unsaved
            if unsaved:
                self._save_epoch(seen.epoch)
                with self._epoch_lock:
                    if self._seen == seen:
                        self._unsaved = False
                self._read_at = now
            elif not seen.epoch or now - self._read_at > self.epoch_s:
                self._adopt(seen, self._load_epoch(new_epoch()))
                self._read_at = now
            self.begin(deadline)
            return self._seen

    def _adopt(self, seen: _Seen, found: int | None) -> None:
        """Go by the epoch that the medium has, unless what was gone by changed meanwhile."""
        with self._epoch_lock:
            if self._seen != seen or self._unsaved or seen.epoch == found:
                return
            self._seen = _Seen(seen.generation, found or 0)
            self.adopted += seen.epoch != 0

    # -- what threads call -------------------------------------------------------------------

    def begin(self, deadline: float) -> None:
        """Say until when the calls of this thread may take, seconds of the monotonic clock."""
        self._call.deadline = deadline

    def run_length(self, blocks: Sequence[Block], start: int, stop: int) -> int:  # noqa: ARG002
        """Return how many of the blocks from `start` on move in one call."""
        return min(stop - start, self.blocks_per_call)

    def find(self, run: Sequence[Block]) -> None:
        """Set the statuses of blocks, to OK, MISS, or why it is not known."""
        self._do(QUERY, run, None)

    def read(self, run: Sequence[Block]) -> None:
        """Read blocks and set their statuses; no error is raised."""
        self._do(READ, run, None)

    def write(self, run: Sequence[Block], epoch: int) -> None:
        """Write blocks and set their statuses; no error is raised.

        `epoch` is the number of times that this process had forgotten when they were put.
        """
        if time.monotonic() > self._call.deadline:
            _set_rest(run, Status.TIMEOUT)  # a server that hangs must not keep the buffers
            return
        self._do(WRITE, run, epoch)

    def _do(self, op: int, run: Sequence[Block], generation: int | None) -> None:
        try:
            for _ in range(2):
                seen = self._known_epoch()
                if generation is not None and generation != seen.generation:
                    break  # a put that was forgotten: it is as good as done
                try:
                    self._act(op, run, seen.epoch)
                except OtherEpochError as error:
                    self._adopt(seen, error.epoch)
                else:
                    return
            _set_rest(run, Status.OK if op == WRITE else Status.MISS)
        except Exception as error:  # noqa: BLE001 # a thread that ends would keep its job for ever
            _set_rest(run, self._meaning(error))

    def _act(self, op: int, run: Sequence[Block], epoch: int) -> None:
        if op == QUERY:
            self._find(run, epoch)
        elif op == READ:
            self._fetch(run, epoch)
        else:
            for block in run:
                content = block.views[0][: self.content_bytes]
                seal = Seal.of(self.fingerprint, block.key, content)
                block.views[0][self.content_bytes :] = seal.pack(epoch)
            self._store(run, epoch)

    def _meaning(self, error: Exception) -> Status:
        if isinstance(error, ForeignNamespaceError):
            self.say("is refused: its place belongs to another namespace", logging.ERROR)
            return Status.FAILED
        status = self._status_of(error)
        # The text of an error may hold an address with a password, or what a server made up.
        self.say(f"met {type(error).__name__}: {status.name}")
        return status

    def chore(self, offset: int, data: bytes, sync: bool) -> None:  # noqa: ARG002
        """Do a chore: `offset` says which, `data` has the keys.

        Raises
        ------
        OSError
            If it could not be done.
        """
        self.begin(time.monotonic() + CHORE_S)
        try:
            epoch = self._known_epoch().epoch
            keys = _unpack_keys(data)
            if offset == DROP:
                self._drop(keys, epoch)
            elif offset == TOUCH:
                self._touch(keys, epoch)
        except Exception as error:
            self._meaning(error)
            raise OSError(errno.EIO, "a chore could not be done") from error


def new_epoch() -> int:
    """Return a number of 64 bits that nobody else has drawn; never 0."""
    return int.from_bytes(os.urandom(8), "big") | 1


def _set_rest(run: Sequence[Block], status: Status) -> None:
    for block in run:
        if block.status == MOVING:
            block.status = status


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Return stored keys, 41 bytes at most each, as one string of bytes."""
    return b"".join(bytes([len(key)]) + key for key in keys)


def _unpack_keys(data: bytes) -> list[bytes]:
    keys, place = [], 0
    while place < len(data):
        stop = place + 1 + data[place]
        keys.append(data[place + 1 : stop])
        place = stop
    return keys


class RemotePool(_io_py.Pool):
    """Threads that move blocks between a region and a `RemoteStore`, and ask it for blocks.

    Parameters
    ----------
    region : Region
        The caller's memory.
    store : RemoteStore
        Where blocks are kept.
    threads : int
        Number of threads, >= 1, besides the keeper.
    staging_bytes : int
        Bytes of buffers.
    ack_copied : bool
        Whether a put ends when it is copied.
    """

    _store: RemoteStore

    def __init__(
        self,
        region: Region,
        store: RemoteStore,
        threads: int,
        staging_bytes: int,
        ack_copied: bool = True,
    ) -> None:
        super().__init__(region, store, threads, staging_bytes, ack_copied)
        if self._staging is not None:
            store.use(self._staging.region)
        with self._lock:  # the threads have nothing yet, and look again when something comes
            self._queues: tuple[deque[_io_py._Job], ...] = (deque(), deque(), deque())  # type: ignore[assignment]

    def query(self, job: int, keys: Sequence[bytes], timeout_s: float) -> None:
        """Take a query."""
        nowhere: npt.NDArray[np.int64] = np.zeros(len(keys), np.int64)
        self.submit(job, QUERY, keys, nowhere, nowhere, timeout_s=timeout_s, epoch=0)

    def meet(self) -> None:
        """Have the epoch read, in a thread; nobody is told."""
        self.chore(NOBODY, MEET, b"", False)

    def _tell(self, entry: Entry) -> None:
        if entry.job != NOBODY:
            super()._tell(entry)

    def _stuck(self, op: int) -> bool:
        return super()._stuck(READ if op == QUERY else op)

    def _take(self, op: int) -> tuple[_io_py._Job, list[Block]] | None:
        """Take a run from the front of a queue, queries before reads; under the lock."""
        queries = self._queues[QUERY] if len(self._queues) > QUERY else None
        if op != READ or not queries:
            return super()._take(op)
        job = queries[0]
        run = job.blocks[job.next : min(job.count, job.next + self._store.keys_per_query)]
        job.next += len(run)
        job.in_flight += len(run)
        if job.next == job.count:
            queries.popleft()
        return job, run

    def _move(self, job: _io_py._Job, run: list[Block]) -> None:
        self._store.begin(job.deadline)
        if job.op != QUERY:
            super()._move(job, run)
            return
        self._store.find(run)
        with self._lock:
            for block in run:
                job.found[block.place] = block.status
            job.in_flight -= len(run)
            self._settle_if_idle(job)
