"""The guard of hit density, compiled: see ``_guard_py`` for the rules and their reasons."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Table
from kvoffload.policies._densities_c cimport Densities
from kvoffload.policies._trials_c cimport NUM_TRIALS, Trials
from kvoffload.policies._turns_c cimport Turn

cdef enum:
    MOST_NOTED = 256
    PLAIN = NUM_TRIALS      # the trial without hints, once there are any
    NUM_RULES = NUM_TRIALS + 1

# A store of the cache.
cdef struct Noted:
    uint64_t hashed             # of its first key
    uint32_t request            # in which it began

# Fading sums over the requests that hit density has served with hints and without.
cdef struct Gain:
    uint64_t requests
    double blocks
    double hits
    double plain
    double squares              # by the squares of the weights: of d * d, d * a, a * a
    double products
    double squared_blocks

cdef struct Guard:
    bint on
    int rule                    # the followed trial
    int shift                   # one block in 2**shift is sampled
    uint64_t secret[8]          # by a hash with these words
    int64_t capacity            # of the guarded cache, in blocks
    double hits[NUM_RULES]      # recent hits of each trial, fading
    uint32_t request            # number of the request being served
    uint32_t lag                # requests that a store of the cache takes
    bint store_begins           # the cache begins a store, and nothing was inserted since
    uint32_t oldest             # index of the oldest noted store
    uint32_t num_noted
    Noted noted[MOST_NOTED]
    Trials trials
    Trials* plain               # hit density without hints; NULL before any
    Gain gain                   # since there is one

# Return s such that one block in 2**s is sampled for a cache of `capacity` blocks.
cdef int sample_shift(int64_t capacity) noexcept
# Reserve room for trials with ghosts; False, with nothing reserved, if there is no memory. The
# 64 bytes of `secret` determine the sample.
cdef bint guard_open(
    Guard* guard,
    int64_t capacity,
    uint32_t never_reused,
    uint32_t reused,
    const char* secret,
) noexcept
cdef void guard_close(Guard* guard) noexcept
cdef void guard_clear(Guard* guard) noexcept
# Note a store of the cache by its first key.
cdef void guard_note_store(Guard* guard, uint64_t hashed) noexcept
# Serve a request to the trials, and follow the leader. `ends` says whether its session ends; it
# begins `turn`, NULL for none; `plain` are the densities without hints, NULL before the first hint.
cdef void guard_serve(
    Guard* guard,
    Table* table,
    const Batch* batch,
    Py_ssize_t num_stored,
    const Densities* learned,
    const Densities* plain,
    uint32_t now,
    const Turn* turn,
    bint ends,
) noexcept
# Make room for releases; False if there is no memory.
cdef bint guard_ensure_release(Guard* guard) noexcept
# Release blocks in all trials.
cdef void guard_release(Guard* guard, const Batch* batch) noexcept
# Apply a later hint of the return of the session that has used the blocks.
cdef void guard_say(Guard* guard, const Batch* batch, const Turn* turn) noexcept
# Go on with two trials of hit density: one with hints, and one without, in `plain`.
cdef void guard_divide(Guard* guard, Trials* plain) noexcept
# Return the gain by hints of returns, None if it is unknown.
cdef object guard_gain(const Guard* guard)
# Return the target size of T1 in the guarded cache.
cdef double guard_target(const Guard* guard) noexcept
cdef const char* guard_check(Guard* guard) noexcept
