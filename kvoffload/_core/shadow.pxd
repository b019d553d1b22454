"""The shadow of a sample: the contents of LRU at several sizes, as one list per quarter.

Structure
    Entries of 32 bytes, found by the fingerprint of a key through chains. A list runs from the most
    to the least recent and is divided into segments by markers, the last entry of each: the
    segments up to ``i`` are the contents of LRU at size ``i``. A use moves an entry to the front,
    and one entry over each marker that was before it. An entry that falls off the last segment is
    forgotten. A reset moves every entry to an extra segment at the end: no size has it any longer,
    and it is remembered only until a new entry needs its room.
Invariants
    No segment holds more than its room, and no list more than all its segments except the extra
    one. Every entry in use is on one list and in one chain.
Cost
    O(1) per use and size, no allocation. A use touches about ten entries that are in no cache: a
    caller with several blocks prefetches all of them with `shadow_approach`, then `shadow_near`.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kvoffload._core.table cimport NIL, kvo_prefetch, sample_of

cdef enum:
    MOST_SIZES = 13
    MOST_SEGMENTS = MOST_SIZES + 1
    MOST_QUARTERS = 4

cdef struct Entry:
    uint64_t fingerprint    # the keyed hash of the key
    uint32_t prev           # towards most recent
    uint32_t next           # towards least recent; free: the next free entry
    uint32_t chain          # the next entry of the same chain
    uint32_t last_use       # ms
    uint32_t changed        # ms: when it was stored or evicted, by its fate
    uint8_t segment         # num_sizes: from before a reset
    uint8_t fate            # the last one, FATE_...
    uint8_t used            # since it was stored
    uint8_t shown           # by a request, since it was stored

cdef struct ShadowList:
    uint32_t head
    uint32_t markers[MOST_SEGMENTS] # last entry of each segment, NIL where it is empty
    uint32_t counts[MOST_SEGMENTS]  # entries of each segment
    uint32_t rooms[MOST_SIZES]      # most entries of each segment except the extra one

cdef struct Shadow:
    Entry* entries
    uint32_t num_entries    # reserved
    uint32_t num_used       # handed out at least once
    uint32_t free_head
    uint32_t* chains        # (num_chains,) a power of two
    uint64_t num_chains
    int num_sizes
    int num_quarters
    ShadowList lists[MOST_QUARTERS]

# Reserve room for lists of `limits` entries at each size; False if there is no memory.
cdef bint shadow_open(
    Shadow* shadow, int num_quarters, int num_sizes, const uint32_t* limits
) noexcept
cdef void shadow_close(Shadow* shadow) noexcept
# Move an entry, which a request shows, to the front of its list, or put a new one there.
cdef void shadow_use(Shadow* shadow, uint64_t fingerprint, uint32_t now) noexcept
# Empty every size; the entries' history stays while there is room for it.
cdef void shadow_reset(Shadow* shadow) noexcept
cdef const char* shadow_check(Shadow* shadow) noexcept


cdef inline void shadow_approach(Shadow* shadow, uint64_t fingerprint) noexcept nogil:
    """Prefetch the chain of a fingerprint."""
    kvo_prefetch(shadow.chains + (fingerprint & (shadow.num_chains - 1)))


cdef inline uint32_t shadow_first(Shadow* shadow, uint64_t fingerprint) noexcept nogil:
    """Return the first entry of the chain of a fingerprint, NIL for none."""
    return shadow.chains[fingerprint & (shadow.num_chains - 1)]


cdef inline int shadow_quarter(Shadow* shadow, uint64_t fingerprint) noexcept nogil:
    """Return the quarter of a fingerprint."""
    return <int>(sample_of(fingerprint) & <uint32_t>(shadow.num_quarters - 1))


cdef inline void shadow_near(Shadow* shadow, uint64_t fingerprint) noexcept nogil:
    """Prefetch the first entry of a prefetched chain, and the markers of the quarter."""
    cdef int quarter = shadow_quarter(shadow, fingerprint), size
    # With no entry the address is wrong, and a prefetch of it does nothing.
    kvo_prefetch(shadow.entries + shadow_first(shadow, fingerprint))
    for size in range(shadow.num_sizes):
        kvo_prefetch(shadow.entries + shadow.lists[quarter].markers[size])


cdef inline void shadow_reach(Shadow* shadow, const Entry* entry, int quarter) noexcept nogil:
    """Prefetch the neighbours of an entry to move, or of the list's last entry if it is NULL."""
    cdef uint32_t last
    if entry != NULL:
        kvo_prefetch(shadow.entries + entry.prev)
        kvo_prefetch(shadow.entries + entry.next)
        return
    last = shadow.lists[quarter].markers[shadow.num_sizes - 1]
    if last != NIL:
        kvo_prefetch(shadow.entries + shadow.entries[last].prev)
        shadow_approach(shadow, shadow.entries[last].fingerprint)


cdef inline Entry* shadow_find(Shadow* shadow, uint64_t fingerprint) noexcept nogil:
    """Return the entry of a fingerprint, or NULL."""
    cdef uint32_t entry_id = shadow_first(shadow, fingerprint)
    while entry_id != NIL:
        if shadow.entries[entry_id].fingerprint == fingerprint:
            return shadow.entries + entry_id
        entry_id = shadow.entries[entry_id].chain
    return NULL
