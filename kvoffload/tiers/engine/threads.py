"""The threads that move blocks, in Python: the ``contract`` over any store.

Structure
    One lock, `_lock`, guards the queues, the jobs and the buffers; it is never held during I/O or a
    copy. `_work` wakes threads, `_keep` the keeper. A job is in one queue while some of its blocks
    have not been taken; a thread takes a run from its front.
Invariants
    A block is taken once, by a thread (``job.next``) or, in a staged put, first by the keeper
    (``job.copied``). No thread touches the region for a job that has ended: a thread that copies to
    or from it counts itself in ``job.copying`` under the lock, and the keeper ends no job that is
    being copied. Copies are made in slices; between two of them the keeper looks at the deadlines.
Cost
    O(1) Python per block besides the store's own, under the interpreter's lock.
Why there are two
    Beside a thread that computes in Python, these threads moved .06 (puts of 160 KiB) to .69 (gets
    of 5 MiB) of the bytes per second that ``kvoffload._core.io`` moved to one slab: each change of
    threads waits up to 5 ms for the interpreter. That one knows only its own stores.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Status
from kvoffload.tiers.region import Region

from .contract import (
    CHORE,
    ENDED,
    LATE,
    MOVING,
    QUERY,
    READ,
    READ_ONLY_THREADS,
    RUN_BLOCKS,
    RUN_BYTES,
    SETTLED,
    SHORT_RUN_BYTES,
    WRITE,
    Block,
    Entry,
    Store,
)
from .transfer import SLICE_BYTES, Staging, copy, status_of

__all__ = ["Pool"]

GRACE_S = 1.0
"""Seconds that a call under way has to return when the pool closes."""
LATE_GRACE_S = 0.1
"""The same if a call has not returned by its deadline."""


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    """A job under way; `next`, `copied` and `count` are positions in `blocks`."""

    job_id: int
    op: int
    blocks: list[Block]
    _: KW_ONLY
    deadline: float
    generation: int
    run_blocks: int  # most that move in one call
    next: int = 0  # the first block that no thread has taken
    copied: int = 0  # staged puts: the first block that the keeper has not copied
    count: int = field(init=False)  # blocks that are worked on; fewer after a deadline
    in_flight: int = 0  # blocks that threads work on
    copying: int = 0  # threads that copy to or from the region now
    ended: bool = False
    late: bool = False
    taken_back: bool = False
    found: npt.NDArray[np.int8] = field(init=False)  # statuses, in order of submission

    def __post_init__(self) -> None:
        self.count = len(self.blocks)
        self.found = np.full(self.count, MOVING, np.int8)
        for block in self.blocks:
            block.job = self

    @property
    def is_over(self) -> bool:
        """Whether the region's blocks must be given back to the caller."""
        return self.taken_back or time.monotonic() >= self.deadline

    def cut(self, count: int, status: Status) -> None:
        """Work on the first `count` blocks only; give the others this status."""
        for block in self.blocks[count : self.count]:
            self.found[block.position] = status
        del self.blocks[count:]  # a hanging call keeps only its own blocks alive
        self.count = count

    def statuses(self, unfinished: Status) -> npt.NDArray[np.int8]:
        """Return the statuses so far."""
        return np.where(self.found == MOVING, np.int8(unfinished), self.found)


class Pool:
    """Threads that move blocks between a region and any store; see ``contract``."""

    def __init__(
        self,
        region: Region,
        store: Store,
        threads: int,
        staging_bytes: int = 0,
        *,
        ack_copied: bool = True,
    ) -> None:
        self._region = region
        self._store = store
        self._ack_copied = ack_copied
        self._staging = None if store.direct else Staging(staging_bytes, store.block_bytes)
        # A condition takes an RLock again even if a signal's handler raises meanwhile.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._keep = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queues: tuple[deque[_Job], ...] = (deque(), deque(), deque())  # by kind of job
        self._to_copy: deque[_Job] = deque()
        self._chores: deque[tuple[int, int, bytes]] = deque()
        self._chores_running = 0
        self._jobs: dict[int, _Job] = {}  # those that have not settled
        self._entries: deque[Entry] = deque()
        self._closing = False
        self._wake_at = math.inf  # when the keeper wakes
        self._signal = _Signal()
        self._writers = max(1, threads - READ_ONLY_THREADS)
        self._running: list[_Job | None] = [None] * threads
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True)
            for index in range(threads)
        ]
        self._threads.append(threading.Thread(target=self._keep_watch, daemon=True))
        try:
            if self._staging is not None:
                store.use(self._staging.region)
            for thread in self._threads:
                thread.start()
        except BaseException as error:
            self._end_threads()
            if isinstance(error, RuntimeError):  # no thread can be started
                raise MemoryError("no memory, or no thread, for a pool") from error
            raise

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
        generation: int,
    ) -> None:
        """Take a job."""
        each = zip(range(len(keys)), keys, slots.tolist(), ids.tolist(), strict=True)
        blocks = [Block(key, slot, block_id, i) for i, key, slot, block_id in each]
        blocks.sort(key=attrgetter("slot"))
        made = _Job(
            job,
            op,
            blocks,
            deadline=time.monotonic() + timeout_s,
            generation=generation,
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
            # A woken thread waits for the lock. The job is queued last: otherwise an exception
            # could leave it there with all threads asleep.
            staged_put = self._staging is not None and op == WRITE
            if staged_put or made.deadline < self._wake_at:
                self._keep.notify_all()
                self._wake_at = min(self._wake_at, made.deadline)
            if staged_put:
                self._to_copy.append(made)
            else:
                self._work.notify_all()
                self._queues[op].append(made)

    def cancel(self, job: int) -> bool:
        """Take a job back; unfinished blocks are UNAVAILABLE."""
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

    def chore(self, job: int, offset: int, data: bytes) -> None:
        """Write bytes to the store's table, in a thread."""
        with self._lock:
            if self._closing:
                self._tell(Entry(job, CHORE, np.array([Status.UNAVAILABLE], np.int8)))
                return
            self._queue_chore(job, offset, data)

    def poll(self) -> deque[Entry]:
        """Return the queue of entries, oldest first; the caller removes what it processes."""
        self._signal.clear()  # first: later entries set it again
        return self._entries

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return, or `notify` is called."""
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
        _let_go(self._lock)
        _let_go(self._signal.lock)
        with self._lock:
            while (self._jobs or self._chores_left()) and time.monotonic() < until:
                self._idle.wait(until - time.monotonic())
            self._closing = True
            self._chores.clear()
            for job in list(self._jobs.values()):
                while job.copying:
                    self._idle.wait()
                if job.job_id in self._jobs:
                    self._give_up(job)
            self._work.notify_all()
            self._keep.notify_all()
            late = any(job is not None and job.is_over for job in self._running)
            until = max(until, time.monotonic() + (LATE_GRACE_S if late else GRACE_S))
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False  # a thread that returns later uses the signal
        self._signal.close()
        return True

    def abandon(self) -> None:
        """Forget the threads, which a forked child does not have."""
        self._threads = []
        self._signal.abandon()

    def _end_threads(self) -> None:
        """End the threads that were started and have had no work."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._keep.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._signal.close()

    def _run_blocks(self, size: int) -> int:
        """Return the most blocks of a job that move in one call."""
        each = self._store.slot_bytes
        most = size * each // (2 * len(self._running))
        most = min(max(most, SHORT_RUN_BYTES), RUN_BYTES) // each
        return max(1, min(most, RUN_BLOCKS))

    # -- jobs, under the lock ----------------------------------------------------------------

    def _stuck(self, op: int) -> bool:
        """Return whether every thread that could serve a job works on a late one."""
        now = time.monotonic()
        threads = self._running[: self._writers] if op == WRITE else self._running
        return all(job is not None and job.deadline < now for job in threads)

    def _queue_chore(self, job: int, offset: int, data: bytes) -> None:
        """Queue a chore as the last step: otherwise an exception could leave threads asleep."""
        self._work.notify_all()
        self._chores.append((job, offset, data))

    def _chores_left(self) -> int:
        """Return the number of unfinished chores."""
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
        """End a job that is not being copied, a direct one only when its calls return."""
        self._drop(job, job.next, Status.UNAVAILABLE)
        if self._staging is not None and not job.ended and job.job_id in self._jobs:
            self._end(job, Status.UNAVAILABLE)

    def _end(self, job: _Job, unfinished: Status) -> None:
        """Give the region's blocks back to the caller."""
        job.ended = True
        self._tell(Entry(job.job_id, ENDED, job.statuses(unfinished)))

    def _settle_if_idle(self, job: _Job) -> None:
        staged_put = self._staging is not None and job.op == WRITE
        if job.in_flight or job.copying or job.next < job.count:
            return
        if staged_put and job.copied < job.count:
            return
        self._settle(job)

    def _settle(self, job: _Job) -> None:
        """Remove a job that no thread works on any longer, and report it."""
        del self._jobs[job.job_id]
        flags = SETTLED if job.ended else SETTLED | ENDED
        self._tell(Entry(job.job_id, flags, job.statuses(Status.FAILED)))
        self._idle.notify_all()

    def _tell(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._signal.set()

    # -- threads -----------------------------------------------------------------------------

    def _serve(self, index: int) -> None:
        """Serve queries, reads, chores and writes, in this order, until the pool closes."""
        writes = index < self._writers
        while True:
            with self._lock:
                self._running[index] = None
                while True:
                    run, chore = self._take_query() or self._take(READ), None
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
                self._running[index] = run[0] if run else None
            if run:
                self._move(*run)
            elif chore:
                self._do_chore(*chore)

    def _take_query(self) -> tuple[_Job, list[Block]] | None:
        """Take a run from the front of the queries, whose blocks use no memory; under the lock."""
        queries = self._queues[QUERY]
        if not queries:
            return None
        job = queries[0]
        run = job.blocks[job.next : min(job.count, job.next + self._store.keys_per_query)]
        job.next += len(run)
        job.in_flight += len(run)
        if job.next == job.count:
            queries.popleft()
        return job, run

    def _take(self, op: int) -> tuple[_Job, list[Block]] | None:
        """Take a run from the front of a queue; under the lock."""
        if not self._queues[op] or (op == WRITE and self._chores_left()):
            return None
        job = self._queues[op][0]
        stop = job.copied if self._staging is not None and op == WRITE else job.count
        if job.next == stop:
            return None  # the keeper has not copied more of it
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
        """Move a run, or ask for it, and account for it."""
        try:
            self._store.begin(job.deadline)
            if job.op == QUERY:
                self._store.find(run, job.generation)
            else:
                self._move_each(job, run)
        except Exception:  # noqa: BLE001 # a thread that ends would keep its job for ever
            for block in run:
                if block.status == MOVING:
                    block.status = Status.FAILED
        delivered = self._staging is None or job.op != READ or self._deliver(job, run)
        with self._lock:
            for block in run:
                lost = block.status == Status.OK and not delivered
                job.found[block.position] = Status.TIMEOUT if lost else block.status
            job.in_flight -= len(run)
            if self._staging is not None and job.op != QUERY:
                self._staging.give_back((block.buffer for block in run), put=job.op == WRITE)
                self._work.notify_all()
                self._keep.notify_all()
            self._settle_if_idle(job)

    def _move_each(self, job: _Job, run: list[Block]) -> None:
        """Move a run; if the medium reports an error, move it block by block."""

        def move(blocks: list[Block]) -> None:
            if job.op == READ:
                self._store.read(blocks, job.generation)
            else:
                self._store.write(blocks, job.generation)

        try:
            move(run)
        except OSError as error:
            for block in run:  # a bad block does not affect the others
                block.status = (
                    status_of(error) if len(run) == 1 else self._status_alone(move, block)
                )

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
            self._keep.notify_all()
            self._idle.notify_all()
        return True

    def _do_chore(self, job: int, offset: int, data: bytes) -> None:
        try:
            self._store.chore(offset, data)
            status = Status.OK
        except OSError as error:
            status = status_of(error)
        except Exception:  # noqa: BLE001 # a thread that ends would hold up every write
            status = Status.FAILED
        with self._lock:
            self._chores_running -= 1
            self._tell(Entry(job, CHORE, np.array([status], np.int8)))
            self._idle.notify_all()
            self._work.notify_all()

    # -- the keeper --------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        """End jobs at their deadlines, and copy staged puts."""
        with self._lock:
            while not self._closing:
                pause = self._wake_at - time.monotonic()
                if pause <= 0:
                    self._expire()
                elif not self._copy_some():
                    self._keep.wait(None if math.isinf(pause) else pause)

    def _expire(self) -> None:
        """End the jobs whose deadline has passed; report those whose blocks the kernel has."""
        now = time.monotonic()
        self._wake_at = math.inf
        for job in list(self._jobs.values()):
            if job.ended or job.late:
                continue
            if job.deadline > now:
                self._wake_at = min(self._wake_at, job.deadline)
                continue
            if job.copying:
                continue  # the copying thread ends it
            staged_put = self._staging is not None and job.op == WRITE
            self._drop(job, job.copied if staged_put else job.next, Status.TIMEOUT)
            if job.job_id not in self._jobs:
                continue  # it has settled
            if self._staging is not None:
                self._end(job, Status.OK if staged_put and self._ack_copied else Status.TIMEOUT)
            else:
                job.late = True
                self._tell(Entry(job.job_id, LATE, np.empty(0, np.int8)))

    def _copy_some(self) -> bool:
        """Copy blocks of the first staged put; False without such a put or a free buffer."""
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
        """End overdue jobs while one is copied; return whether its copy must stop."""
        if time.monotonic() >= self._wake_at:
            with self._lock:
                self._expire()
        return self._closing or job.is_over


def _let_go(lock: threading.RLock) -> None:
    """Release a lock that this thread still holds because a signal's handler has raised.

    The exception can come after a lock is taken and before its block begins.
    """
    with contextlib.suppress(RuntimeError):  # it is not this thread's
        while True:
            lock.release()


class _Signal:
    """A file descriptor that is readable while it is set; -1 when it is closed.

    The lock prevents writes to a descriptor that another thread has just closed and whose number
    another file may already have.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        if hasattr(os, "eventfd"):
            self.fd = self._write_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write_fd, False)

    def set(self) -> None:
        with self.lock:
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):  # it is set
                    os.write(self._write_fd, (1).to_bytes(8, sys.byteorder))

    def clear(self) -> None:
        with self.lock:
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
        with self.lock:
            self._close()

    def abandon(self) -> None:
        """Close it in a forked child, where the lock may be held forever."""
        self._close()

    def _close(self) -> None:
        fds = {self.fd, self._write_fd} - {-1}
        self.fd = self._write_fd = -1
        for fd in fds:
            os.close(fd)
