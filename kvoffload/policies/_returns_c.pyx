"""Return times of sessions as their clients say them, compiled; see ``_returns_py``.

Every sum is taken in the order of the Python twin, so that both compute the same bits.
"""

from libc.math cimport exp, floor, log, log2, pow, sqrt
from libc.string cimport memcpy, memset

from kvoffload._core.memory cimport discard, resize
from kvoffload.policies._densities_c cimport (
    MOST_HAZARD,
    add_neighbours,
    best_densities,
)
from kvoffload.policies._turns_c cimport AGAIN, NUM_HALF_OCTAVES, Part, Turn

from kvoffload.policies._returns_py import LEAST_RETURNS

cdef double LEAST_SECONDS = 1.0
cdef double MOST_SECONDS = 2147483648.0
cdef double MOST_LOG_SECONDS = 22.0
cdef double PRIOR_RETURNS = 20.0
cdef double SOURCE_FADE = 1.0 - 1.0 / 500.0
cdef double ALL_FADE = 1.0 - 1.0 / 2000.0
cdef double FIRST_INTERVAL = 1.0
cdef double INTERVAL_GAIN = 0.02
cdef double FIRST_HAZARD = 0.05
cdef double FIRST_RATIO = 0.0625

cdef double WIDTHS[NUM_BINS]
cdef double HALF_OCTAVES[NUM_HALF_OCTAVES]
cdef double FRESH[NUM_BINS]             # a row of densities before anything is known

# Slope, and a point.
cdef struct Line:
    double slope
    double x
    double y

cdef Line FIRST_LINE
FIRST_LINE.slope = 0.5
FIRST_LINE.x = 3.4
FIRST_LINE.y = 3.4


cdef void fill_constants() noexcept:
    cdef double hazards[NUM_BINS]
    cdef int index
    for index in range(NUM_BINS):
        hazards[index] = FIRST_HAZARD
        WIDTHS[index] = FIRST_RATIO
        if index:
            WIDTHS[index] = FIRST_RATIO * (
                pow(2.0, <double>index / 4.0) - pow(2.0, <double>(index - 1) / 4.0)
            )
    for index in range(NUM_HALF_OCTAVES):
        HALF_OCTAVES[index] = pow(2.0, <double>index / 2.0)
    best_densities(hazards, WIDTHS, 0, FRESH)


fill_constants()


cdef inline double passed(double now, double since) noexcept:
    """Return the seconds since then, 0 if the clock has gone back."""
    return min(max(0.0, now - since), MOST_SECONDS)


cdef inline int ratio_bin(double ratio) noexcept:
    """Return the bin of an age in units of T', which is finite and >= 0."""
    if ratio <= FIRST_RATIO:
        return 0
    return <int>min(<double>(NUM_BINS - 1), 1.0 + floor(4.0 * log2(16.0 * ratio)))


cdef void returns_open(Returns* returns) noexcept:
    memset(returns, 0, sizeof(Returns))
    returns.interval = FIRST_INTERVAL


cdef void returns_close(Returns* returns) noexcept:
    cdef int source
    for source in range(MOST_SOURCES + 1):
        discard(returns.sources[source])
    memset(returns, 0, sizeof(Returns))


cdef bint returns_ensure(Returns* returns, int source) noexcept:
    cdef Source* made
    cdef int reuse_class
    if returns.sources[source] != NULL:
        return True
    made = <Source*>resize(NULL, sizeof(Source))
    if made == NULL:
        return False
    memset(made, 0, sizeof(Source))
    for reuse_class in range(NUM_CLASSES):
        memcpy(made.table[reuse_class], FRESH, sizeof(FRESH))
    returns.sources[source] = made
    return True


cdef void returns_begin(Returns* returns, double now) noexcept:
    if returns.has_begun:
        returns.interval += INTERVAL_GAIN * (passed(now, returns.now) - returns.interval)
    returns.now = now
    returns.has_begun = True


# -- calibration -------------------------------------------------------------------------------


cdef double said_seconds(double expect_s) noexcept:
    return min(max(LEAST_SECONDS, expect_s), MOST_SECONDS)


cdef void add_return(Moments* moments, double x, double y, double fade) noexcept:
    moments.n = moments.n * fade + 1.0
    moments.x = moments.x * fade + x
    moments.y = moments.y * fade + y
    moments.xx = moments.xx * fade + x * x
    moments.xy = moments.xy * fade + x * y
    moments.yy = moments.yy * fade + y * y


cdef Line fit(const Moments* moments, Line leans_on) noexcept:
    """Return the fitted line, with another as its prior."""
    cdef Line line
    cdef double n = moments.n + PRIOR_RETURNS
    cdef double s_xx = 0.0, s_xy = 0.0
    line.x = (moments.x + PRIOR_RETURNS * leans_on.x) / n
    line.y = (moments.y + PRIOR_RETURNS * leans_on.y) / n
    if moments.n > 0.0:
        s_xx = moments.xx - moments.x * moments.x / moments.n
        s_xy = moments.xy - moments.x * moments.y / moments.n
    line.slope = (s_xy + PRIOR_RETURNS * leans_on.slope) / (s_xx + PRIOR_RETURNS)
    line.slope = min(max(line.slope, 0.0), 1.0)
    return line


cdef void count_return(Returns* returns, const Turns* turns, uint32_t turn) noexcept:
    cdef const Turn* said = turns.turns + turn
    cdef double x = log(said.said)
    cdef double y = log(max(LEAST_SECONDS, passed(returns.now, said.begun)))
    returns.sources[said.source].returns += 1
    add_return(&returns.sources[said.source].moments, x, y, SOURCE_FADE)
    add_return(&returns.all, x, y, ALL_FADE)


cdef inline Line line_of(const Returns* returns, int source) noexcept:
    """Return the line that calibrates a source."""
    return fit(&returns.sources[source].moments, fit(&returns.all, FIRST_LINE))


cdef tuple seen_of_source(const Returns* returns, int source):
    cdef const Source* known = returns.sources[source]
    cdef Line line
    if known.returns < <uint64_t>LEAST_RETURNS:
        return known.hints, known.returns, None, None
    line = line_of(returns, source)
    return known.hints, known.returns, line.slope, spread(&known.moments, line)


cdef double spread(const Moments* m, Line line) noexcept:
    """Return the standard deviation of y around a line; requires at least one return."""
    cdef double slope = line.slope
    cdef double offset = line.y - slope * line.x
    cdef double squares = (
        m.yy
        - 2.0 * slope * m.xy
        - 2.0 * offset * m.y
        + slope * slope * m.xx
        + 2.0 * slope * offset * m.x
        + m.n * offset * offset
    )
    return sqrt(max(0.0, squares) / m.n)


cdef int expected_half_octave(const Returns* returns, double said, int source) noexcept:
    cdef Line line = line_of(returns, source)
    cdef double seconds = line.y + line.slope * (log(said) - line.x)
    cdef double expected = max(LEAST_SECONDS, exp(min(seconds, MOST_LOG_SECONDS)))
    return <int>min(floor(2.0 * log2(expected) + 0.5), <double>(NUM_HALF_OCTAVES - 1))


# -- ages --------------------------------------------------------------------------------------


cdef inline int bin_of(const Returns* returns, const Turn* turn) noexcept:
    return ratio_bin(passed(returns.now, turn.begun) / HALF_OCTAVES[turn.half_octave])


cdef inline int class_of_part(const Part* part) noexcept:
    return 0 if part.ring == AGAIN else part.ring


cdef void count_part_reuse(Returns* returns, const Turns* turns, uint32_t part) noexcept:
    cdef const Part* ended = turns.parts + part
    cdef const Turn* turn = turns.turns + ended.turn
    returns.sources[turn.source].reused[class_of_part(ended)][bin_of(returns, turn)] += 1.0


cdef void count_part_drop(Returns* returns, const Turns* turns, uint32_t part) noexcept:
    cdef const Part* ended = turns.parts + part
    cdef const Turn* turn = turns.turns + ended.turn
    returns.sources[turn.source].dropped[class_of_part(ended)][bin_of(returns, turn)] += 1.0


# -- densities ---------------------------------------------------------------------------------


cdef inline double density_at(
    const Returns* returns, const Turns* turns, uint32_t part, double age
) noexcept:
    cdef const Part* of_turn = turns.parts + part
    cdef const Turn* turn = turns.turns + of_turn.turn
    cdef double expected = HALF_OCTAVES[turn.half_octave]
    cdef const double* row = returns.sources[turn.source].table[class_of_part(of_turn)]
    return row[ratio_bin(age / expected)] / expected * returns.interval


cdef double part_density(const Returns* returns, const Turns* turns, uint32_t part) noexcept:
    cdef double begun = turns.turns[turns.parts[part].turn].begun
    return density_at(returns, turns, part, passed(returns.now, begun) + returns.interval)


cdef double stored_part_density(
    const Returns* returns, const Turns* turns, uint32_t part
) noexcept:
    return density_at(returns, turns, part, returns.interval)


cdef void returns_compute(
    Returns* returns, const Turns* turns, double prior, double factor
) noexcept:
    cdef double reused[MOST_SOURCES + 1][NUM_BINS]
    cdef double reached[MOST_SOURCES + 1][NUM_BINS]
    cdef double all_reused[NUM_BINS]
    cdef double all_reached[NUM_BINS]
    cdef double common[NUM_BINS]
    cdef double own[NUM_BINS]
    cdef int number, index
    count_survivors(returns, turns)
    memset(all_reused, 0, sizeof(all_reused))
    memset(all_reached, 0, sizeof(all_reached))
    for number in range(returns.num_sources):
        sum_classes(returns.sources[number].reused, reused[number])
        sum_classes(returns.sources[number].table, reached[number])
        for index in range(NUM_BINS):
            all_reused[index] += reused[number][index]
            all_reached[index] += reached[number][index]
    for index in range(NUM_BINS):
        common[index] = FIRST_HAZARD
    lean(all_reused, all_reached, prior, common, common)
    for number in range(returns.num_sources):
        lean(reused[number], reached[number], prior, common, own)
        compute_source(returns.sources[number], prior, own)
        fade(returns.sources[number], factor)


cdef void count_survivors(Returns* returns, const Turns* turns) noexcept:
    """Put into the tables how many ages reached each bin and were decided there."""
    cdef const Part* part
    cdef const Turn* turn
    cdef Source* source
    cdef uint32_t index
    cdef int number, reuse_class, bin_index
    cdef double total, living
    for number in range(returns.num_sources):
        memset(returns.sources[number].table, 0, sizeof(returns.sources[number].table))
    for index in range(1, turns.used_parts + 1):
        part = turns.parts + index
        if part.turn == 0 or part.living == 0:
            continue
        turn = turns.turns + part.turn
        source = returns.sources[turn.source]
        source.table[class_of_part(part)][bin_of(returns, turn)] += <double>part.living
    for number in range(returns.num_sources):
        source = returns.sources[number]
        for reuse_class in range(NUM_CLASSES):
            total = 0.0
            for bin_index in range(NUM_BINS - 1, -1, -1):
                total += (
                    source.reused[reuse_class][bin_index] + source.dropped[reuse_class][bin_index]
                )
                living = source.table[reuse_class][bin_index]
                source.table[reuse_class][bin_index] = total
                total += living


cdef void sum_classes(double[NUM_BINS]* counts, double* sums) noexcept:
    cdef int reuse_class, bin_index
    memset(sums, 0, NUM_BINS * sizeof(double))
    for reuse_class in range(NUM_CLASSES):
        for bin_index in range(NUM_BINS):
            sums[bin_index] += counts[reuse_class][bin_index]


cdef void lean(
    const double* reused,
    const double* reached,
    double prior,
    const double* leans_on,
    double* hazards,
) noexcept:
    """Compute the probability of reuse by bin; without any weight, the prior."""
    cdef int bin_index
    cdef double weight
    for bin_index in range(NUM_BINS):
        weight = reached[bin_index] + prior
        if weight > 0.0:
            hazards[bin_index] = (reused[bin_index] + prior * leans_on[bin_index]) / weight
        else:
            hazards[bin_index] = leans_on[bin_index]


cdef void compute_source(Source* source, double prior, const double* own) noexcept:
    """Compute a table, which holds the ages that reached each bin."""
    cdef double survivors[NUM_CLASSES][NUM_BINS]
    cdef double reused[NUM_BINS]
    cdef double reached[NUM_BINS]
    cdef double hazards[NUM_BINS]
    cdef int reuse_class, bin_index
    memcpy(survivors, source.table, sizeof(survivors))
    for reuse_class in range(NUM_CLASSES):
        memcpy(reused, source.reused[reuse_class], sizeof(reused))
        memcpy(reached, survivors[reuse_class], sizeof(reached))
        add_neighbours(source.reused, reuse_class, reused)
        add_neighbours(survivors, reuse_class, reached)
        lean(reused, reached, prior, own, hazards)
        for bin_index in range(NUM_BINS):
            hazards[bin_index] = min(MOST_HAZARD, hazards[bin_index])
        best_densities(hazards, WIDTHS, 0, source.table[reuse_class])


cdef void fade(Source* source, double factor) noexcept:
    cdef int reuse_class, bin_index
    for reuse_class in range(NUM_CLASSES):
        for bin_index in range(NUM_BINS):
            source.reused[reuse_class][bin_index] *= factor
            source.dropped[reuse_class][bin_index] *= factor


cdef const char* returns_check(const Returns* returns) noexcept:
    cdef int number, reuse_class, bin_index
    if not returns.interval >= 0.0:
        return b"requests come one after the other"
    for number in range(returns.num_sources):
        for reuse_class in range(NUM_CLASSES):
            for bin_index in range(NUM_BINS):
                if not returns.sources[number].table[reuse_class][bin_index] >= 0.0:
                    return b"densities are no debts"
    return NULL
