"""Released blocks; see the ``.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport discard, grow

cdef enum:
    FIRST_ROOM = 64


cdef void released_open(Released* released) noexcept:
    memset(released, 0, sizeof(Released))


cdef void released_close(Released* released) noexcept:
    discard(released.items)
    discard(released.stamps)
    memset(released, 0, sizeof(Released))


cdef void released_clear(Released* released) noexcept:
    if released.num_stamps:
        memset(released.stamps, 0, released.num_stamps * sizeof(uint64_t))
    released.first = released.size = released.count = 0


cdef inline bint is_live(const Released* released, uint64_t index) noexcept nogil:
    return released.stamps[released.items[index].node_id] == released.items[index].stamp


cdef void compact(Released* released) noexcept:
    """Drop the entries that are not live."""
    cdef uint64_t index, kept = 0
    for index in range(released.first, released.size):
        if is_live(released, index):
            released.items[kept] = released.items[index]
            kept += 1
    released.first = 0
    released.size = kept


cdef bint released_ensure(Released* released, uint64_t more, uint64_t num_nodes) noexcept:
    cdef uint64_t before = released.num_stamps
    if num_nodes > before:
        if not grow(
            <void**>&released.stamps,
            &released.num_stamps,
            num_nodes,
            sizeof(uint64_t),
            FIRST_ROOM,
        ):
            return False
        memset(released.stamps + before, 0, (released.num_stamps - before) * sizeof(uint64_t))
    if released.size + more > released.room:
        compact(released)
    # Twice the live entries, so that as many must come before the next compaction.
    return released.size + more <= released.room and 2 * released.size <= released.room or grow(
        <void**>&released.items,
        &released.room,
        2 * released.size + more,
        sizeof(ReleasedBlock),
        FIRST_ROOM,
    )


cdef void released_add(Released* released, uint32_t node_id) noexcept:
    if released.stamps[node_id]:
        return
    released.last_stamp += 1
    released.stamps[node_id] = released.last_stamp
    released.items[released.size].stamp = released.last_stamp
    released.items[released.size].node_id = node_id
    released.size += 1
    released.count += 1


cdef uint64_t released_next(Released* released, uint64_t index) noexcept:
    cdef uint64_t start = max(index, released.first)
    index = start
    while index < released.size and not is_live(released, index):
        index += 1
    if start == released.first:
        released.first = index
    return index
