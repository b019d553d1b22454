"""The parts of ghosts that are not on the fast path; see ``ghosts.pxd``."""

from libc.string cimport memset

from kvoffload._core.buckets cimport BUCKET_ENTRIES
from kvoffload._core.memory cimport release, reserve

# Ghosts a bucket on average when every place is taken: 64 / 10 bytes a place.
cdef enum:
    GHOSTS_PER_BUCKET = 10

LAYOUT = {"ghost": sizeof(Ghost)}


cdef uint64_t num_places(const Ghosts* ghosts) noexcept:
    return <uint64_t>ghosts.clocks[0].size + ghosts.clocks[1].size


cdef bint ghosts_open(Ghosts* ghosts, uint32_t first_size, uint32_t second_size) noexcept:
    cdef uint64_t total = <uint64_t>first_size + second_size
    memset(ghosts, 0, sizeof(Ghosts))
    ghosts.clocks[0].size = first_size
    ghosts.clocks[1].start = first_size
    ghosts.clocks[1].size = second_size
    ghosts.num_buckets = total // GHOSTS_PER_BUCKET + 1
    ghosts.places = <Ghost*>reserve(total * sizeof(Ghost))
    ghosts.buckets = <KvoBucket*>reserve(ghosts.num_buckets * sizeof(KvoBucket))
    if ghosts.places == NULL or ghosts.buckets == NULL:
        ghosts_close(ghosts)
        return False
    return True


cdef void ghosts_close(Ghosts* ghosts) noexcept:
    release(ghosts.places, num_places(ghosts) * sizeof(Ghost))
    release(ghosts.buckets, ghosts.num_buckets * sizeof(KvoBucket))
    memset(ghosts, 0, sizeof(Ghosts))


cdef void ghosts_clear(Ghosts* ghosts) noexcept:
    cdef Clock* clock
    cdef uint32_t place
    for number in range(NUM_CLOCKS):
        clock = &ghosts.clocks[number]
        for place in range(clock.start, clock.start + clock.reached):
            if ghosts.places[place].kind:
                ghosts_remove(ghosts, place)
        clock.hand = clock.reached = 0


cdef uint64_t distance(Ghosts* ghosts, uint32_t place) noexcept:
    """Return how many buckets a ghost's entry is behind its home."""
    cdef uint64_t number = ghost_home(ghosts, fingerprint(ghosts.places + place))
    cdef uint64_t steps = 0
    cdef uint32_t entry
    while steps < ghosts.num_buckets:
        for entry in range(<uint32_t>BUCKET_ENTRIES):
            if (
                ghosts.buckets[number].tags[entry]
                and ghosts.buckets[number].slots[entry] == place
            ):
                return steps
        steps += 1
        number = (number + 1) % ghosts.num_buckets
    return steps


cdef const char* ghosts_check(Ghosts* ghosts) noexcept:
    cdef uint64_t filled = 0, entries = 0, passed = 0, overflow = 0, number
    cdef Clock* clock
    cdef Ghost* ghost
    cdef uint32_t place, entry
    cdef int which
    for which in range(NUM_CLOCKS):
        clock = &ghosts.clocks[which]
        if clock.reached > clock.size or clock.hand > clock.reached:
            return b"the hand of a clock has reached its places one after the other"
        for place in range(clock.start, clock.start + clock.reached):
            ghost = ghosts.places + place
            if not ghost.kind:
                continue
            filled += 1
            if ghosts_find(ghosts, fingerprint(ghost)) != place:
                return b"the index finds every ghost at its place"
            passed += distance(ghosts, place)
    for number in range(ghosts.num_buckets):
        for entry in range(<uint32_t>BUCKET_ENTRIES):
            entries += ghosts.buckets[number].tags[entry] != 0
        overflow += ghosts.buckets[number].overflow
    if filled != ghosts.size or entries != filled:
        return b"the index holds every ghost once"
    if passed != overflow:
        return b"a bucket counts the ghosts that passed it"
    return NULL
