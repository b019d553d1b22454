"""Belady's choice, compiled; see ``_belady_py`` for the rule, the argument and the twin."""

from libc.stdint cimport int64_t, uint8_t, uint32_t

cimport numpy as cnp

from kvoffload._core.memory cimport discard, resize
from kvoffload.policies._miniature_c cimport data_of

cnp.import_array()


cdef struct Uses:
    int64_t* items          # positions of next uses, the latest on top
    Py_ssize_t size


cdef inline void put(Uses* uses, Py_ssize_t gap, int64_t use) noexcept nogil:
    """Put a use into a gap, or above it."""
    cdef Py_ssize_t parent
    while gap:
        parent = (gap - 1) // 2
        if uses.items[parent] >= use:
            break
        uses.items[gap] = uses.items[parent]
        gap = parent
    uses.items[gap] = use


cdef inline void sink(Uses* uses, Py_ssize_t gap, int64_t use) noexcept nogil:
    """Put a use into a gap, or below it."""
    cdef Py_ssize_t child = 2 * gap + 1
    while child < uses.size:
        if child + 1 < uses.size and uses.items[child + 1] > uses.items[child]:
            child += 1
        if uses.items[child] <= use:
            break
        uses.items[gap] = uses.items[child]
        gap = child
        child = 2 * gap + 1
    uses.items[gap] = use


cdef void drop_passed(Uses* uses, int64_t position) noexcept nogil:
    """Keep the uses that are to come."""
    cdef Py_ssize_t index, kept = 0
    for index in range(uses.size):
        if uses.items[index] > position:
            uses.items[kept] = uses.items[index]
            kept += 1
    uses.size = kept
    for index in range(kept // 2 - 1, -1, -1):
        sink(uses, index, uses.items[index])


def belady(blocks, next_asked, Py_ssize_t unique_blocks, int64_t capacity):
    """Return the hits, and the blocks stored; see the twin."""
    cdef const uint32_t* block = <const uint32_t*>data_of("blocks", blocks, cnp.NPY_UINT32)
    cdef const int64_t* asked = <const int64_t*>data_of("next_asked", next_asked, cnp.NPY_INT64)
    cdef int64_t position, following, end = len(blocks), size = 0, hits = 0, stored = 0
    cdef Py_ssize_t room = min(2 * capacity + 1024, end + 1)
    cdef uint8_t[::1] in_cache = bytearray(max(1, unique_blocks))
    cdef Uses uses
    if len(next_asked) != end:
        raise ValueError(f"next_asked must have {end} positions, got {len(next_asked)}")
    for position in range(end):
        if block[position] >= unique_blocks or not position < asked[position] <= end:
            raise ValueError(f"blocks and their next uses must be of the trace, at {position}")
    uses.size = 0
    uses.items = <int64_t*>resize(NULL, <size_t>(room + 1) * sizeof(int64_t))
    if uses.items == NULL:
        raise MemoryError()
    for position in range(end):
        following = asked[position]
        if in_cache[block[position]]:  # until a use that the manager is asked for: this one
            hits += 1
            if following == end:
                in_cache[block[position]] = 0
                size -= 1
                continue
        elif following == end:
            continue
        elif size < capacity:
            size += 1
            stored += 1
            in_cache[block[position]] = 1
        elif capacity and uses.items[0] > following:
            in_cache[block[uses.items[0]]] = 0
            in_cache[block[position]] = 1
            stored += 1
            sink(&uses, 0, following)
            continue
        else:
            continue
        if uses.size == room:
            drop_passed(&uses, position)
        uses.size += 1
        put(&uses, uses.size - 1, following)
    discard(uses.items)
    return hits, stored
