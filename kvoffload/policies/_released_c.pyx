"""Released blocks; see the ``.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport discard, grow

cdef enum:
    FIRST_ROOM = 64


cdef void released_close(Released* released) noexcept:
    discard(released.places)
    memset(released, 0, sizeof(Released))


cdef void released_clear(Released* released) noexcept:
    while released.count:
        released_remove(released, released_next(released, NIL))


cdef bint released_ensure(Released* released, uint64_t num_nodes) noexcept:
    cdef uint64_t place, before = released.num_places
    if num_nodes < before:
        return True
    if not grow(
        <void**>&released.places, &released.num_places, num_nodes + 1, sizeof(Place), FIRST_ROOM
    ):
        return False
    for place in range(before, released.num_places):
        released.places[place].prev = released.places[place].next = <uint32_t>place
    return True


cdef void released_add(Released* released, uint32_t node_id) noexcept:
    cdef uint32_t place = node_id + 1, last = released.places[0].prev
    if released.places[place].next != place:
        return
    released.places[place].prev = last
    released.places[place].next = 0
    released.places[last].next = released.places[0].prev = place
    released.count += 1
