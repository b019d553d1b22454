"""Ghosts: compact records of keys that are not resident, by fingerprint; and a walk of records.

Structure
    A ghost is 12 bytes: the 48 bits of the key's hash that include those of an index, and the
    policy's record of the key. Ghosts are in two clocks, which share one array; an index has the
    positions in it. A clock has a stack of free positions; without any, its hand finds the next
    ghost that must not be passed over.
    A *walk* is a dense array of records, each the node of a resident key or the position of a
    ghost; an index has their places by the hashes of their keys.
Invariants
    A ghost is in the index exactly if its ``label`` is not FREE. A walk has a record at most once.
Cost
    O(1), amortised if ghosts are passed over. 12 bytes and 6.4 of the index per position, touched
    when the hand first reaches it, and as much per record of a walk. Two keys are confused with a
    probability of 2**-48 per ghost; the hash is keyed with the table's secret, so that no client
    can force it.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from kvoffload._core.index cimport (
    NIL,
    Index,
    Probe,
    index_approach,
    index_insert,
    index_remove,
    probe_from,
    probe_next,
)

cdef struct Ghost:
    uint32_t last           # request of the last use, for the policy; free: the next free position
    uint32_t low            # lower 32 bits of the key's hash
    uint16_t high           # upper 16 bits
    uint16_t note           # the policy's label, below FREE, and flags: PASSED_OVER, RELEASED

cdef enum:
    FREE = 16383            # the label of a position without a ghost, and the mask of labels
    PASSED_OVER = 16384     # passes the hand once more
    RELEASED = 32768        # it is not counted, until its next use
    NUM_CLOCKS = 2
    AHEAD = 8               # positions before the hand whose ghosts it prefetches from the index

cdef struct Clock:
    uint32_t start          # first position
    uint32_t size           # number of positions
    uint32_t hand           # the next position, from the start
    uint32_t reached        # positions that were in use at least once
    uint32_t free           # stack of free ones of them, NIL for none

cdef struct Ghosts:
    Ghost* items
    Clock clocks[NUM_CLOCKS]
    uint64_t size           # number of ghosts
    Index index

cdef struct Walked:
    uint32_t low            # of the key's hash, as in a ghost
    uint32_t owner          # node, or position of the ghost
    uint16_t high
    uint16_t is_ghost

cdef struct Walk:
    Walked* items           # (size,), in the order of the walk
    uint32_t size
    uint32_t most
    uint32_t hand           # the next to meet
    bint was_full           # a record had no room
    Index index

# Reserve room; False, with nothing reserved, if there is no memory.
cdef bint ghosts_open(Ghosts* ghosts, uint32_t first_size, uint32_t second_size) noexcept
cdef void ghosts_close(Ghosts* ghosts) noexcept
cdef void ghosts_clear(Ghosts* ghosts) noexcept
# Verify the invariants; return the broken one, or NULL.
cdef const char* ghosts_check(Ghosts* ghosts) noexcept
# Reserve room for a walk of at most so many records; False if there is no memory.
cdef bint walk_open(Walk* walk, uint32_t most) noexcept
cdef void walk_close(Walk* walk) noexcept
cdef void walk_clear(Walk* walk) noexcept
cdef const char* walk_check(Walk* walk) noexcept
# Add a record, if there is room.
cdef void walk_add(Walk* walk, uint64_t hashed, uint32_t owner, bint is_ghost) noexcept
# Return the place of a record, or NIL.
cdef uint32_t walk_find(Walk* walk, uint64_t hashed, uint32_t owner, bint is_ghost) noexcept
# Take out the record at a place, which the last one takes.
cdef void walk_remove(Walk* walk, uint32_t place) noexcept


cdef inline uint64_t fingerprint(const Ghost* ghost) noexcept nogil:
    """Return what a ghost has of its key's hash, with zeros between."""
    return <uint64_t>ghost.high << 48 | ghost.low


cdef inline uint32_t ghosts_find(Ghosts* ghosts, uint64_t hashed) noexcept nogil:
    """Return the position of a key's ghost, or NIL."""
    cdef Probe probe = probe_from(&ghosts.index, hashed)
    cdef uint32_t position = probe_next(&probe)
    while position != NIL and not (
        ghosts.items[position].low == <uint32_t>hashed
        and ghosts.items[position].high == <uint16_t>(hashed >> 48)
    ):
        position = probe_next(&probe)
    return position


cdef inline void ghosts_forget(Ghosts* ghosts, uint32_t position) noexcept nogil:
    """Take a ghost out of the index; its position is not free yet."""
    ghosts.items[position].note = FREE
    ghosts.size -= 1
    index_remove(&ghosts.index, fingerprint(ghosts.items + position), position)


cdef inline void ghosts_remove(Ghosts* ghosts, uint32_t position) noexcept nogil:
    """Free the position of a ghost."""
    cdef Clock* clock = &ghosts.clocks[position >= ghosts.clocks[1].start]
    ghosts_forget(ghosts, position)
    ghosts.items[position].last = clock.free
    clock.free = position


cdef inline void ghosts_set(
    Ghosts* ghosts, uint32_t position, uint64_t hashed, uint16_t note, uint32_t last
) noexcept nogil:
    """Put the ghost of an absent key into a free position."""
    cdef Ghost* ghost = ghosts.items + position
    ghost.last = last
    ghost.low = <uint32_t>hashed
    ghost.high = <uint16_t>(hashed >> 48)
    ghost.note = note
    ghosts.size += 1
    index_insert(&ghosts.index, hashed, position)


cdef inline uint32_t clock_next(Ghosts* ghosts, Clock* clock) noexcept nogil:
    """Return the position of the ghost to forget, and move the hand past it; none is free."""
    cdef uint32_t position
    while True:
        position = clock.start + clock.hand
        if clock.hand + AHEAD < clock.size:
            index_approach(&ghosts.index, fingerprint(ghosts.items + position + AHEAD))
        clock.hand = 0 if clock.hand + 1 == clock.size else clock.hand + 1
        if not ghosts.items[position].note & PASSED_OVER:
            return position
        ghosts.items[position].note &= <uint16_t>(~PASSED_OVER & 0xFFFF)


cdef inline uint32_t clock_free(Ghosts* ghosts, Clock* clock) noexcept nogil:
    """Take a free position, or return NIL."""
    cdef uint32_t position = clock.free
    if position != NIL:
        clock.free = ghosts.items[position].last
    elif clock.reached < clock.size:
        position = clock.start + clock.reached
        clock.reached += 1
    return position
