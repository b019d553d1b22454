"""The parts of ghosts that are not on the fast path; see ``ghosts.pxd``."""

from libc.string cimport memset

from kvoffload._core.index cimport (
    MOST_PER_BUCKET,
    index_check,
    index_close,
    index_distance,
    index_open,
)
from kvoffload._core.memory cimport release, reserve

LAYOUT = {"ghost": sizeof(Ghost), "walked": sizeof(Walked)}


cdef uint64_t num_positions(const Ghosts* ghosts) noexcept:
    return <uint64_t>ghosts.clocks[0].size + ghosts.clocks[1].size


cdef bint ghosts_open(Ghosts* ghosts, uint32_t first_size, uint32_t second_size) noexcept:
    cdef uint64_t total = <uint64_t>first_size + second_size
    memset(ghosts, 0, sizeof(Ghosts))
    ghosts.clocks[0].size = first_size
    ghosts.clocks[1].start = first_size
    ghosts.clocks[0].free = ghosts.clocks[1].free = NIL
    ghosts.clocks[1].size = second_size
    ghosts.items = <Ghost*>reserve(total * sizeof(Ghost))
    if ghosts.items == NULL or not index_open(&ghosts.index, total, MOST_PER_BUCKET):
        ghosts_close(ghosts)
        return False
    return True


cdef void ghosts_close(Ghosts* ghosts) noexcept:
    release(ghosts.items, num_positions(ghosts) * sizeof(Ghost))
    index_close(&ghosts.index)
    memset(ghosts, 0, sizeof(Ghosts))


cdef void ghosts_clear(Ghosts* ghosts) noexcept:
    cdef Clock* clock
    cdef uint32_t position
    for which in range(NUM_CLOCKS):
        clock = &ghosts.clocks[which]
        for position in range(clock.start, clock.start + clock.reached):
            if ghosts.items[position].note != FREE:
                ghosts_remove(ghosts, position)
        clock.hand = clock.reached = 0
        clock.free = NIL


cdef const char* ghosts_check(Ghosts* ghosts) noexcept:
    cdef uint64_t filled = 0, passed = 0, free = 0, reached = 0, hashed
    cdef Clock* clock
    cdef uint32_t position
    cdef int which
    for which in range(NUM_CLOCKS):
        clock = &ghosts.clocks[which]
        position = clock.free
        while position != NIL and ghosts.items[position].note == FREE:
            free += 1
            position = ghosts.items[position].last
        reached += clock.reached
        if position != NIL or clock.reached > clock.size:
            return b"the free positions of a clock are on its stack"
        for position in range(clock.start, clock.start + clock.reached):
            if ghosts.items[position].note == FREE:
                continue
            filled += 1
            hashed = fingerprint(ghosts.items + position)
            passed += index_distance(&ghosts.index, hashed, position)
            if ghosts_find(ghosts, hashed) != position:
                return b"the index finds every ghost at its position"
    if filled + free != reached:
        return b"every position without a ghost is free"
    if filled != ghosts.size:
        return b"the ghosts are counted"
    return index_check(&ghosts.index, filled, passed)


cdef uint64_t hash_of(const Walked* walked) noexcept:
    return <uint64_t>walked.high << 48 | walked.low


cdef bint walk_open(Walk* walk, uint32_t most) noexcept:
    memset(walk, 0, sizeof(Walk))
    walk.most = most
    walk.items = <Walked*>reserve(most * sizeof(Walked))
    if walk.items == NULL or not index_open(&walk.index, most, MOST_PER_BUCKET):
        walk_close(walk)
        return False
    return True


cdef void walk_close(Walk* walk) noexcept:
    release(walk.items, walk.most * sizeof(Walked))
    index_close(&walk.index)
    memset(walk, 0, sizeof(Walk))


cdef void walk_clear(Walk* walk) noexcept:
    while walk.size:
        walk_remove(walk, walk.size - 1)
    walk.hand = 0
    walk.was_full = False


cdef void walk_add(Walk* walk, uint64_t hashed, uint32_t owner, bint is_ghost) noexcept:
    if walk.size == walk.most:
        return
    walk.items[walk.size] = Walked(<uint32_t>hashed, owner, <uint16_t>(hashed >> 48), is_ghost)
    index_insert(&walk.index, hashed, walk.size)
    walk.size += 1


cdef uint32_t walk_find(Walk* walk, uint64_t hashed, uint32_t owner, bint is_ghost) noexcept:
    cdef Probe probe = probe_from(&walk.index, hashed)
    cdef uint32_t place = probe_next(&probe)
    while place != NIL and not (
        walk.items[place].owner == owner and walk.items[place].is_ghost == is_ghost
    ):
        place = probe_next(&probe)
    return place


cdef void walk_remove(Walk* walk, uint32_t place) noexcept:
    cdef Walked* last = walk.items + walk.size - 1
    index_remove(&walk.index, hash_of(walk.items + place), place)
    walk.size -= 1
    if place != walk.size:
        index_remove(&walk.index, hash_of(last), walk.size)
        index_insert(&walk.index, hash_of(last), place)
        walk.items[place] = last[0]


cdef const char* walk_check(Walk* walk) noexcept:
    cdef uint64_t passed = 0
    cdef uint32_t place
    for place in range(walk.size):
        passed += index_distance(&walk.index, hash_of(walk.items + place), place)
    return index_check(&walk.index, walk.size, passed)
