"""Estimates of reuse by age and class, compiled; see ``_densities_py`` for their computation.

Every sum is taken in the order of the Python twin, so that both compute the same bits.
"""

from libc.math cimport pow
from libc.string cimport memcpy, memset

SPARSEST_FIRST[:] = [0, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8]
NEARLY = 1.25
MOST_HAZARD = 0.999
NEIGHBOUR_SHARE = 0.25

cdef double NEVER_REUSED = 0.5
cdef double PRIOR_REQUESTS = 4.0
cdef double PRIOR_CAPACITY_SHARE = 64.0
cdef double FIRST_HAZARD = 0.02
cdef double HALF_LIFE_REQUESTS = 1000.0
cdef double HALF_LIFE_CAPACITIES = 8.0
cdef double MEAN_LENGTH_GAIN = 0.01

cdef enum:
    LEAST_EPOCH_TOUCHES = 1024
    EPOCHS_PER_CAPACITY = 16

cdef double WIDTHS[NUM_BINS]


cdef uint64_t bin_start(int bin_index) noexcept:
    if bin_index < 8:
        return <uint64_t>bin_index
    return <uint64_t>(4 + (bin_index - 8) % 4) << ((bin_index - 8) // 4 + 1)


cdef void fill_widths() noexcept:
    cdef int bin_index
    for bin_index in range(NUM_BINS):
        WIDTHS[bin_index] = <double>(bin_start(bin_index + 1) - bin_start(bin_index))


fill_widths()


cdef void densities_open(Densities* densities, uint64_t capacity) noexcept:
    memset(densities, 0, sizeof(Densities))
    densities.capacity = capacity
    densities_clear(densities)


cdef void densities_clear(Densities* densities) noexcept:
    cdef uint64_t capacity = densities.capacity
    cdef uint64_t start
    cdef int reuse_class, bin_index
    memset(densities, 0, sizeof(Densities))
    densities.capacity = capacity
    densities.num_epochs = 1
    for reuse_class in range(NUM_CLASSES):
        for bin_index in range(NUM_BINS):
            start = max(<uint64_t>1, bin_start(bin_index))
            densities.table[reuse_class][bin_index] = (
                (1.0 if reuse_class else NEVER_REUSED) / <double>start
            )


cdef void densities_copy(Densities* densities, const Densities* other) noexcept:
    memcpy(densities, other, sizeof(Densities))
    densities.known_counts = NULL


cdef int64_t* counts_at(Densities* densities, uint32_t last, uint32_t now) noexcept:
    cdef uint32_t age = now - last
    cdef uint32_t low = 0, high = densities.num_epochs, middle
    if densities.known_counts != NULL and densities.known_last == last:
        return densities.known_counts
    # The epochs that started before `last` come first in the ring.
    while low < high:
        middle = (low + high) // 2
        if now - densities.starts[(densities.oldest + middle) % NUM_EPOCHS] > age:
            low = middle + 1
        else:
            high = middle
    densities.known_last = last
    if low == 0:
        densities.known_counts = densities.ancient
    else:
        densities.known_counts = densities.living[(densities.oldest + low - 1) % NUM_EPOCHS]
    return densities.known_counts


cdef double end_request(Densities* densities, uint64_t length, uint32_t now) noexcept:
    cdef double factor = 0.0
    if densities.mean_length == 0.0:
        densities.mean_length = <double>length
    else:
        densities.mean_length += MEAN_LENGTH_GAIN * (<double>length - densities.mean_length)
    densities.epoch_touches += length
    if densities.epoch_touches >= max(
        <uint64_t>LEAST_EPOCH_TOUCHES, densities.capacity // EPOCHS_PER_CAPACITY
    ):
        compute(densities, now)
        factor = decay(densities)
        start_epoch(densities, now)
    return factor


cdef void start_epoch(Densities* densities, uint32_t now) noexcept:
    cdef uint32_t index
    cdef int reuse_class
    densities.epoch_touches = 0
    densities.known_counts = NULL
    if densities.num_epochs == NUM_EPOCHS:
        index = densities.oldest
        for reuse_class in range(NUM_CLASSES):
            densities.ancient[reuse_class] += densities.living[index][reuse_class]
        densities.oldest = (index + 1) % NUM_EPOCHS
    else:
        index = densities.num_epochs
        densities.num_epochs += 1
    densities.starts[index] = now
    memset(densities.living[index], 0, sizeof(densities.living[index]))


cdef double decay(Densities* densities) noexcept:
    cdef double half_life = max(
        HALF_LIFE_CAPACITIES * <double>densities.capacity,
        HALF_LIFE_REQUESTS * densities.mean_length,
    )
    cdef double factor = pow(2.0, -<double>densities.epoch_touches / half_life)
    cdef int reuse_class, bin_index
    for reuse_class in range(NUM_CLASSES):
        for bin_index in range(NUM_BINS):
            densities.reused[reuse_class][bin_index] *= factor
            densities.dropped[reuse_class][bin_index] *= factor
    return factor


cdef double prior_of(const Densities* densities) noexcept:
    return max(
        <double>densities.capacity / PRIOR_CAPACITY_SHARE,
        PRIOR_REQUESTS * densities.mean_length,
    )


cdef void add_neighbours(
    double[NUM_BINS]* counts, int reuse_class, double* row
) noexcept:
    cdef int first = 1 if reuse_class <= NUM_GAPS else 1 + NUM_GAPS
    cdef int other, bin_index
    for other in range(reuse_class - 1, reuse_class + 2, 2):
        if reuse_class == 0 or other < first or other >= first + NUM_GAPS:
            continue
        for bin_index in range(NUM_BINS):
            row[bin_index] += NEIGHBOUR_SHARE * counts[other][bin_index]


cdef void compute(Densities* densities, uint32_t now) noexcept:
    cdef double survivors[NUM_CLASSES][NUM_BINS]
    cdef double common[NUM_BINS]
    cdef double hazards[NUM_BINS]
    cdef double reused[NUM_BINS]
    cdef double reached[NUM_BINS]
    cdef double prior = prior_of(densities)
    cdef double trust, expected
    cdef int reuse_class, bin_index
    count_survivors(densities, now, survivors)
    common_hazards(densities, survivors, prior, common)
    for reuse_class in range(NUM_CLASSES):
        for bin_index in range(NUM_BINS):
            reused[bin_index] = densities.reused[reuse_class][bin_index]
            reached[bin_index] = survivors[reuse_class][bin_index]
        add_neighbours(densities.reused, reuse_class, reused)
        add_neighbours(survivors, reuse_class, reached)
        trust = 1.0 if reuse_class else NEVER_REUSED
        for bin_index in range(1, NUM_BINS):
            expected = reused[bin_index] + prior * common[bin_index] * trust
            hazards[bin_index] = min(MOST_HAZARD, expected / (reached[bin_index] + prior))
        best_densities(hazards, WIDTHS, 1, densities.table[reuse_class])
    order(densities.table)


cdef void count_survivors(Densities* densities, uint32_t now, double[NUM_BINS]* survivors) noexcept:
    """Count, by class and bin, the ages that reached the bin and were decided there."""
    cdef double living[NUM_CLASSES][NUM_BINS]
    cdef double total
    cdef uint32_t epoch, index
    cdef int reuse_class, bin_index
    memset(living, 0, sizeof(living))
    for reuse_class in range(NUM_CLASSES):
        living[reuse_class][NUM_BINS - 1] += <double>densities.ancient[reuse_class]
    for epoch in range(densities.num_epochs):
        index = (densities.oldest + epoch) % NUM_EPOCHS
        bin_index = age_bin(now - densities.starts[index])
        for reuse_class in range(NUM_CLASSES):
            living[reuse_class][bin_index] += <double>densities.living[index][reuse_class]
    for reuse_class in range(NUM_CLASSES):
        total = 0.0
        survivors[reuse_class][0] = 0.0
        for bin_index in range(NUM_BINS - 1, 0, -1):
            total += (
                densities.reused[reuse_class][bin_index] + densities.dropped[reuse_class][bin_index]
            )
            survivors[reuse_class][bin_index] = total
            total += living[reuse_class][bin_index]


cdef void common_hazards(
    Densities* densities, double[NUM_BINS]* survivors, double prior, double* hazards
) noexcept:
    """Compute the probability of reuse by bin over all classes, weighted by their room."""
    cdef double weights[NUM_CLASSES]
    cdef double uses = 0.0, held = 0.0
    cdef double room, scale, reused, reached
    cdef double hazard = FIRST_HAZARD
    cdef int reuse_class, bin_index
    for reuse_class in range(NUM_CLASSES):
        room = 0.0
        for bin_index in range(1, NUM_BINS):
            room += survivors[reuse_class][bin_index] * WIDTHS[bin_index]
        weights[reuse_class] = room / max(1.0, survivors[reuse_class][1])
        uses += survivors[reuse_class][1]
        held += weights[reuse_class] * survivors[reuse_class][1]
    scale = uses / held if held > 0.0 else 0.0
    hazards[0] = 0.0
    for bin_index in range(1, NUM_BINS):
        reused = reached = 0.0
        for reuse_class in range(NUM_CLASSES):
            reused += weights[reuse_class] * densities.reused[reuse_class][bin_index]
            reached += weights[reuse_class] * survivors[reuse_class][bin_index]
        hazard = (scale * reused + prior * hazard) / (scale * reached + prior)
        hazards[bin_index] = hazard


cdef void best_densities(
    const double* hazards, const double* widths, int first, double* table
) noexcept:
    cdef double all_hits[NUM_BINS]
    cdef double all_time[NUM_BINS]
    cdef double all_lasting[NUM_BINS]
    cdef double hits, time, lasting
    cdef int bin_index, runs = 0
    for bin_index in range(first):
        table[bin_index] = 1.0
    for bin_index in range(NUM_BINS - 1, first - 1, -1):
        hits = hazards[bin_index]
        time = widths[bin_index] * (1.0 - hazards[bin_index] / 2.0)
        lasting = 1.0 - hazards[bin_index]
        while runs and all_hits[runs - 1] * time > hits * all_time[runs - 1]:
            runs -= 1
            hits += lasting * all_hits[runs]
            time += lasting * all_time[runs]
            lasting *= all_lasting[runs]
        all_hits[runs] = hits
        all_time[runs] = time
        all_lasting[runs] = lasting
        runs += 1
        table[bin_index] = hits / time


cdef void order(double[NUM_BINS]* table) noexcept:
    """Make densities fall with age, fall with the gap, and rise with use."""
    cdef int reuse_class, bin_index, gap
    for reuse_class in range(NUM_CLASSES):
        for bin_index in range(2, NUM_BINS):
            table[reuse_class][bin_index] = min(
                table[reuse_class][bin_index], table[reuse_class][bin_index - 1]
            )
    for bin_index in range(1, NUM_BINS):
        for gap in range(NUM_GAPS - 1, 0, -1):
            table[gap][bin_index] = max(table[gap][bin_index], table[gap + 1][bin_index])
            table[gap + NUM_GAPS][bin_index] = max(
                table[gap + NUM_GAPS][bin_index], table[gap + NUM_GAPS + 1][bin_index]
            )
        for gap in range(1, NUM_GAPS + 1):
            table[gap][bin_index] = max(table[gap][bin_index], table[0][bin_index])
            table[gap + NUM_GAPS][bin_index] = max(
                table[gap + NUM_GAPS][bin_index], table[gap][bin_index]
            )
