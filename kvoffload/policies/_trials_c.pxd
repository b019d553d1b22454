"""Three small caches of keys only, served side by side: LRU, hit density and published ARC.

The guard of hit density compares their hits; ``_guard_py`` runs the policies themselves. A block
here is its key's 64-bit hash, so nothing is allocated and nothing can fail after `trials_open`.

Structure
    One entry per key that at least one of the caches knows, resident or ghost. The entries are
    found through one index, and linked into the caches' recency orders by 16-bit ids from 1. Each
    cache has a queue of the blocks that it is storing, oldest first. From the first release on each
    entry has an *extra*: its place among the released blocks. From the first hint of a return on
    the blocks of hit density may belong to turns; the guard then has other trials that serve only
    hit density, without hints.
Invariants
    Between requests an entry is in use exactly if a cache knows its key. A block that a cache is
    storing has that cache's mark, and stays: a queue has room for as many blocks as the cache.
Cost
    O(1) per block and cache, with the 15 rings as a constant. 32 bytes per entry, touched when
    first used; at most 7.5 entries per block of capacity with 3.5 ghosts per block, and 4 for the
    blocks of a request.
Tried, and not kept
    The compiled policies themselves on small tables, as the Python twin does: a node and its index
    entry for each cache instead of one entry for all take about ten times the memory (resident
    bytes per block of 40 managers of 1,000 blocks, 4,000 requests each: 99 under LRU, 173 under
    ARC as published and 263 under hit density, against less than 50 for the trials).
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from kvoffload.policies._densities_c cimport NUM_CLASSES, Densities
from kvoffload.policies._returns_c cimport Returns
from kvoffload.policies._turn_tails_c cimport Tails
from kvoffload.policies._turns_c cimport Turns

# The caches, in the order of their results and of an entry's links.
cdef enum:
    LRU = 0
    HIT_DENSITY = 1
    ARC = 2
    NUM_TRIALS = 3

cdef enum:
    MOST_TRIAL_BLOCKS = 1023    # capacity of each
    NUM_ARC_LISTS = 5
    SAMPLE_CAPACITIES = 4       # most blocks of a request that are examined, in capacities

cdef struct Link:
    uint16_t older              # 0: none
    uint16_t newer

cdef struct Order:
    uint16_t oldest
    uint16_t newest
    uint32_t size

cdef struct Entry:
    uint64_t hashed             # of the key
    uint32_t last               # hit density: request of the last use
    Link links[NUM_TRIALS]      # of a ghost of hit density: `older` is its position
    uint16_t following          # in its bucket, or in the stack of unused entries
    uint8_t in_lru              # resident there
    uint8_t arc_list            # the list of ARC that it is in; 0: none
    uint8_t kind                # hit density: class, from 1; 0: unknown
    uint8_t flags               # IN_BATCH, DENSE, ...

cdef struct Extra:
    Link links[NUM_TRIALS]      # among the released blocks of each cache
    uint8_t released            # a bit for each cache
    bint is_shared              # hit density: it belongs to no turn any more

cdef struct TrialClock:
    uint32_t start
    uint32_t size
    uint32_t hand

# Blocks that a cache is storing, in a ring buffer.
cdef struct Storing:
    uint16_t* entry_ids         # by position
    uint32_t* requests          # by position: in which their stores began
    uint32_t oldest             # position of the oldest
    uint32_t size

cdef struct Trials:
    uint32_t capacity           # of each cache, in blocks
    bint declines               # hit density: blocks sparser than those that they would replace
    Entry* entries              # [0] is not used
    uint64_t num_reserved
    uint32_t num_used           # entries that were in use at least once
    uint16_t unused             # a stack of those that are not any more
    uint16_t* buckets
    uint64_t num_buckets        # a power of two
    uint16_t* batch             # the sampled blocks of the request at work, once each
    uint32_t batch_size
    uint16_t* missing           # those of them that a cache does not have
    uint16_t* victims
    Order lru
    Order arc[NUM_ARC_LISTS]
    double target               # target size of ARC's T1
    Order rings[NUM_CLASSES]
    uint32_t num_dense          # blocks in the cache of hit density
    TrialClock clocks[2]
    uint16_t* ghosts            # their entries by position, in both clocks; 0: free
    Storing storing[NUM_TRIALS]
    Extra* extras               # by entry; NULL before any release
    Order released[NUM_TRIALS]  # blocks that leave before all others, first to leave first
    Turns* turns                # of the blocks of hit density; NULL: hints are not heeded
    uint32_t turn               # that the request at work begins, or 0
    const Returns* returns
    Tails* tails
    uint32_t now                # of the search at work

# Reserve room; False, with nothing reserved, if there is no memory.
cdef bint trials_open(
    Trials* trials, uint32_t capacity, uint32_t never_reused, uint32_t reused
) noexcept
cdef void trials_close(Trials* trials) noexcept
cdef void trials_clear(Trials* trials) noexcept
# Add a block to the request at work.
cdef void trials_add(Trials* trials, uint64_t hashed) noexcept
# End the stores that began `lag` requests before `request`, or earlier.
cdef void trials_complete(Trials* trials, uint32_t request, uint32_t lag) noexcept
# Serve the request at work in each cache; `found` gets the leading blocks that each has found.
# `request` counts all requests, ages are counted to `now`. If the session `ends`, only free and
# released slots are taken.
cdef void trials_serve(
    Trials* trials,
    const Densities* learned,
    uint32_t now,
    uint32_t request,
    bint ends,
    uint32_t* found,
) noexcept
# Serve the request at work only by hit density; return the leading blocks found.
cdef uint32_t trials_serve_density(
    Trials* trials, const Densities* learned, uint32_t now, uint32_t request, bint ends
) noexcept
# End the request at work.
cdef void trials_end_batch(Trials* trials) noexcept
# Make room for extras; False if there is no memory.
cdef bint trials_ensure_release(Trials* trials) noexcept
# Release the blocks added to the request at work, the last first; no request is at work then.
cdef void trials_release(Trials* trials) noexcept
# Add the blocks of the request at work to the turn of `trials`, except those that others used after
# the deepest; no request is at work then.
cdef void trials_join(Trials* trials) noexcept
# Copy the cache of hit density from others of the same size, for trials with only that cache.
cdef void trials_copy_density(Trials* trials, const Trials* others) noexcept
# Heed hints: let blocks of hit density belong to turns.
cdef void trials_heed(
    Trials* trials, Turns* turns, const Returns* returns, Tails* tails
) noexcept
# Verify the invariants; return the broken one, or NULL.
cdef const char* trials_check(Trials* trials) noexcept
