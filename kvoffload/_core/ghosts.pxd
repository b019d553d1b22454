"""Ghosts: compact records of keys that are not resident, by fingerprint.

Structure
    A ghost is 12 bytes: 48 bits of the key's hash, and the policy's record of the key. Ghosts are
    in two clocks, which share one array; an index like that of the nodes has the positions in this
    array. A clock's hand finds the next position to use: a free one, or that of a ghost that must
    not be passed over.
Invariants
    A ghost is in the index exactly if its ``kind`` is not 0.
Cost
    O(1), amortised if ghosts are passed over. 12 bytes and 6.4 of the index per position, touched
    when the hand first reaches it. Two keys are confused with a probability of 2**-48 per ghost;
    the hash is keyed with the table's secret, so that no client can force it.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from kvoffload._core.buckets cimport (
    NIL,
    KvoBucket,
    Probe,
    buckets_insert,
    buckets_remove,
    probe_from,
    probe_next,
)

cdef struct Ghost:
    uint32_t last           # request of the last use
    uint32_t low            # fingerprint
    uint16_t high           # fingerprint, upper 16 bits
    uint8_t kind            # class of the block, from 1; 0: the position is free
    uint8_t flags           # PASSED_OVER, DECLINED, ...

cdef enum:
    PASSED_OVER = 1         # passes the hand once more
    DECLINED = 2            # was not stored since its last touch
    UNCOUNTED = 4           # released: its age is not counted, until its next use
    SHARED = 8              # used by several sessions: it no longer belongs to a turn
    OF_TURN = 16            # belongs to a part of a turn
    NUM_CLOCKS = 2

cdef struct Clock:
    uint32_t start          # first position
    uint32_t size           # number of positions
    uint32_t hand           # the next position, from the start
    uint32_t reached        # positions that the hand has reached so far

cdef struct Ghosts:
    Ghost* items
    Clock clocks[NUM_CLOCKS]
    uint64_t size           # number of ghosts
    KvoBucket* buckets
    uint64_t num_buckets

# Reserve room; False, with nothing reserved, if there is no memory.
cdef bint ghosts_open(Ghosts* ghosts, uint32_t first_size, uint32_t second_size) noexcept
cdef void ghosts_close(Ghosts* ghosts) noexcept
cdef void ghosts_clear(Ghosts* ghosts) noexcept
# Verify the invariants; return the broken one, or NULL.
cdef const char* ghosts_check(Ghosts* ghosts) noexcept


cdef inline uint64_t fingerprint(const Ghost* ghost) noexcept nogil:
    return <uint64_t>ghost.high << 32 | ghost.low


cdef inline uint8_t ghost_tag(uint64_t hashed) noexcept nogil:
    cdef uint8_t tag = <uint8_t>hashed
    return tag if tag else 1


cdef inline uint64_t ghost_home(const Ghosts* ghosts, uint64_t hashed) noexcept nogil:
    return (<uint64_t><uint32_t>(hashed >> 16) * ghosts.num_buckets) >> 32


cdef inline uint32_t ghosts_find(Ghosts* ghosts, uint64_t hashed) noexcept nogil:
    """Return the position of a key's ghost, or NIL."""
    cdef Probe probe = probe_from(
        ghosts.buckets, ghosts.num_buckets, ghost_home(ghosts, hashed), ghost_tag(hashed)
    )
    cdef uint32_t position = probe_next(&probe)
    while position != NIL and not (
        ghosts.items[position].low == <uint32_t>hashed
        and ghosts.items[position].high == <uint16_t>(hashed >> 32)
    ):
        position = probe_next(&probe)
    return position


cdef inline void ghosts_remove(Ghosts* ghosts, uint32_t position) noexcept nogil:
    """Free the position of a ghost."""
    cdef Ghost* ghost = ghosts.items + position
    cdef uint64_t hashed = fingerprint(ghost)
    ghost.kind = 0
    ghost.flags = 0
    ghosts.size -= 1
    buckets_remove(
        ghosts.buckets, ghosts.num_buckets, ghost_home(ghosts, hashed), ghost_tag(hashed), position
    )


cdef inline void ghosts_set(
    Ghosts* ghosts, uint32_t position, uint64_t hashed, uint8_t kind, uint32_t last
) noexcept nogil:
    """Put the ghost of an absent key into a free position."""
    cdef Ghost* ghost = ghosts.items + position
    ghost.last = last
    ghost.low = <uint32_t>hashed
    ghost.high = <uint16_t>(hashed >> 32)
    ghost.kind = kind
    ghost.flags = 0
    ghosts.size += 1
    buckets_insert(
        ghosts.buckets, ghosts.num_buckets, ghost_home(ghosts, hashed), ghost_tag(hashed), position
    )


cdef inline uint32_t clock_next(Ghosts* ghosts, Clock* clock) noexcept nogil:
    """Return the next position to use, free or not, and move the hand past it; `size` is > 0."""
    cdef Ghost* ghost
    cdef uint32_t hand
    while True:
        hand = clock.hand
        clock.hand = 0 if hand + 1 == clock.size else hand + 1
        if hand == clock.reached:
            clock.reached += 1
            return clock.start + hand
        ghost = ghosts.items + clock.start + hand
        if ghost.kind == 0 or not ghost.flags & PASSED_OVER:
            return clock.start + hand
        ghost.flags &= <uint8_t>(~PASSED_OVER & 0xFF)
