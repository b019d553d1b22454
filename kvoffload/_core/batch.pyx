"""Scratch memory of batches; see ``batch.pxd``."""

from libc.string cimport memset

from kvoffload._core.items cimport check_items, list_items
from kvoffload._core.memory cimport discard, grow, resize

from kvoffload._checks import as_batch, batch_error

cdef enum:
    LEAST_ROOM = 128
    ENTRY_BYTES = 24    # of one entry in each of the five arrays


cdef void lay_out(Batch* batch, uint64_t* arrays, Py_ssize_t room) noexcept:
    """Divide an allocation among the five arrays, which grow together or not at all."""
    batch.hashes = arrays
    batch.node_ids = <uint32_t*>(arrays + room)
    batch.chosen = batch.node_ids + room
    batch.indexes = batch.node_ids + 2 * room
    batch.drawn = batch.node_ids + 3 * room
    batch.room = room


cdef bint batch_ensure(Batch* batch, Py_ssize_t size) noexcept:
    cdef uint64_t room = batch.room
    if batch.room >= size:
        return True
    if not grow(<void**>&batch.hashes, &room, <uint64_t>size, ENTRY_BYTES, LEAST_ROOM):
        return False
    batch.num_chosen = 0
    batch.size = 0
    lay_out(batch, batch.hashes, <Py_ssize_t>room)
    return True


cdef bint batch_fit(Batch* batch, Py_ssize_t size) noexcept:
    cdef Batch former = batch[0]
    cdef uint64_t* arrays
    if batch.room >= size:
        return True
    arrays = <uint64_t*>resize(NULL, <size_t>size * ENTRY_BYTES)
    if arrays == NULL:
        return False
    lay_out(batch, arrays, size)
    if batch.size:
        memcpy(batch.hashes, former.hashes, <size_t>batch.size * sizeof(uint64_t))
        memcpy(batch.node_ids, former.node_ids, <size_t>batch.size * sizeof(uint32_t))
        memcpy(batch.chosen, former.chosen, <size_t>batch.num_chosen * sizeof(uint32_t))
    discard(former.hashes)
    return True


cdef void batch_extend(Batch* batch, PyObject** items, const Batch* more) noexcept:
    if more.size:  # arrays of no size are null
        memcpy(batch.node_ids + batch.size, more.node_ids, <size_t>more.size * sizeof(uint32_t))
    batch.items = items
    batch.size += more.size
    batch.num_hints = batch.size
    batch.found_at = 0


cdef void batch_close(Batch* batch) noexcept:
    discard(batch.hashes)
    memset(batch, 0, sizeof(Batch))


cdef list checked_list(object hashes, str name):
    cdef list batch
    if type(hashes) is not list:
        return as_batch(hashes, name)
    batch = <list>hashes
    if not check_items(batch):
        raise batch_error(batch, name)
    return batch


cdef int batch_open(Batch* batch, list hashes) except -1:
    if not batch_ensure(batch, len(hashes)):
        raise MemoryError()
    batch_set(batch, list_items(hashes), len(hashes))
    return 0
