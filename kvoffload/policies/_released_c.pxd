"""Released blocks: they are not expected to be used again and leave before all others.

Structure
    ``items`` holds node ids in eviction order, each with the stamp of its release. An entry is live
    while its node has that stamp; a node that was used again, or has left, has no stamp. The
    entries before ``first`` are not live. The queue is compacted when it is full and grows if half
    of it is live.
Cost
    O(1) amortised, except for a search, which skips released blocks in use. 16 bytes per released
    block and 8 per node, from the first release on.
"""

from libc.stdint cimport uint32_t, uint64_t

cdef struct ReleasedBlock:
    uint64_t stamp
    uint32_t node_id

cdef struct Released:
    ReleasedBlock* items
    uint64_t first          # the oldest entry that may be live
    uint64_t size           # entries, from index 0 on
    uint64_t room
    uint64_t* stamps        # by node id; 0: not released
    uint64_t num_stamps
    uint64_t last_stamp
    uint64_t count          # blocks that are released

cdef void released_open(Released* released) noexcept
cdef void released_close(Released* released) noexcept
# Withdraw all releases.
cdef void released_clear(Released* released) noexcept
# Make room for `more` blocks of a table of `num_nodes` nodes; False if there is no memory.
cdef bint released_ensure(Released* released, uint64_t more, uint64_t num_nodes) noexcept
# Release a block after those released before; a released block keeps its place.
cdef void released_add(Released* released, uint32_t node_id) noexcept
# Return the next live entry at or after an index, or `size`.
cdef uint64_t released_next(Released* released, uint64_t index) noexcept


cdef inline bint is_released(const Released* released, uint32_t node_id) noexcept nogil:
    return node_id < released.num_stamps and released.stamps[node_id] != 0


cdef inline void released_remove(Released* released, uint32_t node_id) noexcept nogil:
    """Withdraw the release of a block."""
    if released.count and is_released(released, node_id):
        released.stamps[node_id] = 0
        released.count -= 1
