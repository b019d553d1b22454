"""The guard of hit density, compiled; see ``_guard_py``."""

from libc.stdint cimport uint8_t
from libc.math cimport sqrt
from libc.string cimport memcpy, memset

from kvoffload._core.batch cimport item_key, item_length
from kvoffload._core.buckets cimport NIL, Probe, probe_from, probe_next
from kvoffload._core.table cimport hash_node, home_of, kvo_hash, node_at, sample_of, tag_of
from kvoffload.policies._trials_c cimport (
    ARC,
    HIT_DENSITY,
    LRU,
    MOST_TRIAL_BLOCKS,
    trials_add,
    trials_check,
    trials_clear,
    trials_close,
    trials_complete,
    trials_copy_density,
    trials_end_batch,
    trials_ensure_release,
    trials_join,
    trials_open,
    trials_release,
    trials_serve,
    trials_serve_density,
)
from kvoffload.policies._turns_c cimport turns_begin, turns_settle

from kvoffload.types import HintGain

# 2 ** (-1 / 600): hits lose half their weight over 600 requests.
cdef double FADE = 0.9988454217380301
# The leader must be ahead by the blocks of this many requests.
cdef double LEAD = 1.0
cdef double STANDARD_ERRORS = 2.5
cdef double TRIAL_BIAS = 0.17

# The trials in the order in which they are compared.
cdef int[NUM_RULES] ORDER = [LRU, HIT_DENSITY, PLAIN, ARC]

cdef enum:
    # A trial has at least this many blocks while at least one block in four is sampled ...
    LEAST_TRIAL_BLOCKS = 64
    MOST_SHIFT = 2
    LEAST_COMPARED = 256


cdef int sample_shift(int64_t capacity) noexcept:
    cdef int shift = 0
    while capacity >> shift >= 2 * LEAST_TRIAL_BLOCKS and shift < MOST_SHIFT:
        shift += 1
    # ... and no more than fit, however small the sample then is.
    while capacity >> shift > MOST_TRIAL_BLOCKS:
        shift += 1
    return shift


cdef bint guard_open(
    Guard* guard,
    int64_t capacity,
    uint32_t never_reused,
    uint32_t reused,
    const char* secret,
) noexcept:
    memset(guard, 0, sizeof(Guard))
    guard.capacity = capacity
    guard.shift = sample_shift(capacity)
    memcpy(guard.secret, secret, sizeof(guard.secret))
    if not trials_open(&guard.trials, <uint32_t>(capacity >> guard.shift), never_reused, reused):
        return False
    guard.on = True
    guard_clear(guard)
    return True


cdef void guard_close(Guard* guard) noexcept:
    trials_close(&guard.trials)
    memset(guard, 0, sizeof(Guard))


cdef void guard_clear(Guard* guard) noexcept:
    guard.rule = HIT_DENSITY
    guard.lag = 1
    guard.request = 0
    guard.num_noted = 0
    guard.store_begins = False
    memset(guard.hits, 0, sizeof(guard.hits))
    guard.plain = NULL
    memset(&guard.gain, 0, sizeof(Gain))
    if guard.on:
        trials_clear(&guard.trials)


cdef void guard_note_store(Guard* guard, uint64_t hashed) noexcept:
    cdef Noted* noted
    guard.store_begins = False
    if guard.num_noted == MOST_NOTED:
        guard.oldest = (guard.oldest + 1) % MOST_NOTED
        guard.num_noted -= 1
    noted = &guard.noted[(guard.oldest + guard.num_noted) % MOST_NOTED]
    noted.hashed = hashed
    noted.request = guard.request
    guard.num_noted += 1


cdef bint is_pending(Table* table, uint64_t hashed) noexcept:
    """Return whether the block of a key with that hash is being stored."""
    cdef Probe probe = probe_from(
        table.buckets, table.num_buckets, home_of(table, hashed), tag_of(hashed)
    )
    cdef uint32_t node_id = probe_next(&probe)
    while node_id != NIL and hash_node(table, node_at(table, node_id)) != hashed:
        node_id = probe_next(&probe)
    return node_id != NIL and node_at(table, node_id).block.ref_cnt < 0


cdef void measure_lag(Guard* guard, Table* table) noexcept:
    """Forget the noted stores that have ended; take the lag from the last of them."""
    cdef Noted* noted
    while guard.num_noted:
        noted = &guard.noted[guard.oldest]
        if is_pending(table, noted.hashed):
            break
        guard.lag = guard.request - noted.request
        guard.oldest = (guard.oldest + 1) % MOST_NOTED
        guard.num_noted -= 1


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
) noexcept:
    cdef uint32_t found[NUM_RULES]
    cdef uint32_t most_hits, num_sampled
    cdef int index, trial, best
    guard.request += 1
    measure_lag(guard, table)
    most_hits = take_sample(guard, batch, num_stored)
    num_sampled = guard.trials.batch_size
    memset(found, 0, sizeof(found))
    trials_complete(&guard.trials, guard.request, guard.lag)
    if guard.plain != NULL:
        trials_complete(guard.plain, guard.request, guard.lag)
    if guard.trials.batch_size:
        begin_turn(&guard.trials, turn)
        trials_serve(&guard.trials, learned, now, guard.request, ends, found)
        end_turn(&guard.trials)
        if guard.plain != NULL:
            found[PLAIN] = trials_serve_density(guard.plain, plain, now, guard.request, ends)
    if guard.plain != NULL:
        add_gain(
            &guard.gain,
            <double>num_sampled,
            <double>min(found[HIT_DENSITY], most_hits),
            <double>min(found[PLAIN], most_hits),
        )
    best = guard.rule
    for trial in range(NUM_RULES):
        guard.hits[trial] = guard.hits[trial] * FADE + <double>min(found[trial], most_hits)
    for index in range(NUM_RULES):
        if guard.hits[ORDER[index]] > guard.hits[best]:
            best = ORDER[index]
    if best != guard.rule and (
        (guard.hits[best] - guard.hits[guard.rule]) * <double>(<uint64_t>1 << guard.shift)
        > LEAD * learned.mean_length
    ):
        guard.rule = best


cdef uint32_t take_sample(
    Guard* guard, const Batch* batch, Py_ssize_t num_stored
) noexcept:
    """Add the sampled blocks to the requests of the trials.

    Return the number of these blocks among the `num_stored` leading ones of the batch.
    """
    cdef uint32_t mask = (<uint32_t>1 << guard.shift) - 1
    cdef uint64_t length, hashed
    cdef uint32_t most_hits = 0
    cdef const uint8_t* key
    cdef Py_ssize_t index
    for index in range(batch.size):
        key = item_key(batch, index)
        length = item_length(batch, index)
        hashed = kvo_hash(key, length, guard.secret)
        if sample_of(hashed) & mask == 0:
            trials_add(&guard.trials, hashed)
            if guard.plain != NULL:
                trials_add(guard.plain, hashed)
        if index < num_stored:
            most_hits = guard.trials.batch_size
    return most_hits


cdef void begin_turn(Trials* trials, const Turn* turn) noexcept:
    """Let the request at work begin one of the trials' own turns."""
    if turn != NULL:
        trials.turn = turns_begin(
            trials.turns, turn.begun, turn.said, turn.source, turn.half_octave
        )


cdef void end_turn(Trials* trials) noexcept:
    if trials.turn:
        turns_settle(trials.turns, trials.turn)
        trials.turn = 0


cdef bint guard_ensure_release(Guard* guard) noexcept:
    return not guard.on or trials_ensure_release(&guard.trials)


cdef void guard_release(Guard* guard, const Batch* batch) noexcept:
    take_sample(guard, batch, 0)
    trials_release(&guard.trials)
    if guard.plain != NULL:
        trials_release(guard.plain)


cdef void guard_say(Guard* guard, const Batch* batch, const Turn* turn) noexcept:
    take_sample(guard, batch, 0)
    begin_turn(&guard.trials, turn)
    trials_join(&guard.trials)
    end_turn(&guard.trials)
    if guard.plain != NULL:
        trials_end_batch(guard.plain)


cdef void guard_divide(Guard* guard, Trials* plain) noexcept:
    trials_copy_density(plain, &guard.trials)
    guard.plain = plain
    guard.hits[PLAIN] = guard.hits[HIT_DENSITY]


cdef void add_gain(Gain* gain, double blocks, double hits, double plain) noexcept:
    """Count a request."""
    cdef double gained = hits - plain
    gain.requests += 1
    gain.blocks = gain.blocks * FADE + blocks
    gain.hits = gain.hits * FADE + hits
    gain.plain = gain.plain * FADE + plain
    gain.squares = gain.squares * (FADE * FADE) + gained * gained
    gain.products = gain.products * (FADE * FADE) + gained * blocks
    gain.squared_blocks = gain.squared_blocks * (FADE * FADE) + blocks * blocks


cdef object guard_gain(const Guard* guard):
    cdef const Gain* sums = &guard.gain
    cdef double hit_ratio, plain, gain, squares, variance, error
    if sums.requests < LEAST_COMPARED or sums.blocks <= 0.0:
        return None
    hit_ratio = sums.hits / sums.blocks
    plain = sums.plain / sums.blocks
    gain = hit_ratio - plain
    squares = sums.squares - 2.0 * gain * sums.products + gain * gain * sums.squared_blocks
    variance = max(0.0, squares) / (sums.blocks * sums.blocks)
    error = sqrt(
        STANDARD_ERRORS * STANDARD_ERRORS * variance
        + TRIAL_BIAS * TRIAL_BIAS / <double>guard.trials.capacity
    )
    return HintGain(hit_ratio, plain, error, guard.rule == HIT_DENSITY)


cdef double guard_target(const Guard* guard) noexcept:
    return guard.trials.target * <double>guard.capacity / <double>guard.trials.capacity


cdef const char* guard_check(Guard* guard) noexcept:
    cdef int trial
    cdef const char* broken
    if not LRU <= guard.rule < NUM_RULES or guard.rule == PLAIN and guard.plain == NULL:
        return b"the rule is that of a trial"
    for trial in range(NUM_RULES):
        if not guard.hits[trial] >= 0.0:
            return b"hits are counted"
    if guard.lag < 1:
        return b"a store takes a request"
    if not guard.on:
        return NULL
    broken = trials_check(&guard.trials)
    if broken == NULL and guard.plain != NULL:
        broken = trials_check(guard.plain)
    return broken
