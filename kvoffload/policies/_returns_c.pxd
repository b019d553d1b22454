"""Return times of sessions as their clients say them, compiled; see ``_returns_py``."""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload.policies._densities_c cimport NUM_BINS, NUM_CLASSES
from kvoffload.policies._turns_c cimport MOST_SOURCES, Turns

# Fading sums over returns of 1, x, y, xx, xy and yy: x is ln of the said time, y of the real.
cdef struct Moments:
    double n
    double x
    double y
    double xx
    double xy
    double yy

# The hints of one source, and the densities over age in units of T'.
cdef struct Source:
    Moments moments
    uint64_t hints              # turns that it began
    uint64_t returns
    double reused[NUM_CLASSES][NUM_BINS]
    double dropped[NUM_CLASSES][NUM_BINS]
    double table[NUM_CLASSES][NUM_BINS]

cdef struct Returns:
    Source* sources[MOST_SOURCES + 1]
    int num_sources             # known so far
    Moments all
    double now                  # time of the last request, in seconds
    bint has_begun              # at `now`
    double interval             # recent mean of the seconds between requests

cdef void returns_open(Returns* returns) noexcept
cdef void returns_close(Returns* returns) noexcept
# Make room for a source; False if there is no memory.
cdef bint returns_ensure(Returns* returns, int source) noexcept
# Note the time of a request.
cdef void returns_begin(Returns* returns, double now) noexcept
# Count that a session has returned to a turn, now.
cdef void count_return(Returns* returns, const Turns* turns, uint32_t turn) noexcept
# Return T, clipped for counting.
cdef double said_seconds(double expect_s) noexcept
# Calibrate a source's T; return the half octave of T'.
cdef int expected_half_octave(const Returns* returns, double said, int source) noexcept
# Return the facts of a source: hints, returns, slope and spread; None for the last two if unknown.
cdef tuple seen_of_source(const Returns* returns, int source)
# Count an age of a part that ended in a use, or with an unknown end: the block was forgotten.
cdef void count_part_reuse(Returns* returns, const Turns* turns, uint32_t part) noexcept
cdef void count_part_drop(Returns* returns, const Turns* turns, uint32_t part) noexcept
# Return the hits per request that a block of a part brings; its next chance is the next request.
cdef double part_density(const Returns* returns, const Turns* turns, uint32_t part) noexcept
# Return the density of a block of a part that is stored now.
cdef double stored_part_density(
    const Returns* returns, const Turns* turns, uint32_t part
) noexcept
# Recompute all tables, with the weight of an estimate's prior, and let the counts fade.
cdef void returns_compute(
    Returns* returns, const Turns* turns, double prior, double factor
) noexcept
cdef const char* returns_check(const Returns* returns) noexcept
