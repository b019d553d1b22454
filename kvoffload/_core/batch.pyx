"""Scratch memory of batches; see ``batch.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport discard, resize

cdef enum:
    LEAST_ROOM = 128


cdef bint batch_ensure(Batch* batch, Py_ssize_t size) noexcept:
    cdef Py_ssize_t room = max(size + size // 2, <Py_ssize_t>LEAST_ROOM)
    cdef uint64_t* hashes
    if batch.room >= size:
        return True
    hashes = <uint64_t*>resize(batch.hashes, room * (sizeof(uint64_t) + 3 * sizeof(uint32_t)))
    if hashes == NULL:
        return False
    batch.hashes = hashes
    batch.num_chosen = 0
    batch.size = 0
    batch.slots = <uint32_t*>(hashes + room)
    batch.chosen = batch.slots + room
    batch.places = batch.slots + 2 * room
    batch.room = room
    return True


cdef void batch_close(Batch* batch) noexcept:
    discard(batch.hashes)
    memset(batch, 0, sizeof(Batch))
