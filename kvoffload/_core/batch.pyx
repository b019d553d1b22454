"""Scratch memory of batches; see ``batch.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport discard, resize

cdef enum:
    LEAST_ROOM = 128
    ARRAYS = 3


cdef bint batch_ensure(Batch* batch, Py_ssize_t size) noexcept:
    cdef Py_ssize_t room = max(size + size // 2, <Py_ssize_t>LEAST_ROOM)
    cdef uint32_t* slots
    if batch.room >= size:
        return True
    slots = <uint32_t*>resize(batch.slots, ARRAYS * room * sizeof(uint32_t))
    if slots == NULL:
        return False
    batch.slots = slots
    batch.chosen = slots + room
    batch.places = slots + 2 * room
    batch.room = room
    return True


cdef void batch_close(Batch* batch) noexcept:
    discard(batch.slots)
    memset(batch, 0, sizeof(Batch))
