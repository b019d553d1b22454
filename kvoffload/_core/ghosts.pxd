"""Ghosts: compact entries of keys that are not resident, by fingerprint.

Structure
    A ghost is 24 bytes: 48 bits of the key's hash, and the number of the policy's record of the
    key. Ghosts are on two lists, least recent first; an index like that of the nodes has their
    positions in the array that both share. Free positions are on a stack.
Invariants
    A ghost is in the index and on its list exactly if it is in use. A list has at most ``most``
    ghosts: the caller removes the oldest before it adds another.
Cost
    O(1). 24 bytes and 6.4 of the index per position, touched when first used. Two keys are confused
    with a probability of 2**-48 per ghost; the hash is keyed with the table's secret, so that no
    client can force it.
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

cdef enum:
    NUM_LISTS = 2

cdef struct Ghost:
    uint32_t low            # fingerprint
    uint16_t high           # fingerprint, upper 16 bits
    uint8_t list            # the list that the ghost is on, from 1; 0: the position is free
    uint32_t record
    uint32_t older          # position, NIL for none; free: the next free position
    uint32_t newer

cdef struct GhostList:
    uint32_t oldest         # position, NIL for none
    uint32_t newest
    uint32_t size
    uint32_t most

cdef struct Ghosts:
    Ghost* items
    GhostList lists[NUM_LISTS]
    uint32_t num_used       # positions that were in use at least once
    uint32_t free_head      # stack of freed positions
    KvoBucket* buckets
    uint64_t num_buckets

# Reserve room for two lists; False, with nothing reserved, if there is no memory.
cdef bint ghosts_open(Ghosts* ghosts, uint32_t first_most, uint32_t second_most) noexcept
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


cdef inline void ghosts_unlink(Ghosts* ghosts, Ghost* ghost) noexcept nogil:
    cdef GhostList* its_list = &ghosts.lists[ghost.list - 1]
    if ghost.older == NIL:
        its_list.oldest = ghost.newer
    else:
        ghosts.items[ghost.older].newer = ghost.newer
    if ghost.newer == NIL:
        its_list.newest = ghost.older
    else:
        ghosts.items[ghost.newer].older = ghost.older
    its_list.size -= 1


cdef inline void ghosts_link(Ghosts* ghosts, uint32_t position, int list_index) noexcept nogil:
    """Make a ghost that is on no list the most recent of one."""
    cdef Ghost* ghost = ghosts.items + position
    cdef GhostList* its_list = &ghosts.lists[list_index]
    ghost.list = <uint8_t>(list_index + 1)
    ghost.newer = NIL
    ghost.older = its_list.newest
    if its_list.newest == NIL:
        its_list.oldest = position
    else:
        ghosts.items[its_list.newest].newer = position
    its_list.newest = position
    its_list.size += 1


cdef inline void ghosts_move(Ghosts* ghosts, uint32_t position, int list_index) noexcept nogil:
    """Make a ghost the most recent of a list."""
    ghosts_unlink(ghosts, ghosts.items + position)
    ghosts_link(ghosts, position, list_index)


cdef inline void ghosts_remove(Ghosts* ghosts, uint32_t position) noexcept nogil:
    """Free the position of a ghost."""
    cdef Ghost* ghost = ghosts.items + position
    cdef uint64_t hashed = fingerprint(ghost)
    ghosts_unlink(ghosts, ghost)
    ghost.list = 0
    ghost.older = ghosts.free_head
    ghosts.free_head = position
    buckets_remove(
        ghosts.buckets, ghosts.num_buckets, ghost_home(ghosts, hashed), ghost_tag(hashed), position
    )


cdef inline uint32_t ghosts_add(
    Ghosts* ghosts, int list_index, uint64_t hashed, uint32_t record
) noexcept nogil:
    """Add an absent key to a list that has room, as its most recent; return its position."""
    cdef uint32_t position = ghosts.free_head
    cdef Ghost* ghost
    if position == NIL:
        position = ghosts.num_used
        ghosts.num_used += 1
        ghost = ghosts.items + position
    else:
        ghost = ghosts.items + position
        ghosts.free_head = ghost.older
    ghost.low = <uint32_t>hashed
    ghost.high = <uint16_t>(hashed >> 32)
    ghost.record = record
    ghosts_link(ghosts, position, list_index)
    buckets_insert(
        ghosts.buckets, ghosts.num_buckets, ghost_home(ghosts, hashed), ghost_tag(hashed), position
    )
    return position
