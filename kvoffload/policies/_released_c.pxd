"""Released blocks: they are not expected to be used again and leave before all others.

Structure
    A circular list in eviction order, linked in both directions through an array of places: that of
    a node is its id plus one, and place 0, that of NIL, is between the last and the first. A place
    that is not on the list links to itself. Zeroed memory is an empty list.
Cost
    O(1), except for a search, which skips released blocks in use. 8 bytes per node, from the first
    release on.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.table cimport NIL

cdef struct Place:
    uint32_t prev
    uint32_t next

cdef struct Released:
    Place* places
    uint64_t num_places
    uint64_t count          # blocks that are released

cdef void released_close(Released* released) noexcept
# Withdraw all releases.
cdef void released_clear(Released* released) noexcept
# Make room for the blocks of a table of `num_nodes` nodes; False if there is no memory.
cdef bint released_ensure(Released* released, uint64_t num_nodes) noexcept
# Release a block after those released before; a released block keeps its place.
cdef void released_add(Released* released, uint32_t node_id) noexcept


cdef inline uint32_t released_next(const Released* released, uint32_t node_id) noexcept nogil:
    """Return the block released after another, the first one for NIL; NIL at the end."""
    return released.places[<uint32_t>(node_id + 1)].next - 1 if released.count else NIL


cdef inline void released_remove(Released* released, uint32_t node_id) noexcept nogil:
    """Withdraw the release of a block."""
    cdef uint32_t place = node_id + 1
    cdef Place* own
    if released.count == 0 or place >= released.num_places:
        return
    own = &released.places[place]
    if own.next == place:
        return
    released.places[own.prev].next = own.next
    released.places[own.next].prev = own.prev
    own.next = place
    released.count -= 1
