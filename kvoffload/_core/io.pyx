"""The pool of threads that move blocks between a region and files, memory or calls; XXH3-64.

The contract is in ``kvoffload.tiers.engine.contract``. All work off the caller's thread is in
``io.h``, which never takes the interpreter's lock, besides the calls of a `CallStore`. This file
converts Python's arguments to its structures and its events to tuples.

The interpreter's lock is released only to wait, to end, and for long sums: beside a busy thread it
takes 5 ms to get it back, and the pool's own lock is never held for more than a few microseconds.
"""

from collections import deque
from threading import Thread
from time import monotonic

import numpy as np

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from posix.unistd cimport getpid

__all__ = [
    "CallStore", "FileStore", "MemoryStore", "Pool", "read_files", "valid_records", "xxh3_64"
]

cdef enum:
    NOGIL_FROM = 65536  # bytes from which a sum is computed without the interpreter's lock
    MAX_FILES = 64
    SIGNALS_NS = 50000000  # between two checks for signals in a wait


def xxh3_64(data, seed=0):
    """Return the XXH3-64 of a buffer; release the interpreter's lock for a large one."""
    cdef Py_buffer view
    cdef uint64_t start = seed
    cdef uint64_t result
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len < NOGIL_FROM:
            result = kvo_xxh3_64(<const uint8_t*>view.buf, <size_t>view.len, start)
        else:
            with nogil:
                result = kvo_xxh3_64(<const uint8_t*>view.buf, <size_t>view.len, start)
    finally:
        PyBuffer_Release(&view)
    return result


def read_files(int folder, list paths, list buffers, int64_t size):
    """Fill buffers from files of `size` bytes, in one call without the interpreter's lock.

    A path is the name of a folder below an open one, and that of a file in it, as bytes. Links are
    not followed, and nothing is waited for but the file system. Return for each file its status, or
    the negative of an error number, and when it was changed, in seconds.
    """
    cdef const char* names[MAX_FILES]
    cdef uint8_t* memory[MAX_FILES]
    cdef int statuses[MAX_FILES]
    cdef int64_t changed[MAX_FILES]
    cdef Py_ssize_t count = len(paths)
    cdef Py_ssize_t index
    cdef size_t nbytes = 0
    cdef uint8_t[::1] buffer
    if count > MAX_FILES:
        raise ValueError(f"paths must be at most {MAX_FILES}, got {count}")
    for index in range(count):
        names[index] = paths[index]
        buffer = buffers[index]
        memory[index], nbytes = &buffer[0], <size_t>buffer.shape[0]
        changed[index] = 0
    with nogil:
        for index in range(count):
            statuses[index] = kvo_read_file(
                folder, names[index], memory[index], nbytes, size, &changed[index]
            )
    return [(statuses[index], changed[index]) for index in range(count)]


cdef int fill_region(kvo_region* target, object region) except -1:
    """Describe a ``kvoffload.tiers.Region``; the caller frees ``parts``."""
    cdef object parts = region.parts
    cdef Py_ssize_t index
    target.base = <uint8_t*><size_t>region.address
    target.num_parts = len(parts)
    target.block_bytes = region.block_bytes
    target.parts = <kvo_part*>malloc(len(parts) * sizeof(kvo_part))
    if target.parts == NULL:
        raise MemoryError
    for index in range(len(parts)):
        target.parts[index].offset, target.parts[index].stride, target.parts[index].nbytes = (
            parts[index]
        )
    return 0


cdef class Store:
    """A place in which the threads of a pool keep blocks; see the subclasses."""

    cdef kvo_store store
    cdef object target  # of calls

    cdef int set_fingerprint(self, bytes fingerprint) except -1:
        if len(fingerprint) > <Py_ssize_t>sizeof(self.store.fingerprint):
            raise ValueError("fingerprint must have at most 64 bytes")
        memcpy(self.store.fingerprint, PyBytes_AS_STRING(fingerprint), len(fingerprint))
        self.store.fingerprint_bytes = len(fingerprint)
        return 0


cdef class MemoryStore(Store):
    """Blocks in a second region: slot i is its block i.

    `sums` ((slots,) uint64) has the sum of the bytes in each slot and is kept up to date.
    """

    cdef object region, kept_sums
    cdef uint64_t[::1] sums
    cdef uint8_t[::1] writing  # slots that are being written

    def __cinit__(self, region, fingerprint, sums):
        self.region = region
        self.sums = self.kept_sums = sums
        self.writing = np.zeros(len(sums), np.uint8)
        fill_region(&self.store.memory, region)
        self.set_fingerprint(fingerprint)
        self.store.kind = KVO_MEMORY
        self.store.direct = 1
        self.store.block_bytes = self.store.slot_bytes = region.block_bytes
        self.store.sums = &self.sums[0]
        self.store.written = &self.writing[0]

    def __dealloc__(self):
        free(self.store.memory.parts)


cdef class FileStore(Store):
    """Blocks in the slots of a file, their seals in the table of another; neither is closed here.

    `direct` passes the region's memory to the kernel. `slot_bytes` is the stride of slots, and
    `records_offset` the offset of slot 0's seal in the table. Two arrays are kept up to date:
    `sums` ((slots,) uint64), the sum of the bytes in each slot, and `written` ((slots,) uint8),
    whether the table may have a seal of the slot.
    """

    cdef uint64_t[::1] sums
    cdef uint8_t[::1] written

    def __cinit__(
        self,
        data_fd,
        table_fd,
        *,
        direct,
        block_bytes,
        slot_bytes,
        records_offset,
        fingerprint,
        sums,
        written,
    ):
        self.sums = sums
        self.written = written
        self.set_fingerprint(fingerprint)
        self.store.kind = KVO_FILE
        self.store.direct = bool(direct)
        self.store.data_fd = data_fd
        self.store.table_fd = table_fd
        self.store.block_bytes = block_bytes
        self.store.slot_bytes = slot_bytes
        self.store.records_offset = records_offset
        self.store.sums = &self.sums[0]
        self.store.written = &self.written[0]


cdef class CallStore(Store):
    """Calls of an object, which threads of Python make, several at once.

    What it keeps of a block are its `block_bytes` and its seal behind them, in a buffer of
    `slot_bytes`. A call gets at most `blocks_per_call` blocks, or `keys_per_query` keys. The pool
    makes the seals of blocks that are stored, and compares those of blocks that are read.

    ``target.call(op, keys, slots, buffers, *, deadline, generation)`` fills the buffers of blocks,
    stores what they hold or, without buffers, finds out what is there, by a time in monotonic
    seconds. It returns a status per key; all have failed if it raises.
    ``target.chore(kind, data)`` does what `Pool.chore` was given, and returns a status.
    """

    def __cinit__(
        self, target, *, block_bytes, slot_bytes, fingerprint, blocks_per_call, keys_per_query
    ):
        self.target = target
        self.set_fingerprint(fingerprint)
        self.store.kind = KVO_CALLS
        self.store.block_bytes = block_bytes
        self.store.slot_bytes = slot_bytes
        self.store.blocks_per_call = blocks_per_call
        self.store.keys_per_query = keys_per_query


@cython.no_gc_clear  # what the threads use is kept until they have ended
cdef class Pool:
    """Threads that move blocks between a region and a store; see ``tiers.engine.contract``.

    `threads`, >= 1, does not count the keeper. A staged pool has buffers, the blocks of the region
    `staging`, and `ack_copied` says whether a put ends when it is copied. Callers serialise, except
    for `notify` and `wait`.
    """

    cdef kvo_pool* pool
    cdef kvo_store store
    cdef object kept  # objects that the threads use
    cdef object news  # the queue that `poll` returns
    cdef object target  # of a `CallStore`
    cdef object buffers  # its buffers, as memory
    cdef list threads  # those of Python
    cdef bint ended
    cdef bint stopped  # a close has begun
    cdef int pid

    def __cinit__(self, region, Store store not None, threads, staging=None, *, ack_copied=True):
        cdef kvo_region described
        cdef int num_threads = threads
        cdef uint8_t* memory = NULL
        cdef int64_t num_buffers = 0
        cdef bint copied = ack_copied
        self.store, self.target = store.store, store.target
        if not self.store.direct:
            memory = <uint8_t*><size_t>staging.address
            num_buffers = staging.num_blocks
            self.buffers = memoryview(staging.array)
        self.kept = (region, store, staging)
        self.news = deque()
        self.threads = []
        self.pid = getpid()
        fill_region(&described, region)
        with nogil:
            self.pool = kvo_pool_new(
                &described, &self.store, num_threads, memory, num_buffers, copied
            )
        free(described.parts)
        if self.pool == NULL:
            raise MemoryError("no memory, or no thread, for a pool")

    def __init__(self, region, store, threads, staging=None, *, ack_copied=True):
        if self.store.kind != KVO_CALLS:
            return
        self.threads = [
            Thread(target=self._serve, args=(index,), daemon=True) for index in range(threads)
        ]
        started = 0
        try:
            for thread in self.threads:
                thread.start()
                started += 1
        except BaseException as error:
            kvo_pool_lacks(self.pool, threads - started)
            del self.threads[started:]
            self.close(0.0)
            if isinstance(error, RuntimeError):  # no thread can be started
                raise MemoryError("no memory, or no thread, for a pool") from error
            raise

    def _serve(self, int index):
        """Make calls until the pool closes."""
        cdef kvo_worker* worker = self.pool.workers + index
        cdef bint works = False
        while True:
            with nogil:
                if works:
                    kvo_done(worker)
                works = kvo_next(worker)
            if not works:
                return
            if worker.chore != NULL:
                self._do_chore(worker.chore)
            else:
                self._call(worker)

    cdef int _do_chore(self, kvo_chore* chore) except -1:
        chore.status = KVO_STATUS_FAILED
        try:
            data = (<char*>chore.data)[:chore.nbytes]
            chore.status = self.target.chore(chore.offset, data)
        except BaseException:  # a thread that ends would hold up every write
            pass
        return 0

    cdef int _call(self, kvo_worker* worker) except -1:
        """Have Python move a run; blocks to which it gives no status have failed."""
        cdef kvo_block* block
        cdef Py_ssize_t index, start
        cdef Py_ssize_t nbytes = self.store.block_bytes + KVO_SEAL_BYTES
        cdef kvo_job* job = worker.running
        cdef int status
        for index in range(worker.count):
            worker.run[index].status = KVO_STATUS_FAILED
        try:
            keys, slots, values = [], [], []
            for index in range(worker.count):
                block = worker.run + index
                keys.append((<char*>block.key)[:block.key_length])
                slots.append(block.slot)
                if job.op != KVO_QUERY:
                    start = block.buffer * self.store.slot_bytes
                    values.append(self.buffers[start:start + nbytes])
            deadline = monotonic() + (job.deadline - kvo_now()) * 1e-9
            found = self.target.call(
                job.op, keys, slots, values, deadline=deadline, generation=job.generation
            )
            for index in range(worker.count):
                status = found[index]
                if KVO_STATUS_OK <= status < KVO_STATUS_FAILED:
                    worker.run[index].status = status
        except BaseException:  # a thread that ends would keep its job for ever
            pass
        return 0

    def __dealloc__(self):
        # Use no module's names: at the interpreter's exit they may be gone.
        if self.pool == NULL or self.pid != getpid():
            return  # in a forked child the state of the threads is undefined
        if not self.ended:
            with nogil:
                self.ended = kvo_pool_ended(self.pool, kvo_pool_stop(self.pool, 0))
                if self.ended:
                    kvo_pool_join(self.pool)
        if self.ended:
            kvo_pool_free(self.pool)
        else:
            Py_INCREF(self.kept)  # a thread that returns later uses it

    def submit(self, job, op, list keys, slots, ids, *, timeout_s, generation):
        """Take a job; it ends within `timeout_s` seconds, or is late.

        `job` is a number that no job under way has, `op` READ, WRITE or, of calls, QUERY, which
        uses neither `slots` nor `ids`: ``(n,)`` int64, where each block is in the store and in the
        region, checked by the caller. `keys` are stored keys, at least one, and `generation` is the
        number of the job's.
        """
        cdef int64_t[::1] store_slots = slots
        cdef int64_t[::1] region_ids = ids
        cdef Py_ssize_t size = len(keys)
        cdef Py_ssize_t index
        cdef bytes key
        cdef kvo_block* block
        cdef kvo_job* made
        if size < 1 or store_slots.shape[0] != size or region_ids.shape[0] != size:
            raise ValueError("a job must have as many slots and ids as keys, and at least one")
        if op == KVO_QUERY and self.store.kind != KVO_CALLS:
            raise ValueError("op must be a read or a write of files and memory, got a query")
        made = kvo_job_new(job, op, size, <int64_t>(timeout_s * 1e9), generation)
        if made == NULL:
            raise MemoryError
        for index in range(size):
            key = <bytes>keys[index]
            block = made.blocks + index
            block.slot = store_slots[index]
            block.id = region_ids[index]
            block.index = <int32_t>index
            block.buffer = -1
            block.status = -1
            block.key_length = <uint8_t>PyBytes_GET_SIZE(key)
            memcpy(block.key, PyBytes_AS_STRING(key), block.key_length)
            block.seed = kvo_seed(&self.store, block.key, block.key_length)
        kvo_submit(self.pool, made)

    def cancel(self, job):
        """Take back a job whose number a call cannot return, because it was interrupted.

        When this returns, the region's blocks are the caller's again: blocks that no thread had
        taken are UNAVAILABLE, and those being written get no seal. This waits for a direct read,
        until its deadline at the latest. Return False if the pool does not have the job: it was
        never submitted, or it has settled.
        """
        cdef int64_t job_id = job
        cdef int found = 2
        while found == 2:
            with nogil:
                found = kvo_cancel(self.pool, job_id, kvo_now() + SIGNALS_NS)
            if found == 2:
                PyErr_CheckSignals()
        return found != 0

    def chore(self, job, offset, bytes data):
        """Write bytes to the store's table in a thread, or have the target's ``chore`` called.

        Runs of puts that no thread has taken wait for it, so that it cannot undo what they write.
        """
        cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(data)
        if kvo_submit_chore(self.pool, job, offset, start, len(data)) < 0:
            raise MemoryError

    def poll(self):
        """Return the entries, oldest first: always the same queue, which the caller empties.

        An entry is an event in the life of a job: its number, flags added up (LATE, ENDED, SETTLED
        or CHORE), and statuses, ``(n,)`` int8 in the order of submission; empty with LATE.
        """
        cdef kvo_entry* entry
        cdef kvo_entry* following
        cdef int8_t[::1] target
        entry = kvo_poll(self.pool)
        while entry != NULL:
            following = entry.next
            statuses = np.empty(entry.count, np.int8)
            if entry.count:
                target = statuses
                memcpy(&target[0], entry.statuses, entry.count)
            self.news.append((entry.job_id, entry.flags, statuses))
            kvo_entry_free(entry)
            entry = following
        return self.news

    def wait(self, timeout_s):
        """Wait until `poll` has something to return, or `notify` is called."""
        cdef int64_t nanoseconds = <int64_t>(timeout_s * 1e9)
        cdef bint news = kvo_signal_wait(self.pool, 0)
        if not news and nanoseconds > 0:
            with nogil:
                news = kvo_signal_wait(self.pool, nanoseconds)
        return news

    def notify(self):
        """Make the file descriptor readable, and end a `wait`."""
        kvo_signal_set(self.pool)

    def fileno(self):
        """Return a file descriptor that is readable when `wait` would not wait."""
        return self.pool.signal_fd

    def stats(self):
        """Return ``late_jobs`` and ``staging_bytes``, the bytes of buffers in use."""
        cdef int64_t late_jobs, staging_bytes
        kvo_pool_stats(self.pool, &late_jobs, &staging_bytes)
        return {"late_jobs": late_jobs, "staging_bytes": staging_bytes}

    def close(self, timeout_s):
        """End the threads and return whether all ended; blocks not started are UNAVAILABLE.

        At the first call, a call under way has another second, or a tenth of one if it is late. An
        exception of a signal handler ends the wait, and a second call continues it.
        """
        cdef int64_t until = kvo_now() + <int64_t>(timeout_s * 1e9)
        cdef bint is_over = self.ended
        while not is_over:
            with nogil:
                is_over = kvo_pool_rest(self.pool, earlier(until, kvo_now() + SIGNALS_NS))
                is_over = is_over or kvo_now() >= until
            PyErr_CheckSignals()
        if not self.ended:
            if not self.stopped:
                with nogil:
                    until = kvo_pool_stop(self.pool, until)
            self.stopped = True
            is_over = False
        while not is_over:
            with nogil:
                is_over = kvo_pool_ended(self.pool, earlier(until, kvo_now() + SIGNALS_NS))
                if is_over:
                    kvo_pool_join(self.pool)
            self.ended = is_over
            is_over = is_over or kvo_now() >= until
            PyErr_CheckSignals()
        if self.ended:
            for thread in self.threads:
                thread.join()
            kvo_signal_close(self.pool)
        else:
            Py_INCREF(self.kept)  # a thread that returns later uses it
        return self.ended

    def abandon(self):
        """Forget the threads, which a forked child does not have."""
        kvo_signal_close(self.pool)


cdef int64_t earlier(int64_t one, int64_t other) noexcept nogil:
    return one if one < other else other


def valid_records(table, block_bytes, generation):
    """Read the seals of a table, 64 bytes per slot, for blocks of a length and of a generation.

    Return the slots with such a seal ((n,) int64), their stored keys, the sums of their bytes ((n,)
    uint64), and the number of slots with neither such a seal nor zeros.
    """
    cdef const uint8_t[::1] records = table
    cdef Py_ssize_t num_slots = records.shape[0] // KVO_SEAL_BYTES
    cdef Py_ssize_t slot, found = 0, others = 0
    cdef int64_t nbytes = block_bytes
    cdef uint64_t era = generation
    cdef const uint8_t* seal
    cdef uint8_t length
    cdef list keys = []
    slots = np.empty(num_slots, np.int64)
    sums = np.empty(num_slots, np.uint64)
    cdef int64_t[::1] slot_view = slots
    cdef uint64_t[::1] sum_view = sums
    for slot in range(num_slots):
        seal = &records[slot * KVO_SEAL_BYTES]
        if kvo_seal_valid(seal, nbytes, era):
            length = seal[3]
            if length == KVO_DIGESTED_BYTES:
                keys.append((<const char*>seal)[8:8 + KVO_KEY_BYTES] + b"\0")
            else:
                keys.append((<const char*>seal)[8:8 + length])
            slot_view[found] = slot
            sum_view[found] = kvo_little64(seal + 48)
            found += 1
        elif not is_blank(seal):
            others += 1
    return slots[:found].copy(), keys, sums[:found].copy(), others


cdef bint is_blank(const uint8_t* seal) noexcept:
    cdef Py_ssize_t index
    for index in range(KVO_SEAL_BYTES):
        if seal[index]:
            return False
    return True
