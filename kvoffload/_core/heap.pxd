"""Heaps of nodes, ordered by a rank, then by position.

Structure
    Binary heaps in arrays. Entries neither change nor leave from the middle. Which of them are
    dead only the owner knows: it drops them when they surface, or together, to make room.
Cost
    push, pop O(log size); order O(size).
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from kvoffload._core.index cimport kvo_require
from kvoffload._core.memory cimport discard, resize

cdef enum:
    SMALLEST_HEAP = 64

cdef struct Entry:
    uint64_t position
    uint32_t rank
    uint32_t node_id

cdef struct Heap:
    Entry* entries          # NULL: never grown
    uint64_t size           # dead entries included
    uint64_t room
    uint64_t start          # the position where the cyclic order of a rank begins


cdef inline bint comes_before(
    const Heap* heap, const Entry* one, const Entry* other
) noexcept nogil:
    if one.rank != other.rank:
        return one.rank < other.rank
    return one.position - heap.start < other.position - heap.start


cdef inline void heap_sink(Heap* heap, uint64_t gap, Entry entry) noexcept nogil:
    """Put an entry into a gap, or below it."""
    cdef Entry* entries = heap.entries
    cdef uint64_t child = 2 * gap + 1
    while child < heap.size:
        if child + 1 < heap.size and comes_before(heap, &entries[child + 1], &entries[child]):
            child += 1
        if not comes_before(heap, &entries[child], &entry):
            break
        entries[gap] = entries[child]
        gap = child
        child = 2 * gap + 1
    entries[gap] = entry


cdef inline void heap_push(Heap* heap, Entry entry) noexcept nogil:
    """Add an entry; there is room."""
    cdef uint64_t gap = heap.size, parent
    kvo_require(gap < heap.room, "the heap has room for an entry")
    heap.size += 1
    while gap:
        parent = (gap - 1) // 2
        if not comes_before(heap, &entry, &heap.entries[parent]):
            break
        heap.entries[gap] = heap.entries[parent]
        gap = parent
    heap.entries[gap] = entry


cdef inline Entry heap_pop(Heap* heap) noexcept nogil:
    """Remove and return the first entry."""
    cdef Entry first = heap.entries[0]
    heap.size -= 1
    heap_sink(heap, 0, heap.entries[heap.size])
    return first


cdef inline void heap_order(Heap* heap) noexcept nogil:
    """Make a heap of entries in any order."""
    cdef uint64_t index = heap.size // 2
    while index:
        index -= 1
        heap_sink(heap, index, heap.entries[index])


cdef inline bint heap_is_ordered(const Heap* heap) noexcept nogil:
    cdef uint64_t index
    for index in range(1, heap.size):
        if comes_before(heap, &heap.entries[index], &heap.entries[(index - 1) // 2]):
            return False
    return True


cdef inline bint heap_grow(Heap* heap, uint64_t kept, uint64_t room) noexcept:
    """Give a heap more room, and keep its first entries; False if there is no memory."""
    # Not grown in place: that would copy, and so touch, memory that was never used.
    cdef Entry* entries = <Entry*>resize(NULL, room * sizeof(Entry))
    if entries == NULL:
        return False
    if kept:
        memcpy(entries, heap.entries, kept * sizeof(Entry))
    discard(heap.entries)
    heap.entries = entries
    heap.room = room
    return True
