"""The threads that move blocks, in Python: the contract of ``pool`` over any store.

Structure
    One lock, `_lock`, guards the queues, the jobs and the buffers; it is never held during I/O or a
    copy. `_work` wakes threads, `_keep` the keeper. A job lies in one queue while blocks of it have
    not been taken; a thread takes a run from its front.
Invariants
    A block is taken once, by a thread (``job.next``) or, in a staged put, first by the keeper
    (``job.copied``). Nobody touches the region for a job that has ended: who copies to or from it
    counts itself in ``job.copying`` under the lock, and the keeper ends no job that is being
    copied. Copies are made in slices; between two of them the deadlines are looked after.
Cost
    O(1) Python per block besides the store's own, under the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from .base import Status
from .pool import (
    CHORE,
    ENDED,
    LATE,
    MOVING,
    READ,
    READ_ONLY_THREADS,
    RUN_BLOCKS,
    RUN_BYTES,
    SETTLED,
    SHORT_RUN_BYTES,
    WRITE,
    Entry,
)
from .region import ALIGNMENT, Region
from .seal import SEAL_BYTES, Seal, seed_of, xxh3_64
from .staging import Staging

__all__ = ["Block", "FileStore", "MemoryStore", "Pool", "Store", "valid_records"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
# Linux and macOS take no more views in one call.
MAX_VIEWS = 1024


class Block:
    """A block on its way.

    Attributes
    ----------
    key : bytes
        Its stored key.
    slot, block_id : int
        Where it is in the store and in the region.
    place : int
        Its position in the job.
    status : int
        `MOVING`, or its `Status`.
    views : list of memoryview
        The block's memory, to read from or write to: the region's, or a buffer's.
    slot_views : list of memoryview
        The same with what a buffer has behind it, up to a multiple of 4096 bytes.
    buffer : int
        The staging buffer, -1 for none.
    job : _Job or None
        What it is a block of.
    """

    __slots__ = (
        "block_id",
        "buffer",
        "job",
        "key",
        "place",
        "slot",
        "slot_views",
        "status",
        "views",
    )

    def __init__(self, key: bytes, slot: int, block_id: int, place: int) -> None:
        self.key = key
        self.slot = slot
        self.block_id = block_id
        self.place = place
        self.status = MOVING
        self.views: list[memoryview] = []
        self.slot_views: list[memoryview] = []
        self.buffer = -1
        self.job: _Job | None = None

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
    """Where blocks are kept: what a thread of a pool does with a run of them.

    Attributes
    ----------
    direct : bool
        Whether it is handed the region's memory instead of buffers.
    block_bytes : int
        Bytes per block.
    slot_bytes : int
        Bytes that a block takes in the store.
    """

    direct: bool
    block_bytes: int
    slot_bytes: int

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

    def chore(self, offset: int, data: bytes, sync: bool) -> None:
        """Write bytes to a table, where the store has one."""
        raise NotImplementedError


class MemoryStore(Store):
    """Blocks in a second region.

    Parameters
    ----------
    region : Region
        The memory; slot i is its block i.
    fingerprint : bytes
        The namespace.
    sums : numpy.ndarray
        ``(slots,)`` uint64: the sum of the bytes in each slot; kept up to date.
    """

    direct = True

    def __init__(self, region: Region, fingerprint: bytes, sums: npt.NDArray[np.uint64]) -> None:
        self.region = region
        self.block_bytes = self.slot_bytes = region.block_bytes
        self.fingerprint = fingerprint
        self.sums = sums
        self.writing = np.zeros(len(sums), np.uint8)  # slots that are being written

    def read(self, run: Sequence[Block]) -> None:
        """Copy the bytes and check the copy; again, where the slot was written meanwhile."""
        for block in run:
            slot, seed = block.slot, seed_of(self.fingerprint, block.key)
            while True:
                writing, expected = self.writing[slot], self.sums[slot]
                copy(self.region.views_unchecked(slot), block.views)
                if sum_of(block.views, seed) == int(expected):
                    block.status = Status.OK
                    break
                if not (writing or self.writing[slot]) and self.sums[slot] == expected:
                    block.status = Status.CORRUPT
                    break
                time.sleep(REWRITE_S)

    def write(self, run: Sequence[Block], epoch: int) -> None:  # noqa: ARG002
        """Copy the bytes and keep their sum."""
        for block in run:
            slot = block.slot
            self.writing[slot] = 1
            found = sum_of(block.views, seed_of(self.fingerprint, block.key))
            copy(block.views, self.region.views_unchecked(slot))
            self.sums[slot] = found
            self.writing[slot] = 0
            block.status = Status.UNAVAILABLE if block.taken_back else Status.OK


class FileStore(Store):
    """Blocks in the slots of a file, their seals in the table of another.

    Parameters
    ----------
    data_fd, table_fd : int
        The files; not closed here.
    direct : bool
        Whether the region's memory is handed to the kernel.
    block_bytes, slot_bytes : int
        Bytes of a block, and from slot to slot.
    records_offset : int
        Where the seal of slot 0 lies in the table.
    fingerprint : bytes
        The namespace.
    sums : numpy.ndarray
        ``(slots,)`` uint64: the sum of the bytes in each slot; kept up to date.
    written : numpy.ndarray
        ``(slots,)`` uint8: whether the table may have a seal of the slot; kept up to date.
    """

    def __init__(
        self,
        data_fd: int,
        table_fd: int,
        *,
        direct: bool,
        block_bytes: int,
        slot_bytes: int,
        records_offset: int,
        fingerprint: bytes,
        sums: npt.NDArray[np.uint64],
        written: npt.NDArray[np.uint8],
    ) -> None:
        self.data_fd = data_fd
        self.table_fd = table_fd
        self.direct = direct
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes
        self.records_offset = records_offset
        self.fingerprint = fingerprint
        self.sums = sums
        self.written = written

    def read(self, run: Sequence[Block]) -> None:
        """Read a run in one call; what does not match its sum loses its seal too."""
        views = [view for block in run for view in block.slot_views]
        got = transfer(os.preadv, self.data_fd, views, run[0].slot * self.slot_bytes)
        for place, block in enumerate(run):
            whole = got >= (place + 1) * self.slot_bytes
            if whole and self._sum(block) == int(self.sums[block.slot]):
                block.status = Status.OK
            else:
                block.status = Status.CORRUPT
                with contextlib.suppress(OSError):  # it would be found corrupt again
                    self._clear([block])

    def write(self, run: Sequence[Block], epoch: int) -> None:
        """Clear the seals, write the bytes, write the seals: in this order, and without a sync."""
        self._clear(run)
        records = []
        for block in run:
            seal = Seal(block.key, self.block_bytes, self._sum(block))
            records.append(seal.pack(epoch))
            self.sums[block.slot] = seal.sum
        views = [view for block in run for view in block.slot_views]
        place = run[0].slot * self.slot_bytes
        if transfer(os.pwritev, self.data_fd, views, place) < len(run) * self.slot_bytes:
            raise OSError(errno.EIO, "the file system wrote nothing")
        if run[0].taken_back:  # what was summed and what was written need not be one
            for block in run:
                block.status = Status.UNAVAILABLE
            return
        for block in run:
            self.written[block.slot] = 1
        self._write_table(b"".join(records), self._record_offset(run[0].slot))
        for block in run:
            block.status = Status.OK

    def chore(self, offset: int, data: bytes, sync: bool) -> None:
        """Write bytes to the table."""
        self._write_table(data, offset)
        if sync:
            os.fsync(self.table_fd)

    def _sum(self, block: Block) -> int:
        return sum_of(block.views, seed_of(self.fingerprint, block.key))

    def _record_offset(self, slot: int) -> int:
        return self.records_offset + slot * SEAL_BYTES

    def _clear(self, run: Sequence[Block]) -> None:
        """Clear the seals of adjacent slots, where there may be some."""
        first, last = run[0].slot, run[-1].slot
        if self.written[first : last + 1].any():
            self._write_table(bytes((last + 1 - first) * SEAL_BYTES), self._record_offset(first))
            self.written[first : last + 1] = 0

    def _write_table(self, data: bytes, offset: int) -> None:
        if transfer(os.pwritev, self.table_fd, [memoryview(data)], offset) < len(data):
            raise OSError(errno.EIO, "the file system wrote nothing")


class _Job:
    """A job on its way; `next`, `copied` and `count` are positions in `blocks`."""

    __slots__ = (
        "blocks",
        "copied",
        "copying",
        "count",
        "deadline",
        "ended",
        "epoch",
        "found",
        "in_flight",
        "late",
        "next",
        "number",
        "op",
        "run_blocks",
        "taken_back",
    )

    def __init__(
        self,
        number: int,
        op: int,
        blocks: list[Block],
        *,
        deadline: float,
        epoch: int,
        run_blocks: int,
    ) -> None:
        self.number = number
        self.op = op
        self.blocks = blocks
        self.deadline = deadline
        self.epoch = epoch
        self.next = 0  # the first block that no thread has taken
        self.copied = 0  # staged puts: the first block that the keeper has not copied
        self.count = len(blocks)  # blocks that are worked on; fewer after a deadline
        self.in_flight = 0  # blocks that threads work on
        self.copying = 0  # threads that copy to or from the region now
        self.ended = False
        self.late = False
        self.taken_back = False
        self.found = np.full(len(blocks), MOVING, np.int8)  # statuses, in order of submission
        self.run_blocks = run_blocks  # that move in one call at most
        for block in blocks:
            block.job = self

    @property
    def is_over(self) -> bool:
        """Whether the region's blocks have to be the caller's again."""
        return self.taken_back or time.monotonic() >= self.deadline

    def cut(self, count: int, status: Status) -> None:
        """Work on the first `count` blocks only; the others have this status."""
        for block in self.blocks[count : self.count]:
            self.found[block.place] = status
        self.count = count

    def statuses(self, unfinished: Status) -> npt.NDArray[np.int8]:
        """Return the statuses so far."""
        return np.where(self.found == MOVING, np.int8(unfinished), self.found)


class Pool:
    """Threads that move blocks between a region and any store; see ``kvoffload.tiers.pool``.

    Parameters
    ----------
    region : Region
        The caller's memory.
    store : Store
        Where blocks are kept.
    threads : int
        Number of threads, >= 1, besides the keeper.
    staging_bytes : int
        Bytes of buffers of a staged pool.
    ack_copied : bool
        Whether a staged put ends when it is copied.
    """

    def __init__(
        self,
        region: Region,
        store: Store,
        threads: int,
        staging_bytes: int = 0,
        ack_copied: bool = True,
    ) -> None:
        self._region = region
        self._store = store
        self._ack_copied = ack_copied
        self._staging = None if store.direct else Staging(staging_bytes, store.block_bytes)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._keep = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queues: tuple[deque[_Job], deque[_Job]] = (deque(), deque())  # reads, writes
        self._to_copy: deque[_Job] = deque()
        self._chores: deque[tuple[int, int, bytes, bool]] = deque()
        self._chores_running = 0
        self._jobs: dict[int, _Job] = {}  # those that have not settled
        self._entries: deque[Entry] = deque()
        self._closing = False
        self._wake_at = math.inf  # when the keeper looks again
        self._signal = _Signal()
        self._writers = max(1, threads - READ_ONLY_THREADS)
        self._running: list[_Job | None] = [None] * threads
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), daemon=True)
            for number in range(threads)
        ]
        self._threads.append(threading.Thread(target=self._keep_watch, daemon=True))
        for thread in self._threads:
            thread.start()

    # -- the caller's side -------------------------------------------------------------------

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
        """Take a job."""
        places = zip(range(len(keys)), keys, slots.tolist(), ids.tolist(), strict=True)
        blocks = [Block(key, slot, block_id, place) for place, key, slot, block_id in places]
        blocks.sort(key=attrgetter("slot"))
        made = _Job(
            job,
            op,
            blocks,
            deadline=time.monotonic() + timeout_s,
            epoch=epoch,
            run_blocks=self._run_blocks(len(blocks)),
        )
        if self._staging is None:
            region = self._region
            for block in blocks:
                block.views = block.slot_views = region.views_unchecked(block.block_id)
        with self._lock:
            self._jobs[job] = made
            if self._closing or self._stuck(op):
                made.cut(0, Status.UNAVAILABLE)
                self._settle(made)
                return
            # Who is woken waits for the lock; the job is in a queue last, or an exception could
            # leave it there with everyone asleep.
            staged_put = self._staging is not None and op == WRITE
            if staged_put or made.deadline < self._wake_at:
                self._keep.notify()
                self._wake_at = min(self._wake_at, made.deadline)
            if staged_put:
                self._to_copy.append(made)
            else:
                self._work.notify_all()
                self._queues[op].append(made)

    def cancel(self, job: int) -> bool:
        """Take a job back: what is not done is UNAVAILABLE."""
        with self._lock:
            taken_back = self._jobs.get(job)
            if taken_back is None:
                return False
            taken_back.taken_back = True
            if taken_back in self._to_copy:
                self._to_copy.remove(taken_back)
            while taken_back.copying:
                self._idle.wait()
            if job in self._jobs and not taken_back.ended:
                self._give_up(taken_back)
            if self._staging is None and taken_back.op == READ:
                while job in self._jobs and time.monotonic() < taken_back.deadline:
                    self._idle.wait(taken_back.deadline - time.monotonic())
            return True

    def chore(self, job: int, offset: int, data: bytes, sync: bool) -> None:
        """Write bytes to the store's table, in a thread."""
        with self._lock:
            if self._closing:
                self._tell(Entry(job, CHORE, np.array([Status.UNAVAILABLE], np.int8)))
                return
            self._work.notify_all()
            self._chores.append((job, offset, data, sync))

    def poll(self) -> deque[Entry]:
        """Return what happened, oldest first; the caller removes what it has taken in."""
        self._signal.clear()  # first: what comes from now on sets it again
        return self._entries

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return, or someone called `notify`."""
        return self._signal.wait(timeout_s)

    def notify(self) -> None:
        """Make the file descriptor readable, and end a `wait`."""
        self._signal.set()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `wait` would not wait."""
        return self._signal.fd

    def stats(self) -> dict[str, int]:
        """Return ``late_jobs`` and ``staging_bytes``."""
        with self._lock:
            now = time.monotonic()
            late = sum(job.in_flight > 0 and job.deadline < now for job in self._jobs.values())
            held = 0 if self._staging is None else self._staging.nbytes_held
        return {"late_jobs": late, "staging_bytes": held}

    def close(self, timeout_s: float) -> bool:
        """End the threads."""
        until = time.monotonic() + timeout_s
        with self._lock:
            while (self._jobs or self._chores_left()) and time.monotonic() < until:
                self._idle.wait(until - time.monotonic())
            self._closing = True
            self._chores.clear()
            for job in list(self._jobs.values()):
                while job.copying:
                    self._idle.wait()
                if job.number in self._jobs:
                    self._give_up(job)
            self._work.notify_all()
            self._keep.notify()
            late = any(job is not None and job.is_over for job in self._running)
            until = max(until, time.monotonic() + (LATE_GRACE_S if late else GRACE_S))
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False  # who comes back later uses the signal
        self._signal.close()
        return True

    def abandon(self) -> None:
        """Forget the threads, in a forked child, where there are none."""
        self._threads = []
        self._signal.abandon()

    def _run_blocks(self, size: int) -> int:
        """Return how many blocks of a job move in one call at most."""
        each = self._store.slot_bytes
        most = size * each // (2 * len(self._running))
        most = min(max(most, SHORT_RUN_BYTES), RUN_BYTES) // each
        return max(1, min(most, RUN_BLOCKS))

    # -- jobs, under the lock ----------------------------------------------------------------

    def _stuck(self, op: int) -> bool:
        """Tell whether every thread that could serve a job works on a late one."""
        now = time.monotonic()
        threads = self._running if op == READ else self._running[: self._writers]
        return all(job is not None and job.deadline < now for job in threads)

    def _chores_left(self) -> int:
        """Return the number of chores that are not done."""
        return len(self._chores) + self._chores_running

    def _drop(self, job: _Job, count: int, status: Status) -> None:
        """Work on the first `count` blocks only."""
        if self._staging is not None and job.op == WRITE:
            copied = job.blocks[count : job.copied]
            self._staging.give_back((block.buffer for block in copied), put=True)
            job.copied = min(job.copied, count)
        job.cut(count, status)
        if job in self._to_copy and job.copied == job.count:
            self._to_copy.remove(job)
        if job in self._queues[job.op] and job.next == job.count:
            self._queues[job.op].remove(job)
        self._settle_if_idle(job)

    def _give_up(self, job: _Job) -> None:
        """End a job that nobody copies: at once where it is staged, else when its calls return."""
        self._drop(job, job.next, Status.UNAVAILABLE)
        if self._staging is not None and not job.ended and job.number in self._jobs:
            self._end(job, Status.UNAVAILABLE)

    def _end(self, job: _Job, unfinished: Status) -> None:
        """Give the region's blocks back to the caller."""
        job.ended = True
        self._tell(Entry(job.number, ENDED, job.statuses(unfinished)))

    def _settle_if_idle(self, job: _Job) -> None:
        staged_put = self._staging is not None and job.op == WRITE
        if job.in_flight or job.copying or job.next < job.count:
            return
        if staged_put and job.copied < job.count:
            return
        self._settle(job)

    def _settle(self, job: _Job) -> None:
        """Be done with a job."""
        del self._jobs[job.number]
        flags = SETTLED if job.ended else SETTLED | ENDED
        self._tell(Entry(job.number, flags, job.statuses(Status.FAILED)))
        self._idle.notify_all()

    def _tell(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._signal.set()

    # -- threads -----------------------------------------------------------------------------

    def _serve(self, number: int) -> None:
        """Do what comes, reads first, until the pool closes."""
        writes = number < self._writers
        while True:
            with self._lock:
                self._running[number] = None
                while True:
                    run, chore = self._take(READ), None
                    if not run and writes:
                        if self._chores:
                            chore = self._chores.popleft()
                            self._chores_running += 1
                        else:
                            run = self._take(WRITE)
                    if run or chore:
                        break
                    if self._closing:
                        return
                    self._work.wait()
                self._running[number] = run[0] if run else None
            if run:
                self._move(*run)
            elif chore:
                self._do_chore(*chore)

    def _take(self, op: int) -> tuple[_Job, list[Block]] | None:
        """Take a run from the front of a queue; under the lock."""
        if not self._queues[op] or (op == WRITE and self._chores_left()):
            return None
        job = self._queues[op][0]
        stop = job.copied if self._staging is not None and op == WRITE else job.count
        if job.next == stop:
            return None  # the keeper has copied no more of it
        count = self._store.run_length(job.blocks, job.next, min(stop, job.next + job.run_blocks))
        if self._staging is not None and op == READ:
            buffers = self._staging.take(count, put=False)
            if not buffers:
                return None
            count = len(buffers)
            for block, buffer in zip(job.blocks[job.next :], buffers, strict=False):
                block.use(self._staging, buffer)
        run = job.blocks[job.next : job.next + count]
        job.next += count
        job.in_flight += count
        if job.next == job.count:
            self._queues[op].popleft()
        return job, run

    def _move(self, job: _Job, run: list[Block]) -> None:
        """Move a run and account for it."""

        def move(blocks: list[Block]) -> None:
            if job.op == READ:
                self._store.read(blocks)
            else:
                self._store.write(blocks, job.epoch)

        try:
            move(run)
        except OSError as error:
            for block in run:  # a bad block spoils no other
                block.status = (
                    status_of(error) if len(run) == 1 else self._status_alone(move, block)
                )
        delivered = self._staging is None or job.op == WRITE or self._deliver(job, run)
        with self._lock:
            for block in run:
                lost = block.status == Status.OK and not delivered
                job.found[block.place] = Status.TIMEOUT if lost else block.status
            job.in_flight -= len(run)
            if self._staging is not None:
                self._staging.give_back((block.buffer for block in run), put=job.op == WRITE)
                self._work.notify_all()
                self._keep.notify()
            self._settle_if_idle(job)

    def _status_alone(self, move: Callable[[list[Block]], None], block: Block) -> int:
        try:
            move([block])
        except OSError as error:
            return status_of(error)
        return block.status

    def _deliver(self, job: _Job, run: list[Block]) -> bool:
        """Copy blocks from buffers to the region; False if their job has ended."""

        def must_stop() -> bool:
            return job.is_over or self._closing

        with self._lock:
            if job.ended or must_stop():
                return False
            job.copying += 1
        for block in run:
            if block.status != Status.OK:
                continue
            target = self._region.views_unchecked(block.block_id)
            if must_stop() or not copy(block.views, target, must_stop):
                block.status = Status.TIMEOUT
        with self._lock:
            job.copying -= 1
            self._wake_at = min(self._wake_at, job.deadline)
            self._keep.notify()
            self._idle.notify_all()
        return True

    def _do_chore(self, job: int, offset: int, data: bytes, sync: bool) -> None:
        try:
            self._store.chore(offset, data, sync)
            status = Status.OK
        except OSError as error:
            status = status_of(error)
        with self._lock:
            self._chores_running -= 1
            self._tell(Entry(job, CHORE, np.array([status], np.int8)))
            self._idle.notify_all()
            self._work.notify_all()

    # -- the keeper --------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        """End jobs at their deadlines, and copy staged puts, until the pool closes."""
        with self._lock:
            while not self._closing:
                pause = self._wake_at - time.monotonic()
                if pause <= 0:
                    self._expire()
                elif not self._copy_some():
                    self._keep.wait(None if math.isinf(pause) else pause)

    def _expire(self) -> None:
        """End the jobs whose deadline has passed; where the kernel has blocks, say so."""
        now = time.monotonic()
        self._wake_at = math.inf
        for job in list(self._jobs.values()):
            if job.ended or job.late:
                continue
            if job.deadline > now:
                self._wake_at = min(self._wake_at, job.deadline)
                continue
            if job.copying:
                continue  # who copies says when it is done
            staged_put = self._staging is not None and job.op == WRITE
            self._drop(job, job.copied if staged_put else job.next, Status.TIMEOUT)
            if job.number not in self._jobs:
                continue  # it has settled
            if self._staging is not None:
                self._end(job, Status.OK if staged_put and self._ack_copied else Status.TIMEOUT)
            else:
                job.late = True
                self._tell(Entry(job.number, LATE, np.empty(0, np.int8)))

    def _copy_some(self) -> bool:
        """Copy blocks of the first staged put; False if there is none, or no buffer."""
        if self._staging is None or not self._to_copy:
            return False
        job = self._to_copy[0]
        most = min(job.count - job.copied, max(1, SLICE_BYTES // self._store.slot_bytes))
        buffers = self._staging.take(most, put=True)
        if not buffers:
            return False
        blocks = job.blocks[job.copied : job.copied + len(buffers)]
        job.copying += 1
        copied = 0
        self._lock.release()
        try:
            for block, buffer in zip(blocks, buffers, strict=True):
                block.use(self._staging, buffer)
                source = self._region.views_unchecked(block.block_id)
                if not copy(source, block.views, lambda: self._must_stop(job)):
                    break
                copied += 1
        finally:
            self._lock.acquire()
        job.copying -= 1
        if self._closing or job.taken_back:
            copied = 0
        self._staging.give_back(buffers[copied:], put=True)
        if copied:
            if job.copied == 0:
                self._queues[WRITE].append(job)
            job.copied += copied
            self._work.notify_all()
        if job.copied == job.count:
            self._to_copy.popleft()
            if self._ack_copied:
                self._end(job, Status.OK)
        self._wake_at = min(self._wake_at, job.deadline)
        self._settle_if_idle(job)
        self._idle.notify_all()
        return True

    def _must_stop(self, job: _Job) -> bool:
        """Look after deadlines while a job is copied; tell whether it may not be any longer."""
        if time.monotonic() >= self._wake_at:
            with self._lock:
                self._expire()
        return self._closing or job.is_over


GRACE_S = 1.0
"""Seconds that a call under way has to return when the pool closes."""
LATE_GRACE_S = 0.1
"""The same, where one has not returned by its deadline."""
SLICE_BYTES = 2**20
"""Bytes that are copied between two looks at the deadlines, at most."""
REWRITE_S = 0.0001
"""Seconds after which a block that is being written is read again."""


class _Signal:
    """A file descriptor that is readable while it is set; -1 when it is closed.

    The lock keeps a thread from writing to a descriptor that another has closed meanwhile, whose
    number may be that of another file by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        if hasattr(os, "eventfd"):
            self.fd = self._write_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write_fd, False)

    def set(self) -> None:
        with self._lock:
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):  # it is set
                    os.write(self._write_fd, (1).to_bytes(8, sys.byteorder))

    def clear(self) -> None:
        with self._lock:
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    while len(os.read(self.fd, 4096)) == 4096:
                        pass

    def wait(self, timeout_s: float) -> bool:
        fd = self.fd
        if fd < 0:
            return False
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(max(0, math.ceil(timeout_s * 1000))))

    def close(self) -> None:
        with self._lock:
            self._close()

    def abandon(self) -> None:
        """Close it in a forked child, where the lock may be held for good."""
        self._close()

    def _close(self) -> None:
        fds = {self.fd, self._write_fd} - {-1}
        self.fd = self._write_fd = -1
        for fd in fds:
            os.close(fd)


def status_of(error: OSError) -> Status:
    """Return what an error of the operating system means for a block."""
    return Status.FULL if error.errno in NO_SPACE else Status.FAILED


def sum_of(views: Sequence[memoryview], seed: int) -> int:
    """Return the XXH3-64 of bytes that lie in several pieces."""
    return xxh3_64(views[0] if len(views) == 1 else b"".join(views), seed)


def copy(
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    must_stop: Callable[[], bool] | None = None,
) -> bool:
    """Copy bytes between two lists of pieces, as many as both have; without the lock, if large.

    `must_stop` is asked after every `SLICE_BYTES`; return False where it ended the copy.
    """
    pieces = [np.frombuffer(target, np.uint8) for target in targets]
    most = sys.maxsize if must_stop is None else SLICE_BYTES
    left = most
    for source in sources:
        data = np.frombuffer(source, np.uint8)
        while len(data) and pieces:
            count = min(len(data), len(pieces[0]), left)
            np.copyto(pieces[0][:count], data[:count])
            data = data[count:]
            pieces[0] = pieces[0][count:]
            if not len(pieces[0]):
                del pieces[0]
            left -= count
            if not left:
                if must_stop is not None and must_stop():
                    return False
                left = most
    return True


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
) -> int:
    """Read or write views at an offset, going on after short calls; return the bytes moved.

    Fewer than asked for only at the end of a file.
    """
    done = 0
    rest = list(views)
    while rest:
        moved = call(fd, rest[:MAX_VIEWS], offset + done)
        done += moved
        if moved == 0 or (call is os.preadv and moved % ALIGNMENT):
            break  # a short read of a file ends where the file does
        while rest and moved >= len(rest[0]):
            moved -= len(rest.pop(0))
        if moved:
            rest[0] = rest[0][moved:]
    return done


def valid_records(
    table: bytes | memoryview, block_bytes: int, epoch: int
) -> tuple[npt.NDArray[np.int64], list[bytes], npt.NDArray[np.uint64], int]:
    """Read the seals of a table.

    Parameters
    ----------
    table : bytes or memoryview
        64 bytes per slot.
    block_bytes : int
        The length of block that they must be for.
    epoch : int
        The epoch that they must be of.

    Returns
    -------
    slots : numpy.ndarray
        ``(n,)`` int64: the slots with a valid seal.
    keys : list of bytes
        Their stored keys.
    sums : numpy.ndarray
        ``(n,)`` uint64: the sums of their bytes.
    others : int
        Slots with something else than such a seal or zeros.
    """
    slots, keys, sums, others = [], [], [], 0
    for slot in range(len(table) // SEAL_BYTES):
        record = bytes(table[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES])
        seal = Seal.unpack(record, epoch)
        if seal is not None and seal.nbytes == block_bytes:
            slots.append(slot)
            keys.append(seal.key)
            sums.append(seal.sum)
        elif any(record):
            others += 1
    return np.array(slots, np.int64), keys, np.array(sums, np.uint64), others
