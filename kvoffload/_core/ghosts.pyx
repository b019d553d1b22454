"""The parts of ghosts that are not on the fast path; see ``ghosts.pxd``."""

from libc.string cimport memset

from kvoffload._core.buckets cimport BUCKET_ENTRIES
from kvoffload._core.memory cimport release, reserve

# Ghosts per bucket on average when every position is taken: 64 / 10 bytes per position.
cdef enum:
    GHOSTS_PER_BUCKET = 10

LAYOUT = {"ghost": sizeof(Ghost)}


cdef uint64_t num_positions(const Ghosts* ghosts) noexcept:
    return <uint64_t>ghosts.lists[0].most + ghosts.lists[1].most


cdef void empty_lists(Ghosts* ghosts) noexcept:
    cdef int list_index
    for list_index in range(NUM_LISTS):
        ghosts.lists[list_index].oldest = ghosts.lists[list_index].newest = NIL
        ghosts.lists[list_index].size = 0
    ghosts.num_used = 0
    ghosts.free_head = NIL


cdef bint ghosts_open(Ghosts* ghosts, uint32_t first_most, uint32_t second_most) noexcept:
    cdef uint64_t total = <uint64_t>first_most + second_most
    memset(ghosts, 0, sizeof(Ghosts))
    ghosts.lists[0].most = first_most
    ghosts.lists[1].most = second_most
    empty_lists(ghosts)
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
    cdef int list_index
    for list_index in range(NUM_LISTS):
        while ghosts.lists[list_index].oldest != NIL:
            ghosts_remove(ghosts, ghosts.lists[list_index].oldest)
    empty_lists(ghosts)


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
    cdef uint64_t filled = 0, entries = 0, passed = 0, overflow = 0, bucket_index
    cdef uint32_t position, older, entry, size
    cdef int list_index
    for list_index in range(NUM_LISTS):
        position = ghosts.lists[list_index].oldest
        older = NIL
        size = 0
        while position != NIL:
            if ghosts.items[position].list != list_index + 1:
                return b"a ghost is on its list"
            if ghosts.items[position].older != older:
                return b"a list of ghosts is linked both ways"
            if ghosts_find(ghosts, fingerprint(ghosts.items + position)) != position:
                return b"the index finds every ghost at its position"
            passed += distance(ghosts, position)
            older = position
            position = ghosts.items[position].newer
            size += 1
        if size != ghosts.lists[list_index].size or older != ghosts.lists[list_index].newest:
            return b"the ghosts of a list are counted"
        if size > ghosts.lists[list_index].most:
            return b"a list of ghosts is within its room"
        filled += size
    for bucket_index in range(ghosts.num_buckets):
        for entry in range(<uint32_t>BUCKET_ENTRIES):
            entries += ghosts.buckets[bucket_index].tags[entry] != 0
        overflow += ghosts.buckets[bucket_index].overflow
    if entries != filled:
        return b"the index holds every ghost once"
    if passed != overflow:
        return b"a bucket counts the ghosts that passed it"
    return NULL
