"""Hit density, compiled: evict, or do not store, the blocks with the fewest hits per slot.

Structure
    A resident block's ring is its label, and an array has its last use; a ghost has both. A group
    of 15 rings holds the blocks of which the same was said. See ``_hit_density_py`` for the Python
    twin, the rules and the differences from the paper.
Cost
    insert, remove, get O(1); touch O(n); evict and make_room amortised O(n x rings), regardless of
    pinned blocks. 4 bytes per block, 18 per ghost, and as much per record of the walk.
"""

from libc.math cimport floor, log2
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kvoffload._core.batch cimport (
    Batch,
    batch_open,
    find_all,
    find_hashed,
    has_flag,
    item_key,
    item_length,
)
from kvoffload._core.ghosts cimport (
    FREE,
    PASSED_OVER,
    RELEASED,
    Clock,
    Ghost,
    Ghosts,
    Walk,
    Walked,
    clock_free,
    clock_next,
    fingerprint,
    ghosts_check,
    ghosts_clear,
    ghosts_close,
    ghosts_find,
    ghosts_forget,
    ghosts_open,
    ghosts_remove,
    ghosts_set,
    walk_add,
    walk_check,
    walk_clear,
    walk_close,
    walk_find,
    walk_open,
    walk_remove,
)
from kvoffload._core.index cimport index_approach
from kvoffload._core.items cimport check_items
from kvoffload._core.memory cimport discard, grow, release, resize
from kvoffload._core.ring cimport (
    Ring,
    ring_append,
    ring_check,
    ring_clear,
    ring_close,
    ring_list,
    ring_node_ids,
    ring_open,
    ring_park_in_use,
    ring_remove,
    ring_renew,
    ring_unpark,
)
from kvoffload._core.table cimport (
    NIL,
    RESIDENT,
    Node,
    Table,
    extend_by_node,
    hash_ahead,
    hash_node,
    key_bytes,
    kvo_hash,
    node_at,
    sample_of,
)
from kvoffload._core.victims cimport Cursor, Victim, victims_find, victims_take
from kvoffload.policies._duel_c cimport (
    DENSITY,
    LRU,
    SAMPLE_CAPACITIES,
    Duel,
    is_sampled,
)
from kvoffload.policies._learned cimport (
    BINS,
    CLASSES,
    SAID,
    SHARED_SAID,
    STEPS,
    Learned,
    bin_of,
    class_after,
)
from kvoffload.policies._released_c cimport released_remove
from kvoffload.policies._twin_c cimport (
    MOST_SOURCES,
    CollectorOff,
    CompiledPolicy,
    Hint,
    find_key,
)

from kvoffload._checks import as_batch, batch_error, check_hints, check_int
from kvoffload._sampling import new_secret, words_of
from kvoffload.policies._hit_density import HitDensity, sample_shift, walk_shift
from kvoffload.policies.base import CachePolicy

cdef enum:
    CLASS_BITS = 4
    CLASS_MASK = 15
    # A node's `ring` and the lower bits of its `note` are its label.
    RING_NOTE = 63
    IS_RELEASED = 64        # in `note`: it is not counted, until its next use
    IS_WALKED = 128         # in `note`: it is in the walk
    VISITS = 4              # records that the hand meets per sampled block of a request
    # Two in seven ghosts are of blocks that were used again.
    REUSED_GHOSTS = 2
    ALL_GHOSTS = 7
    FIRST_SOURCE = 2        # the sources before are none, and several sessions
    STORED = 2              # bin of the age of a block that is stored now
    FIRST_ROOM = 64
    LAST_BITS = 0x7FFFFFFF  # of a ghost's `last`; the other says whether it is in the walk

cdef double NEARLY = 1.25
cdef object MOST_GHOSTS = 2**32 - 2
cdef tuple RULES = ("hit-density", "lru")

# What is known of a block.
cdef struct Record:
    uint32_t last           # number of the request that used it last
    uint32_t label          # what was said, and the class in the lower CLASS_BITS
    uint32_t owner          # the block's node, or the position of its ghost
    bint is_ghost
    bint is_released
    bint is_walked

# The rings of the blocks of which the same was said.
cdef struct Group:
    Ring rings[CLASSES]
    double rows[CLASSES][BINS]      # densities by bin of age
    uint64_t computed[CLASSES]      # number of the computation that a row is of

# The oldest block of a ring that may leave.
cdef struct Candidate:
    Ring* ring
    Cursor cursor
    uint32_t node_id
    uint32_t label          # of equals, the lowest leaves first
    uint32_t last
    double density


cdef class _HitDensity(CompiledPolicy)


cdef inline uint32_t last_of(const Ghost* ghost, uint32_t request) noexcept:
    """Return the last use of a ghost, which was less than 2**31 requests ago."""
    return request - (request - ghost.last & LAST_BITS)


cdef inline uint32_t label_of(const Node* node) noexcept:
    return (<uint32_t>(node.note & RING_NOTE) << 8 | node.ring) - 1


cdef inline Ring* ring_of(_HitDensity self, uint32_t label) noexcept:
    return &self.groups[label >> CLASS_BITS].rings[label & CLASS_MASK]


cdef inline Ring* ring_at(_HitDensity self, int index) noexcept:
    """Return a ring by its index from 0 to ``num_groups * CLASSES``, in no order."""
    return &self.groups[self.open_groups[index // CLASSES]].rings[index % CLASSES]


cdef inline void read_block(_HitDensity self, uint32_t node_id, Record* record) noexcept:
    """Read the record of a resident block."""
    cdef const Node* node = node_at(self.table, node_id)
    record.last = self.last[node_id]
    record.label = label_of(node)
    record.owner = node_id
    record.is_ghost = False
    record.is_released = node.note & IS_RELEASED != 0
    record.is_walked = node.note & IS_WALKED != 0


cdef inline bint find_ghost(_HitDensity self, uint64_t hashed, Record* record) noexcept:
    """Read the record of a ghost; False if the key has none."""
    cdef const Ghost* ghost
    record.owner = ghosts_find(&self.memory, hashed)
    record.is_ghost = True
    if record.owner == NIL:
        return False
    ghost = self.memory.items + record.owner
    record.last = last_of(ghost, self._learned.request)
    record.label = ghost.note & FREE
    record.is_released = ghost.note & RELEASED != 0
    record.is_walked = ghost.last >> 31
    return True


cdef inline bint find(
    _HitDensity self, const Batch* batch, Py_ssize_t index, Record* record
) noexcept:
    """Read the record of a key; False if it is unknown."""
    if batch.node_ids[index] == NIL:
        return find_ghost(self, batch.hashes[index], record)
    read_block(self, batch.node_ids[index], record)
    return True


cdef inline bint is_older(const Candidate* one, const Candidate* other) noexcept:
    return one.last < other.last or one.last == other.last and one.label < other.label


# -- records ---------------------------------------------------------------------------------


cdef inline bint ensure_last(_HitDensity self) noexcept:
    """Reserve room for the last use of every node."""
    return extend_by_node(
        &self.storage.table, <void**>&self.last, &self.num_last, sizeof(uint32_t)
    )


cdef inline uint32_t next_position(_HitDensity self, uint32_t label, bint* is_free) noexcept:
    """Return the position for a ghost: a free one, that of the next to forget, or NIL."""
    cdef Clock* clock = &self.memory.clocks[label & CLASS_MASK != 0]
    cdef uint32_t position = clock_free(&self.memory, clock)
    cdef const Ghost* ghost
    is_free[0] = position != NIL
    if position != NIL or clock.size == 0:
        return position
    position = clock_next(&self.memory, clock)
    ghost = self.memory.items + position
    if ghost.last >> 31:
        walk_remove(&self.walk, walk_find(&self.walk, fingerprint(ghost), position, True))
    ghosts_forget(&self.memory, position)
    return position


cdef inline bint joins_walk(_HitDensity self, uint32_t drawn) noexcept:
    """Return whether the hand is to meet a new record, for which `sample_of` has drawn this."""
    if self.walk.most == 0 or not is_sampled(drawn, self.walk_shift):
        return False
    if self.walk.size == self.walk.most:
        self.walk.was_full = True
        return False
    return True


cdef inline void own(
    _HitDensity self, uint64_t hashed, const Record* record, uint32_t owner, bint is_ghost
) noexcept:
    """Give a record in the walk another owner, or take it out."""
    cdef uint32_t place = walk_find(&self.walk, hashed, record.owner, record.is_ghost)
    if owner == NIL:
        walk_remove(&self.walk, place)
    else:
        self.walk.items[place].owner = owner
        self.walk.items[place].is_ghost = is_ghost


cdef inline void remember(_HitDensity self, uint64_t hashed, Record* record) noexcept:
    """Make a ghost of a block that was on a ring, a ghost, or unknown, if there is room."""
    cdef bint is_free
    cdef uint32_t position = next_position(self, record.label, &is_free)
    cdef uint16_t flags = RELEASED if record.is_released else 0
    if is_free:  # the hand may come at once
        flags |= PASSED_OVER
    if record.is_walked and record.owner != NIL:
        own(self, hashed, record, position, True)
    record.owner = position
    if position != NIL:
        ghosts_set(
            &self.memory,
            position,
            hashed,
            <uint16_t>record.label | flags,
            record.last & LAST_BITS | <uint32_t>record.is_walked << 31,
        )


cdef inline void move(_HitDensity self, Record* record, uint32_t label) noexcept:
    """Make a block the most recent of another label."""
    cdef bint stays = (record.label & CLASS_MASK != 0) == (label & CLASS_MASK != 0)
    cdef uint8_t released = IS_RELEASED if record.is_released else 0
    cdef Ghost* ghost
    cdef Node* node
    cdef uint64_t hashed
    if not record.is_ghost:
        node = node_at(self.table, record.owner)
        self.last[record.owner] = record.last
        if label == record.label:
            node.note = <uint8_t>(node.note & ~IS_RELEASED & 0xFF | released)
            ring_renew(self.table, ring_of(self, label), record.owner, node)
            return
        ring_remove(self.table, ring_of(self, record.label), node)
        put_on_ring(self, record.owner, label, node.note & IS_WALKED | released)
        return
    ghost = self.memory.items + record.owner
    record.label = label
    if stays:
        ghost.last = record.last & LAST_BITS | ghost.last & ~LAST_BITS
        ghost.note = <uint16_t>(label | PASSED_OVER | (RELEASED if released else 0))
        return
    hashed = fingerprint(ghost)
    ghosts_remove(&self.memory, record.owner)
    remember(self, hashed, record)


cdef inline void to_most_recent(_HitDensity self, const Batch* batch, Py_ssize_t index) noexcept:
    """Make a block the most recent of its label; it is counted again."""
    cdef uint32_t node_id = batch.node_ids[index], position
    cdef Node* node
    if node_id != NIL:
        node = node_at(self.table, node_id)
        node.note &= <uint8_t>(~IS_RELEASED & 0xFF)
        ring_renew(self.table, ring_of(self, label_of(node)), node_id, node)
        return
    position = ghosts_find(&self.memory, batch.hashes[index])
    if position != NIL:
        self.memory.items[position].note &= FREE
        self.memory.items[position].note |= PASSED_OVER


cdef inline void put_on_ring(
    _HitDensity self, uint32_t node_id, uint32_t label, uint8_t flags
) noexcept:
    cdef Ring* ring = ring_of(self, label)
    cdef Node* node = node_at(self.table, node_id)
    ring_append(self.table, ring, node_id, node)
    node.note = ring.note | flags


cdef inline const double* row_of(_HitDensity self, uint32_t label) noexcept:
    """Return the densities of a label by bin of age, as computed last."""
    cdef Group* group = self.groups[label >> CLASS_BITS]
    cdef int reuse_class = <int>(label & CLASS_MASK)
    if group.computed[reuse_class] != self._learned.num_computed:
        group.computed[reuse_class] = self._learned.num_computed
        self._learned.compute_row(reuse_class, <int>(label >> CLASS_BITS))
        memcpy(group.rows[reuse_class], &self._learned.row[0], sizeof(group.rows[0]))
    return group.rows[reuse_class]


# -- requests --------------------------------------------------------------------------------


cdef inline void fetch_ghosts(_HitDensity self, const Batch* batch) noexcept:
    """Prefetch where the ghosts of the keys without a node are found."""
    cdef Py_ssize_t index
    for index in range(batch.size):
        if batch.node_ids[index] == NIL:
            index_approach(&self.memory.index, batch.hashes[index])


cdef inline bint is_used(_HitDensity self, const Batch* batch) noexcept:
    """Return whether the present request has used all blocks of a batch."""
    cdef Py_ssize_t index
    cdef Record record
    for index in range(batch.size):
        if not find(self, batch, index, &record) or record.last != self._learned.request:
            return False
    return True


cdef inline void draw(_HitDensity self, Batch* batch) noexcept:
    """Draw the bits of each key, by which it is in a sample; 1 for keys that are in none."""
    cdef Py_ssize_t index
    cdef uint32_t node_id
    if self.walk.most == 0:
        return
    for index in range(batch.size):
        node_id = batch.node_ids[index]
        batch.drawn[index] = 1
        # What the duel's miniatures serve is a part of the walk's sample.
        if node_id == NIL or self.duel is not None and (
            node_at(self.table, node_id).note & IS_WALKED or self.walk.was_full
        ):
            batch.drawn[index] = sample_of(
                kvo_hash(item_key(batch, index), item_length(batch, index), self.secret)
            )


cdef inline void sample_time(_HitDensity self, Py_ssize_t length) noexcept:
    """Let the hand meet records, each of which stands for as many as it passes over."""
    cdef uint32_t num_met = <uint32_t>min(
        <int64_t>self.walk.size, max(<int64_t>1, VISITS * length >> self.walk_shift)
    )
    cdef uint32_t request = self._learned.request
    cdef uint32_t hand = self.walk.hand, met, label, last
    cdef double* time = &self._learned.time[0]
    cdef const Walked* walked
    cdef const Ghost* ghost
    cdef const Node* node
    cdef double weight
    if num_met == 0:
        return
    weight = <double>(<uint64_t>self.walk.size << self.walk_shift) / <double>num_met
    for met in range(num_met):
        if hand >= self.walk.size:
            hand = 0
        walked = self.walk.items + hand
        hand += 1
        if walked.is_ghost:
            ghost = self.memory.items + walked.owner
            if ghost.note & RELEASED:
                continue
            label = ghost.note & FREE
            last = last_of(ghost, request)
        else:
            node = node_at(self.table, walked.owner)
            if node.note & IS_RELEASED:
                continue
            label = label_of(node)
            last = self.last[walked.owner]
        if label >> CLASS_BITS:
            self._learned.count_time(
                <int>(label & CLASS_MASK),
                <int>(label >> CLASS_BITS),
                bin_of(request - last),
                weight,
            )
        else:  # the same without a hint
            time[label * BINS + <uint32_t>bin_of(request - last)] += weight
    self.walk.hand = hand


cdef inline void use(_HitDensity self, Batch* batch, uint32_t said) noexcept:
    """Count a use of each block that the present request has not used."""
    cdef uint32_t request = self._learned.request, former, new_said
    cdef uint32_t deepest = 0, last_use = 0
    cdef int use_class = -1, reuse_class
    cdef bint is_deepest = True
    cdef Py_ssize_t index
    cdef Record record
    for index in range(batch.size - 1, -1, -1):
        if not find(self, batch, index, &record):
            reuse_class = 0
            if use_class >= 0:
                reuse_class = class_after(request - last_use, use_class)
            record.last = request
            record.label = said << CLASS_BITS | <uint32_t>reuse_class
            record.is_released = False
            record.is_walked = joins_walk(self, batch.drawn[index])
            remember(self, batch.hashes[index], &record)
            if record.is_walked and record.owner != NIL:
                walk_add(&self.walk, batch.hashes[index], record.owner, True)
            continue
        if record.last == request:
            to_most_recent(self, batch, index)
            continue
        former = record.label >> CLASS_BITS
        reuse_class = <int>(record.label & CLASS_MASK)
        if is_deepest:
            is_deepest = False
            deepest = record.last
            if former > SHARED_SAID and self.counts and not record.is_released:
                self.source_counts[former // STEPS - FIRST_SOURCE][1] += 1
        # The use covers all blocks before it, too: this record replaces lost ones.
        if use_class < 0 or record.last >= last_use:
            last_use = record.last
            use_class = reuse_class
        if self.counts and not record.is_released:
            self._learned.count_use(reuse_class, <int>former, bin_of(request - record.last))
        new_said = SHARED_SAID if record.last > deepest and self._learned.is_hinted else said
        record.last = request
        record.is_released = False
        move(
            self, &record,
            new_said << CLASS_BITS | <uint32_t>class_after(request - last_use, use_class),
        )


cdef inline void renew(_HitDensity self, const Batch* batch) noexcept:
    cdef Py_ssize_t index
    for index in range(batch.size - 1, -1, -1):
        to_most_recent(self, batch, index)


# -- hints -----------------------------------------------------------------------------------


cdef inline bint ensure_said(_HitDensity self, uint32_t said) noexcept:
    """Make room for the blocks of which this is said; False if there is no memory."""
    cdef Duel duel = self.duel
    if not open_group(self, SHARED_SAID) or not open_group(self, said):
        return False
    return duel is None or (
        ensure_said(<_HitDensity>duel.by_density.policy, said)
        and (
            duel.without_hints is None
            or ensure_said(<_HitDensity>duel.without_hints.policy, said)
        )
    )


cdef inline bint open_group(_HitDensity self, uint32_t said) noexcept:
    cdef Group* group = self.groups[said]
    cdef Ring* ring
    cdef int ring_index
    if group != NULL:
        return True
    if not grow(
        <void**>&self.candidates,
        &self.candidate_room,
        <uint64_t>(self.num_groups + 1) * CLASSES,
        sizeof(Candidate),
        FIRST_ROOM,
    ):
        return False
    group = <Group*>resize(NULL, sizeof(Group))
    if group == NULL:
        return False
    memset(group, 0, sizeof(Group))
    for ring_index in range(CLASSES):
        # Two bytes of a node tell the rings apart: they have the label, plus 1.
        ring = &group.rings[ring_index]
        ring_open(ring, <uint8_t>((said << CLASS_BITS | <uint32_t>ring_index) + 1))
        ring.note = <uint8_t>(said >> 4)
        ring.note_mask = RING_NOTE
    self.groups[said] = group
    self.open_groups[self.num_groups] = <uint16_t>said
    self.num_groups += 1
    return True


cdef inline uint32_t heed(_HitDensity self, const Hint* hint) noexcept:
    """Return the number of a hint of a return, 0 for none or if the session ends."""
    cdef uint32_t said
    if hint == NULL or hint.expect_s <= 0.0:
        return 0
    said = said_by(hint)
    # After `hint_of` the policy may have been initialised again, or cleared with its names.
    if self.groups[said] == NULL or self.groups[SHARED_SAID] == NULL:
        return 0
    self._learned.hint()
    if self.counts and self.num_sources <= hint.source < self.num_named:
        self.num_sources = hint.source + 1
    return 0 if hint.ends else said


cdef inline bint relabel(_HitDensity self, const Batch* batch, uint32_t said) noexcept:
    """Label a request's blocks with a hint; return whether the deepest was not yet."""
    cdef Py_ssize_t index = batch.size if said else 0
    cdef uint32_t deepest = 0
    cdef bint found = False, is_new = False
    cdef Record record
    while index:
        index -= 1
        if not find(self, batch, index, &record):
            continue
        if not found:
            found = True
            deepest = record.last
            is_new = record.label >> CLASS_BITS != said
        if record.last <= deepest and record.label >> CLASS_BITS != SHARED_SAID:
            move(self, &record, said << CLASS_BITS | record.label & CLASS_MASK)
    return is_new


# -- the blocks that leave -------------------------------------------------------------------


cdef inline void open_candidates(_HitDensity self) noexcept:
    """Find the oldest block of each ring that may leave."""
    cdef int index, reuse_class
    cdef Candidate* candidate
    cdef Group* group
    self.num_candidates = 0
    for index in range(self.num_groups):
        group = self.groups[self.open_groups[index]]
        for reuse_class in range(CLASSES):
            if group.rings[reuse_class].size == 0:
                continue
            candidate = self.candidates + self.num_candidates
            candidate.ring = &group.rings[reuse_class]
            candidate.label = (
                <uint32_t>self.open_groups[index] << CLASS_BITS | <uint32_t>reuse_class
            )
            candidate.cursor.started = False
            self.num_candidates += advance(self, candidate)


cdef inline bint advance(_HitDensity self, Candidate* candidate) noexcept:
    """Find the next block of a ring that may leave; False without one, or without memory."""
    if self.victims.no_memory:
        return False
    candidate.node_id = victims_find(&self.victims, self.table, candidate.ring, &candidate.cursor)
    if candidate.node_id == NIL:
        return False
    candidate.last = self.last[candidate.node_id]
    # Its next chance is the next request.
    candidate.density = row_of(self, candidate.label)[
        bin_of(self._learned.request - candidate.last + 1)
    ]
    return True


cdef inline Candidate* next_to_leave(_HitDensity self) noexcept:
    """Return the candidate that leaves next by the rule, or NULL."""
    cdef Candidate* least = NULL
    cdef Candidate* oldest = NULL   # of all, or of those without a client's hint
    cdef Candidate* candidate
    cdef int index
    if self.victims.no_memory:
        return NULL
    for index in range(self.num_candidates):
        candidate = self.candidates + index
        if least == NULL or candidate.density < least.density or (
            candidate.density == least.density and is_older(candidate, least)
        ):
            least = candidate
        if self.rule == DENSITY and candidate.label >> CLASS_BITS > SHARED_SAID:
            continue
        if oldest == NULL or is_older(candidate, oldest):
            oldest = candidate
    if self.rule == LRU:
        return oldest
    if least != NULL and least.label >> CLASS_BITS <= SHARED_SAID:
        if oldest.density <= NEARLY * least.density:
            return oldest
    return least


cdef inline void take(_HitDensity self, Candidate* candidate) noexcept:
    """Choose a candidate, unless there is no memory."""
    if not self.take_one(candidate.node_id, node_at(self.table, candidate.node_id)):
        return
    if not advance(self, candidate):
        self.num_candidates -= 1
        candidate[0] = self.candidates[self.num_candidates]


cdef inline void close_candidates(_HitDensity self) noexcept:
    """Return the candidates that were not chosen to their rings."""
    cdef int index
    cdef uint32_t node_id
    if self.victims.managed:
        for index in range(self.num_candidates):
            node_id = self.candidates[index].node_id
            ring_list(
                self.table, self.candidates[index].ring, node_id, node_at(self.table, node_id)
            )


cdef class _HitDensity(CompiledPolicy):
    cdef readonly double _ghosts_per_block
    cdef readonly Learned _learned
    cdef Duel duel                  # None without a guard
    cdef int rule
    cdef bint counts                # a small cache of the duel reads what another cache learns
    cdef bint declines              # blocks sparser than those that they would replace
    cdef uint32_t* last             # by node: request of the last use
    cdef uint64_t num_last          # nodes that the array has room for
    cdef Ghosts memory
    cdef Walk walk                  # the records that the hand meets
    cdef int walk_shift             # one block in 2**walk_shift is in the walk
    cdef uint64_t secret[8]         # words that key the samples
    cdef Group* groups[SAID]        # by what was said; NULL before that
    cdef uint16_t open_groups[SAID]
    cdef int num_groups
    cdef Candidate* candidates
    cdef uint64_t candidate_room    # one for each ring
    cdef int num_candidates
    # Of hints, by number: those that were used, then new ones of the call at work; room for all.
    cdef list source_names
    cdef int num_sources
    cdef int num_named              # with the new ones
    cdef uint64_t source_counts[MOST_SOURCES + 1][2]  # hints and returns

    def __dealloc__(self):
        self.close_all()

    cdef void close_all(self) noexcept:
        """Free what the constructor and the first hints have reserved."""
        cdef int index
        release(self.last, self.num_last * sizeof(uint32_t))
        self.last = NULL
        self.num_last = 0
        walk_close(&self.walk)
        ghosts_close(&self.memory)
        for index in range(self.num_groups * CLASSES):
            ring_close(ring_at(self, index))
        for index in range(self.num_groups):
            discard(self.groups[self.open_groups[index]])
            self.groups[self.open_groups[index]] = NULL
        self.num_groups = 0
        discard(self.candidates)
        self.candidates = NULL
        self.candidate_room = 0

    def _open(self, int64_t capacity, double ghosts, bint guard):
        """Construct the policy."""
        cdef int index
        self.build(capacity, ghosts, None)
        for index, word in enumerate(words_of(new_secret())):
            self.secret[index] = word
        self.source_names = [None] * (MOST_SOURCES + 1)
        self.num_sources = self.num_named = 0
        memset(self.source_counts, 0, sizeof(self.source_counts))
        self.duel = None
        if guard and capacity:
            self.duel = Duel(capacity, self._small(capacity >> sample_shift(capacity)))
        self.publish()

    cdef int build(self, int64_t capacity, double ghosts, Learned learned) except -1:
        """Reserve room; read what another cache has `learned`, if it is given, or learn."""
        cdef uint32_t total = min(int(ghosts * capacity), MOST_GHOSTS), walked = 0
        cdef uint32_t reused = <uint32_t>(<uint64_t>total * REUSED_GHOSTS // ALL_GHOSTS)
        # A miniature gives nodes to all missing keys of a request first.
        self.set_up(capacity, 1 if learned is None else 1 + SAMPLE_CAPACITIES, 0)
        self.close_all()
        self.walk_shift = 0
        if learned is None:
            self.walk_shift = walk_shift(capacity)
            walked = min(2 * (capacity + total >> self.walk_shift) + 64, MOST_GHOSTS)
        if (
            not ghosts_open(&self.memory, total - reused, reused)
            or not walk_open(&self.walk, walked)
            or not ensure_last(self)
        ):
            raise MemoryError(f"no room for {total} ghosts")
        if not open_group(self, 0):
            raise MemoryError("no room for rings")
        self._ghosts_per_block = ghosts
        self._learned = Learned(capacity) if learned is None else learned
        self.counts = learned is None
        self.declines = True
        self.rule = DENSITY
        return 0

    def _small(self, int64_t capacity):
        """Return a small cache without a guard that reads what this one learns."""
        cdef _HitDensity other = _HitDensity.__new__(_HitDensity)
        other.build(capacity, self._ghosts_per_block, self._learned)
        if self.groups[SHARED_SAID] != NULL and not open_group(other, SHARED_SAID):
            raise MemoryError("no room for rings")
        other.declines = self.declines
        other.publish()
        return other

    @property
    def _rule(self):
        return RULES[self.rule]

    @property
    def _sources(self):
        cdef int number
        return {
            self.source_names[number]: self.source_counts[number]
            for number in range(self.num_sources)
        }

    def _trial_hits(self):
        cdef Duel duel = self.duel
        self.require_ready()
        return {} if duel is None else dict(zip(RULES, duel.hits))

    def _hint_gain(self):
        cdef Duel duel
        self.require_ready()
        duel = self.duel  # held: a small cache is built by Python code, which may build this anew
        if duel is None or not self._learned.is_hinted:
            return None
        if duel.without_hints is None:
            duel.compare(self._small(duel.by_density.policy.capacity))
        return duel.gain.seen(duel.by_density.policy.capacity, duel.rule == DENSITY)

    def _row_without_hints(self, int reuse_class):
        self.require_ready()
        row_of(self, <uint32_t>reuse_class)
        return self.groups[0].rows[reuse_class]

    def begun(self, hashes, hints=None):
        """Handle the beginning of a request, with the client's hints of the session's return."""
        if type(self).touch is not CompiledPolicy.touch:  # a subclass's own
            CachePolicy.begun(self, hashes, hints)
        else:
            self.hear(hashes, hints, "begun")

    def finished(self, hashes, hints=None):
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self.hear(hashes, hints, "finished")

    cdef int hear(self, object hashes, object hints, str call) except -1:
        cdef Hint said
        cdef const Hint* hint
        self.require_ready()
        check_hints(hints)
        hashes = as_batch(hashes)
        hint = self.hint_of(hints, &said)  # after the iterable, which may tell other hints
        self.open_batch(hashes, "hashes", call)
        find_all(self.table, &self.batch)
        if call == "begun":
            self.begin_request(&self.batch, hint)
        else:
            self.finish_request(&self.batch, hint)
        return 0

    # -- requests ----------------------------------------------------------------------------

    cdef void c_touch(self, Batch* batch) noexcept:
        self.c_begun(batch, NULL)

    cdef void c_begun(self, Batch* batch, const Hint* hint) noexcept:
        cdef uint32_t said
        if batch.size == 0:
            return
        said = heed(self, hint)
        if said and self.counts:
            self.source_counts[said // STEPS - FIRST_SOURCE][0] += 1
        fetch_ghosts(self, batch)
        draw(self, batch)
        if is_used(self, batch):
            renew(self, batch)
            relabel(self, batch, said)
        else:
            if self.counts:
                self._learned.request += 1
                sample_time(self, batch.size)
            use(self, batch, said)
            if self.counts:
                self._learned.end_request(batch.size)
        if self.duel is not None:
            self.rule = self.duel.serve(self.table, batch, hint, self._learned.mean_length)

    cdef void c_extended(self, Batch* batch) noexcept:
        fetch_ghosts(self, batch)
        draw(self, batch)
        use(self, batch, 0)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        cdef uint32_t said = heed(self, hint)
        fetch_ghosts(self, batch)
        renew(self, batch)
        if relabel(self, batch, said) and self.counts:
            self.source_counts[said // STEPS - FIRST_SOURCE][0] += 1
        if said and self.duel is not None:
            draw(self, batch)
            self.duel.finish(self.table, batch, hint)

    # -- hints -------------------------------------------------------------------------------

    cdef int c_source(self, str source) except -1:
        cdef int number = 0
        while number < self.num_named and self.source_names[number] != source:
            number += 1
        if number == self.num_named and number <= MOST_SOURCES:
            self.source_names[number] = source
            self.num_named += 1
        return min(number, MOST_SOURCES)

    cdef const Hint* hint_of(self, object hints, Hint* hint, bint is_second=False) except? NULL:
        cdef const Hint* found
        if not is_second:
            self.num_named = self.num_sources
        found = CompiledPolicy.hint_of(self, hints, hint)
        if found != NULL and found.expect_s > 0.0 and not ensure_said(self, said_by(found)):
            raise MemoryError("no room for hints")
        return found

    # -- residence ---------------------------------------------------------------------------

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return CompiledPolicy.c_ensure(self, more) and ensure_last(self)

    def make_room(self, hashes, num_free, protected):
        """Decide how many of `hashes` to store, and evict for them; never refuse the store."""
        cdef list batch, marked
        cdef int64_t count, admitted
        cdef Py_ssize_t index
        cdef CollectorOff held
        self.require_ready()
        # A copy: `protected` may be an iterator that changes the caller's list.
        batch = list(hashes) if type(hashes) is list else as_batch(hashes)
        if not check_items(batch):
            raise batch_error(batch)
        count = check_int("num_free", num_free, 0)
        marked = self.open_batch(protected, "protected", "make_room")
        held = CollectorOff()
        if not self.c_ensure(0):
            raise MemoryError()
        self.mark_protected()
        batch_open(&self.batch, batch)
        find_hashed(self.table, &self.batch)
        for index in range(self.batch.size):
            self.batch.indexes[index] = <uint32_t>index
        self.victims.no_memory = False
        admitted = self.c_make_room(&self.batch, self.batch.size, count)
        if admitted < 0:
            raise MemoryError()
        return admitted, self.let_go()

    def set_declining(self, allowed):
        """Allow or forbid the policy to decline blocks that it could make room for."""
        CompiledPolicy.set_declining(self, allowed)
        self.declines = allowed
        if self.duel is not None:
            for miniature in (self.duel.by_density, self.duel.without_hints):
                if miniature is not None:
                    miniature.policy.set_declining(allowed)

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        cdef uint64_t hashed = hash_node(self.table, node), length
        cdef Record record = Record(self._learned.request, 0, NIL, True, False, False)
        cdef const uint8_t* key
        if find_ghost(self, hashed, &record):
            if record.is_walked:
                own(self, hashed, &record, node_id, False)
            ghosts_remove(&self.memory, record.owner)
        elif self.walk.most:
            key = key_bytes(node, &length)
            record.is_walked = joins_walk(self, sample_of(kvo_hash(key, length, self.secret)))
            if record.is_walked:
                walk_add(&self.walk, hashed, node_id, False)
        self.last[node_id] = record.last
        put_on_ring(
            self, node_id,
            record.label,
            (IS_RELEASED if record.is_released else 0) | (IS_WALKED if record.is_walked else 0),
        )
        if self.duel is not None and self.duel.store_begins:
            self.duel.note_store(hashed)

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        if node.note & IS_WALKED:
            walk_remove(
                &self.walk, walk_find(&self.walk, hash_node(self.table, node), node_id, False)
            )

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Record record
        read_block(self, victim.node_id, &record)
        CompiledPolicy.c_evicted(self, victim)
        remember(self, victim.hashed, &record)

    cdef void c_park(self, uint64_t most) noexcept:
        cdef int index
        for index in range(self.num_groups * CLASSES):
            ring_park_in_use(self.table, ring_at(self, index), most)

    cdef void take_off(self, uint32_t node_id, Node* node) noexcept:
        released_remove(&self.released, node_id)
        ring_remove(self.table, ring_of(self, label_of(node)), node)
        self.num_resident -= 1

    cdef void became_idle(self, uint32_t node_id, Node* node) noexcept:
        ring_list(self.table, ring_of(self, label_of(node)), node_id, node)

    # -- released blocks ---------------------------------------------------------------------

    cdef bint ensure_release(self, Py_ssize_t n) noexcept:
        return CompiledPolicy.ensure_release(self, n) and (
            self.duel is None or self.duel.ensure_release()
        )

    cdef void c_release(self, Batch* batch, uint8_t kept) noexcept:
        cdef Py_ssize_t index
        cdef Record record
        CompiledPolicy.c_release(self, batch, kept)
        fetch_ghosts(self, batch)
        for index in range(batch.size):
            if has_flag(self.table, batch, index, kept) or not find(self, batch, index, &record):
                continue
            if record.is_ghost:
                self.memory.items[record.owner].note |= RELEASED
            else:
                node_at(self.table, record.owner).note |= IS_RELEASED
        if self.duel is not None:
            draw(self, batch)
            self.duel.release(self.table, batch, kept)

    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept:
        cdef Ring* ring = ring_of(self, label_of(node))
        cdef uint64_t hashed
        if not victims_take(&self.victims, self.table, ring, node_id):
            return False
        hashed = hash_ahead(self.table, node)
        index_approach(&self.memory.index, hashed)  # where it becomes a ghost
        self.victims.items[self.victims.size - 1].hashed = hashed
        return True

    # -- searches ----------------------------------------------------------------------------

    cdef bint choose(self, uint64_t n, const Batch* batch, int64_t first) noexcept:
        """Choose up to `n` victims; False, with the search cancelled, without memory.

        Stop at the first of the chosen keys of a batch, if there is one, from `first` on that is
        declined.
        """
        cdef uint32_t position, label
        cdef Candidate* leaves
        if self.take_released(n) and self.victims.size < n:
            open_candidates(self)
            while self.victims.size < n:
                leaves = next_to_leave(self)
                if leaves == NULL:
                    break
                # A continuation is no denser than its prefix: the first to fail decides.
                if batch != NULL and self.declines and self.rule == DENSITY:
                    position = ghosts_find(
                        &self.memory,
                        batch.hashes[batch.indexes[first + <int64_t>self.victims.size]],
                    )
                    label = 0 if position == NIL else self.memory.items[position].note & FREE
                    if leaves.density >= row_of(self, label)[STORED]:
                        break
                take(self, leaves)
            close_candidates(self)
        if self.victims.no_memory:
            self.cancel()
        return not self.victims.no_memory

    cdef bint c_search(self, uint64_t n) noexcept:
        if not self.choose(n, NULL, 0):
            return False
        if self.victims.size < n:
            self.cancel()
            return False
        return True

    cdef int64_t c_make_room(self, Batch* batch, int64_t n, int64_t num_free) noexcept:
        cdef int64_t admitted = min(n, num_free)
        if not self.choose(<uint64_t>(n - admitted), batch, admitted):
            return -1
        admitted += <int64_t>self.victims.size
        if self.declines and self.rule == LRU and admitted < n:
            self.cancel()
            admitted = 0
        return admitted

    cdef void c_settled(self) noexcept:
        if self.duel is not None:
            self.duel.store_begins = True

    # -- the policy as a whole ---------------------------------------------------------------

    cdef void clear_now(self) noexcept:
        cdef int index
        for index in range(self.num_groups * CLASSES):
            ring_clear(ring_at(self, index))
        CompiledPolicy.clear_now(self)

    cdef void c_clear(self) noexcept:
        ghosts_clear(&self.memory)
        walk_clear(&self.walk)
        if not self.counts:
            return
        self._learned.clear()
        self.num_sources = self.num_named = 0
        memset(self.source_counts, 0, sizeof(self.source_counts))
        self.rule = DENSITY
        if self.duel is not None:
            self.duel.clear()

    cdef int stand_alone(self) except -1:
        cdef int index
        cdef CollectorOff held = CollectorOff()
        cdef list orders = [
            ring_node_ids(self.table, ring_at(self, index))
            for index in range(self.num_groups * CLASSES)
        ]
        for index in range(self.num_groups * CLASSES):
            ring_unpark(self.table, ring_at(self, index), orders[index])
        return CompiledPolicy.stand_alone(self)

    cdef uint64_t c_num_ghosts(self) noexcept:
        return self.memory.size

    cdef int require_ring(self, int ring_index) except -1:
        self.require_ready()
        if not 0 <= ring_index < CLASSES:
            raise IndexError(f"the policy has no ring {ring_index}")
        return 0

    def _ring_length(self, int ring_index):
        """Return the number of blocks of a class."""
        cdef uint64_t size = 0
        cdef int index
        self.require_ring(ring_index)
        for index in range(self.num_groups):
            size += self.groups[self.open_groups[index]].rings[ring_index].size
        return size

    def _ring_holds(self, int ring_index, block_hash):
        """Return whether a key is of a resident block of a class."""
        cdef uint32_t node_id
        self.require_ring(ring_index)
        if type(block_hash) is not bytes or not block_hash:
            return False
        node_id = find_key(self, block_hash)
        return (
            node_id != NIL
            and label_of(node_at(self.table, node_id)) & CLASS_MASK == <uint32_t>ring_index
        )

    cdef list c_node_ids(self, int ring_index):
        cdef list node_ids = []
        cdef int said
        for said in range(SAID):
            if self.groups[said] != NULL:
                node_ids += ring_node_ids(self.table, &self.groups[said].rings[ring_index])
        return node_ids

    cdef const char* c_check(self) noexcept:
        cdef const char* broken = ghosts_check(&self.memory)
        cdef uint64_t resident = 0, hashed
        cdef uint32_t place
        cdef const Walked* walked
        cdef int index
        for index in range(self.num_groups * CLASSES):
            broken = broken or ring_check(self.table, ring_at(self, index))
            resident += ring_at(self, index).size
        if broken != NULL:
            return broken
        if resident != self.num_resident:
            return b"resident is all rings"
        for place in range(self.walk.size):
            walked = self.walk.items + place
            if walked.is_ghost:
                hashed = fingerprint(self.memory.items + walked.owner)
                if not self.memory.items[walked.owner].last >> 31:
                    return b"a record of the walk knows it"
                if self.memory.items[walked.owner].note == FREE:
                    return b"the walk is of ghosts and of resident blocks"
            else:
                hashed = hash_node(self.table, node_at(self.table, walked.owner))
                if not node_at(self.table, walked.owner).note & IS_WALKED:
                    return b"a record of the walk knows it"
                if not node_at(self.table, walked.owner).flags & RESIDENT:
                    return b"the walk is of ghosts and of resident blocks"
            if walk_find(&self.walk, hashed, walked.owner, walked.is_ghost) != place:
                return b"a record is at its place in the walk"
        return walk_check(&self.walk)

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        CompiledPolicy._check(self)
        if self.duel is not None:
            self.duel.check()


cdef inline uint32_t said_by(const Hint* hint) noexcept:
    """Return the number of what a hint of a return says."""
    cdef double step = floor(2.0 * log2(hint.expect_s) + 0.5)
    return <uint32_t>(
        (FIRST_SOURCE + hint.source) * STEPS + <int>min(max(step, 0.0), <double>(STEPS - 1))
    )


class HitDensityCachePolicy(HitDensity, _HitDensity, CachePolicy):
    __doc__ = HitDensity.__doc__
    __slots__ = ("__weakref__",)
