"""Estimates of reuse by age and class, compiled. See ``_densities_py`` for the Python twin.

Request numbers are 32 bits wide and compared by their distance from the present one, so that
they may wrap around.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    NUM_GAPS = 7
    NUM_CLASSES = 15        # 0: never used again; 1-7: once; 8-14: more often
    NUM_BINS = 64
    NUM_EPOCHS = 256
    STORED = 2              # bin of age 1, that of a block just stored

# Classes from the sparsest on, if densities tie: longer gaps first, then fewer uses.
cdef int[NUM_CLASSES] SPARSEST_FIRST
# Depart from LRU order only for a block that is sparser by a quarter: estimates are not more
# accurate.
cdef double NEARLY
cdef double MOST_HAZARD
# Share of the counts of the two neighbouring gaps in those of a class.
cdef double NEIGHBOUR_SHARE

cdef struct Densities:
    double table[NUM_CLASSES][NUM_BINS]     # expected hits per block and request
    double reused[NUM_CLASSES][NUM_BINS]    # ages that ended in a use, decayed
    double dropped[NUM_CLASSES][NUM_BINS]   # ages that ended in forgetting, decayed
    int64_t living[NUM_EPOCHS][NUM_CLASSES] # continuing ages, by the epoch of their start
    int64_t ancient[NUM_CLASSES]            # those that started earlier
    uint32_t starts[NUM_EPOCHS]             # first request of each epoch less one; a ring
    uint32_t oldest                         # epoch in that ring
    uint32_t num_epochs
    uint64_t capacity                       # in blocks
    uint64_t epoch_touches
    double mean_length                      # of a request, in blocks
    uint32_t known_last                     # the request of the last search, and its counts
    int64_t* known_counts                   # NULL: none

cdef void densities_open(Densities* densities, uint64_t capacity) noexcept
cdef void densities_clear(Densities* densities) noexcept
# Return the counts of the epoch that request `last` is in, `now` being the present one.
cdef int64_t* counts_at(Densities* densities, uint32_t last, uint32_t now) noexcept
# Count a request of `length` blocks; at the end of an epoch, recompute the table and return the
# factor by which counts fade, else 0.
cdef double end_request(Densities* densities, uint64_t length, uint32_t now) noexcept
# Return the weight of an estimate's prior, in blocks.
cdef double prior_of(const Densities* densities) noexcept
# Add to a row of counts those of the two neighbouring gaps, in part.
cdef void add_neighbours(
    double[NUM_BINS]* counts, int reuse_class, double* row
) noexcept
# Compute, for each bin from `first` on, the most hits that staying on from there can bring, per
# block and unit of the bins' `widths`.
cdef void best_densities(
    const double* hazards, const double* widths, int first, double* table
) noexcept
# Copy the counts of another.
cdef void densities_copy(Densities* densities, const Densities* other) noexcept


cdef inline int age_bin(uint32_t age) noexcept nogil:
    """Return the bin of an age in requests."""
    cdef uint64_t value = <uint64_t>age + 1
    cdef int exponent = 3
    cdef int bin_index
    if value < 8:
        return <int>value
    while value >> (exponent + 1):
        exponent += 1
    bin_index = 8 + 4 * (exponent - 3) + <int>(value >> (exponent - 2) & 3)
    return bin_index if bin_index < NUM_BINS else NUM_BINS - 1


cdef inline int class_after(uint32_t gap, int reuse_class) noexcept nogil:
    """Return the class of a block of `reuse_class` that is used again after `gap` requests."""
    cdef int gap_index
    if gap <= 2:
        gap_index = 1
    elif gap <= 6:
        gap_index = 2
    elif gap <= 14:
        gap_index = 3
    elif gap <= 30:
        gap_index = 4
    elif gap <= 126:
        gap_index = 5
    elif gap <= 510:
        gap_index = 6
    else:
        gap_index = 7
    return gap_index + NUM_GAPS if reuse_class else gap_index


cdef inline void start_age(
    Densities* densities, int reuse_class, uint32_t last, uint32_t now
) noexcept:
    """Count a use at request `last`, of a block that is of `reuse_class` from now on."""
    counts_at(densities, last, now)[reuse_class] += 1


cdef inline void end_age(
    Densities* densities, int reuse_class, uint32_t last, uint32_t now
) noexcept:
    """Count the end of the age that started at request `last`."""
    counts_at(densities, last, now)[reuse_class] -= 1
