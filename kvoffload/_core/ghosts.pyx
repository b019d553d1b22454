"""The parts of ghosts that are not on the fast path; see ``ghosts.pxd``."""

from libc.string cimport memset

from kvoffload._core.buckets cimport (
    BUCKET_ENTRIES,
    NIL,
    Probe,
    buckets_insert,
    buckets_remove,
    probe_from,
    probe_next,
)
from kvoffload._core.memory cimport release, reserve

# Ghosts per bucket on average when every position is taken: 64 / 10 bytes per position.
cdef enum:
    GHOSTS_PER_BUCKET = 10

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
    ghosts.num_buckets = total // GHOSTS_PER_BUCKET + 1
    ghosts.items = <Ghost*>reserve(total * sizeof(Ghost))
    ghosts.buckets = <KvoBucket*>reserve(ghosts.num_buckets * sizeof(KvoBucket))
    if ghosts.items == NULL or ghosts.buckets == NULL:
        ghosts_close(ghosts)
        return False
    return True


cdef void ghosts_close(Ghosts* ghosts) noexcept:
    release(ghosts.items, num_positions(ghosts) * sizeof(Ghost))
    release(ghosts.buckets, ghosts.num_buckets * sizeof(KvoBucket))
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


cdef uint64_t distance(Ghosts* ghosts, uint32_t position) noexcept:
    """Return the distance in buckets from a ghost's home to its entry."""
    cdef uint64_t bucket_index = ghost_home(ghosts, fingerprint(ghosts.items + position))
    cdef uint64_t steps = 0
    cdef uint32_t entry
    while steps < ghosts.num_buckets:
        for entry in range(<uint32_t>BUCKET_ENTRIES):
            if (
                ghosts.buckets[bucket_index].tags[entry]
                and ghosts.buckets[bucket_index].values[entry] == position
            ):
                return steps
        steps += 1
        bucket_index = (bucket_index + 1) % ghosts.num_buckets
    return steps


cdef const char* ghosts_check(Ghosts* ghosts) noexcept:
    cdef uint64_t filled = 0, entries = 0, passed = 0, overflow = 0, free = 0, reached = 0
    cdef uint64_t bucket_index
    cdef Clock* clock
    cdef Ghost* ghost
    cdef uint32_t position, entry
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
            ghost = ghosts.items + position
            if ghost.note == FREE:
                continue
            filled += 1
            if ghosts_find(ghosts, fingerprint(ghost)) != position:
                return b"the index finds every ghost at its position"
            passed += distance(ghosts, position)
    for bucket_index in range(ghosts.num_buckets):
        for entry in range(<uint32_t>BUCKET_ENTRIES):
            entries += ghosts.buckets[bucket_index].tags[entry] != 0
        overflow += ghosts.buckets[bucket_index].overflow
    if filled + free != reached:
        return b"every position without a ghost is free"
    if filled != ghosts.size or entries != filled:
        return b"the index holds every ghost once"
    if passed != overflow:
        return b"a bucket counts the ghosts that passed it"
    return NULL


cdef bint walk_open(Walk* walk, uint32_t most) noexcept:
    memset(walk, 0, sizeof(Walk))
    walk.most = most
    walk.num_buckets = most // GHOSTS_PER_BUCKET + 1
    walk.items = <Walked*>reserve(most * sizeof(Walked))
    walk.buckets = <KvoBucket*>reserve(walk.num_buckets * sizeof(KvoBucket))
    if walk.items == NULL or walk.buckets == NULL:
        walk_close(walk)
        return False
    return True


cdef void walk_close(Walk* walk) noexcept:
    release(walk.items, walk.most * sizeof(Walked))
    release(walk.buckets, walk.num_buckets * sizeof(KvoBucket))
    memset(walk, 0, sizeof(Walk))


cdef void walk_clear(Walk* walk) noexcept:
    while walk.size:
        walk_remove(walk, walk.size - 1)
    walk.hand = 0
    walk.was_full = False


cdef void walk_add(Walk* walk, uint64_t hashed, uint32_t owner, bint is_ghost) noexcept:
    if walk.size == walk.most:
        return
    walk.items[walk.size] = Walked(<uint32_t>hashed, owner, <uint16_t>(hashed >> 32), is_ghost)
    buckets_insert(
        walk.buckets,
        walk.num_buckets,
        home_in(walk.num_buckets, hashed),
        ghost_tag(hashed),
        walk.size,
    )
    walk.size += 1


cdef uint32_t walk_find(Walk* walk, uint64_t hashed, uint32_t owner, bint is_ghost) noexcept:
    cdef Probe probe
    cdef uint32_t place
    if walk.size == 0:
        return NIL
    probe = probe_from(
        walk.buckets, walk.num_buckets, home_in(walk.num_buckets, hashed), ghost_tag(hashed)
    )
    place = probe_next(&probe)
    while place != NIL and not (
        walk.items[place].owner == owner and walk.items[place].is_ghost == is_ghost
    ):
        place = probe_next(&probe)
    return place


cdef void walk_remove(Walk* walk, uint32_t place) noexcept:
    cdef uint32_t last = walk.size - 1
    drop_place(walk, place)
    if place != last:
        drop_place(walk, last)
        walk.items[place] = walk.items[last]
        buckets_insert(
            walk.buckets,
            walk.num_buckets,
            home_in(walk.num_buckets, hash_of(walk, place)),
            ghost_tag(hash_of(walk, place)),
            place,
        )
    walk.size = last


cdef void drop_place(Walk* walk, uint32_t place) noexcept:
    """Take a place out of the index."""
    cdef uint64_t hashed = hash_of(walk, place)
    buckets_remove(
        walk.buckets, walk.num_buckets, home_in(walk.num_buckets, hashed), ghost_tag(hashed), place
    )


cdef uint64_t hash_of(const Walk* walk, uint32_t place) noexcept:
    return <uint64_t>walk.items[place].high << 32 | walk.items[place].low
