"""Hit density, compiled: evict, or do not store, the blocks with the fewest hits per slot.

Structure
    One ring per class of blocks and one more for class 0, beside the records of ``_records_c``, the
    guard and, from the first hint of a return on, the state of ``_hinted_c``: rings of the blocks
    that belong to turns, which a search does not park. See ``_hit_density_py`` for the Python twin
    and the differences from the paper.
Cost
    insert, remove, get O(1); touch O(n); evict and make_room amortised O(n), regardless of pinned
    blocks, with the 16 rings as a constant. With hints a search examines each ring of turns that
    holds blocks, and skips blocks at its ends that may not leave.
"""

from libc.math cimport isnan
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from kvoffload._core.batch cimport (
    Batch,
    batch_ensure,
    batch_set,
    find_all,
    item_key,
    item_length,
)
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.ghosts cimport (
    DECLINED,
    OF_TURN,
    PASSED_OVER,
    SHARED,
    UNCOUNTED,
    Ghost,
    ghosts_find,
    ghosts_remove,
)
from kvoffload._core.items cimport check_items, list_items
from kvoffload._core.ring cimport ring_append, ring_list, ring_remove, ring_renew
from kvoffload._core.table cimport (
    NIL,
    Node,
    Table,
    drop_hashed_key,
    hash_key,
    hash_node,
    node_at,
)
from kvoffload._core.victims cimport (
    Victim,
    evictable,
    victims_cancel,
    victims_find,
    victims_take,
)
from kvoffload.policies._densities_c cimport (
    NEARLY,
    NUM_BINS,
    NUM_CLASSES,
    STORED,
    Densities,
    age_bin,
    class_after,
    densities_copy,
    end_age,
    end_request,
    prior_of,
    start_age,
)
from kvoffload.policies._guard_c cimport (
    PLAIN,
    Guard,
    guard_check,
    guard_clear,
    guard_close,
    guard_divide,
    guard_ensure_release,
    guard_gain,
    guard_note_store,
    guard_open,
    guard_release,
    guard_say,
    guard_serve,
    guard_target,
    sample_shift,
)
from kvoffload.policies._hinted_c cimport (
    Hinted,
    count_reuse,
    end_record,
    hinted_open,
    start_record,
)
from kvoffload.policies._records_c cimport Records, class_of, ring_of
from kvoffload.policies._returns_c cimport (
    count_return,
    expected_half_octave,
    returns_begin,
    returns_compute,
    returns_ensure,
    said_seconds,
    seen_of_source,
    stored_part_density,
)
from kvoffload.policies._trials_c cimport ARC, HIT_DENSITY, LRU, trials_heed
from kvoffload.policies._turn_tails_c cimport (
    BY_DENSITY,
    BY_LISTS,
    BY_RETURN,
    BY_USE,
    NO_TAIL,
    PLACES,
    Search,
    Tail,
    Tails,
    is_sparser,
    tails_begin,
    tails_first,
    tails_give,
)
from kvoffload.policies._turns_c cimport (
    AGAIN,
    MOST_SOURCES,
    NUM_HALF_OCTAVES,
    NUM_RINGS,
    PLACE_OF,
    Turn,
    Turns,
    turns_begin,
    turns_join,
    turns_leave,
    turns_put,
    turns_renew,
    turns_settle,
    turns_take,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint, find_key, key_of

from kvoffload._checks import as_batch, batch_error, check_cache_capacity, check_int
from kvoffload._sampling import new_secret
from kvoffload.policies import registry
from kvoffload.policies._views import BlocksView
from kvoffload.policies.base import CachePolicy
from kvoffload.types import HintSource

cdef enum:
    # Two in seven ghosts are of blocks that were used again.
    REUSED_GHOSTS = 2
    ALL_GHOSTS = 7

cdef object MOST_GHOSTS = 2**32 - 2
# Rings from the sparsest on, if densities tie: longer gaps first, then fewer uses.
cdef int[NUM_RINGS] SPARSEST_FIRST = [0, AGAIN, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8]
# Names of the trials, by their ids, and their ids in the order of the Python twin.
cdef tuple RULES = ("lru", "hit-density", "arc-classic", "plain")
cdef int[4] RULE_ORDER = [LRU, HIT_DENSITY, PLAIN, ARC]
# The search among the blocks of turns, by rule.
cdef Search[4] SEARCHES = [BY_USE, BY_RETURN, BY_LISTS, BY_DENSITY]


cdef inline uint64_t hash_item(Table* table, const Batch* batch, Py_ssize_t index) noexcept:
    return hash_key(table, item_key(batch, index), item_length(batch, index))


cdef inline double time_of(const Hint* hint) noexcept:
    """Return the time of a call in seconds."""
    cdef timespec moment
    if hint != NULL and not isnan(hint.now):
        return hint.now
    clock_gettime(CLOCK_MONOTONIC, &moment)
    return <double>moment.tv_sec + <double>moment.tv_nsec * 1e-9


cdef bint may_leave(void* policy, uint32_t node_id) noexcept:
    """Return whether a block of a turn may leave in the search at work."""
    cdef _HitDensity owner = <_HitDensity>policy
    cdef Node* node = node_at(owner.table, node_id)
    return evictable(owner.table, node_at(owner.table, node_id))


cdef uint32_t age_of(void* policy, uint32_t node_id) noexcept:
    cdef _HitDensity owner = <_HitDensity>policy
    return owner.request - owner.last[node_id]


cdef inline void take_sparser(Offer* least, const Offer* offer) noexcept:
    """Keep the sparser of two offers."""
    if least.index == NONE or (
        offer.density < least.density
        or offer.density == least.density
        and offer.place < least.place
    ):
        least[0] = offer[0]


cdef inline void take_older(Offer* oldest, const Offer* offer) noexcept:
    """Keep the older of two offers."""
    if oldest.index == NONE or (
        offer.age > oldest.age or offer.age == oldest.age and offer.place < oldest.place
    ):
        oldest[0] = offer[0]


cdef Offer NO_OFFER
memset(&NO_OFFER, 0, sizeof(Offer))
NO_OFFER.index = NONE


cdef class _HitDensity(Records):
    def __cinit__(self):
        memset(&self.protector, 0, sizeof(Guard))

    def __dealloc__(self):
        guard_close(&self.protector)

    def __init__(self, cache_capacity, *, ghosts=3.5, guard=1):
        cdef int64_t capacity = check_cache_capacity(cache_capacity)
        cdef uint32_t total, reused
        cdef bytes secret = new_secret()
        ghosts = registry.entry("hit-density").option("ghosts").check(ghosts)
        guard = registry.entry("hit-density").option("guard").check(guard)
        total = min(int(ghosts * capacity), MOST_GHOSTS)
        reused = <uint32_t>(<uint64_t>total * REUSED_GHOSTS // ALL_GHOSTS)
        self.set_up(capacity, 1, NUM_RINGS)
        self.open_records(total - reused, reused)
        self.ghosts_a_block = ghosts
        self.offered = NULL
        self.declines = True
        self.source_names = [None] * MOST_SOURCES
        self.num_sources = 0
        self.has_hints = False
        guard_close(&self.protector)
        guard_clear(&self.protector)
        if guard and capacity:
            total = int(ghosts * (capacity >> sample_shift(capacity)))
            reused = <uint32_t>(<uint64_t>total * REUSED_GHOSTS // ALL_GHOSTS)
            if not guard_open(&self.protector, capacity, total - reused, reused, secret):
                raise MemoryError("no room for the guard")
        self.publish()

    @property
    def ghosts(self):
        """Number of ghosts per block of capacity, as given."""
        self.require_ready()
        return self.ghosts_a_block

    @property
    def guard(self):
        """Whether LRU or ARC may be followed, as given; 0 if the capacity is 0."""
        self.require_ready()
        return int(self.protector.on)

    @property
    def rule(self):
        """The followed policy: ``hit-density``, ``plain``, ``lru`` or ``arc-classic``.

        ``plain`` is hit density without hints.
        """
        self.require_ready()
        return RULES[self.protector.rule]

    @property
    def trial_hits(self):
        """Recent hits of each policy on the sample, fading; empty without a guard."""
        self.require_ready()
        if not self.protector.on:
            return {}
        return {
            RULES[trial]: self.protector.hits[trial]
            for trial in RULE_ORDER
            if trial != PLAIN or self.hinted != NULL
        }

    @property
    def hint_sources(self):
        """Facts on each source that says when sessions return, in the order of first hints.

        16 are distinguished; an entry without a name after them stands for all others.
        """
        cdef int source
        self.require_ready()
        if self.hinted == NULL:
            return ()
        names = [*self.source_names[: self.num_sources], None]
        return tuple(
            [
                HintSource(names[source], *seen_of_source(&self.hinted.returns, source))
                for source in range(self.hinted.returns.num_sources)
            ]
        )

    @property
    def hint_gain(self):
        """Gain by hints of returns; None without a guard, a hint, or enough requests since."""
        self.require_ready()
        return guard_gain(&self.protector) if self.protector.on else None

    @property
    def num_requests(self):
        """Number of requests so far, the unit of ages."""
        self.require_ready()
        return self.request

    @property
    def rings(self):
        """Resident blocks by class, with their live statuses, least recent first; read-only.

        The last ring has the blocks of class 0 that ARC's rule treats as used again.
        """
        self.require_ready()
        return tuple([BlocksView(self, ring_index) for ring_index in range(NUM_RINGS)])

    @property
    def densities(self):
        """Expected hits per block and request, by class and by bin of age."""
        self.require_ready()
        return tuple([
            tuple([self.learned.table[reuse_class][bin_index] for bin_index in range(NUM_BINS)])
            for reuse_class in range(NUM_CLASSES)
        ])

    def begun(self, hashes, hints=None):
        """Handle the beginning of a request, with the client's hints of the session's return."""
        cdef Hint said
        cdef const Hint* hint
        cdef list batch
        if type(self).touch is not CompiledPolicy.touch:  # a subclass's own
            CachePolicy.begun(self, hashes, hints)
            return
        self.require_ready()
        hint = self.hint_of(hints, None, &said)  # before the batch: this may run Python code
        batch = self.open_batch(hashes, "hashes", "begun")
        find_all(self.table, &self.batch)
        self.begin_request(&self.batch, hint)

    def _ring_length(self, int ring_index):
        """Return the number of keys on a ring, from 0, and on those of turns of its class."""
        self.require_ring(ring_index)
        if self.hinted == NULL:
            return self.rings[ring_index].size
        return self.rings[ring_index].size + self.hinted.turns.num_on[ring_index]

    def _ring_keys(self, int ring_index):
        """Return the keys of a ring, from 0, least recent first, then those of its turns."""
        cdef int collecting
        self.require_ring(ring_index)
        collecting = PyGC_Disable()
        try:
            node_ids = self.c_node_ids(ring_index)
            if self.hinted != NULL:
                node_ids += self.node_ids_of_turns(ring_index)
            return [key_of(node_at(self.table, node_id)) for node_id in node_ids]
        finally:
            if collecting:
                PyGC_Enable()

    def _ring_holds(self, int ring_index, block_hash):
        """Return whether a key is on a ring, from 0, or on one of turns of its class."""
        cdef uint32_t node_id
        self.require_ring(ring_index)
        if type(block_hash) is not bytes or not block_hash:
            return False
        node_id = find_key(self, block_hash)
        return node_id != NIL and ring_of(node_at(self.table, node_id)) == ring_index

    cdef list node_ids_of_turns(self, int ring_index):
        """Return the nodes on the rings of turns with a class, by key."""
        cdef const Turns* turns = &self.hinted.turns
        cdef list node_ids = []
        cdef uint32_t source, key, part, node_id
        for source in range(MOST_SOURCES + 1):
            key = (source * NUM_RINGS + <uint32_t>ring_index) * NUM_HALF_OCTAVES
            for key in range(key, key + NUM_HALF_OCTAVES):
                part = turns.rings[key].oldest
                while part:
                    node_id = turns.parts[part].first
                    while node_id != NIL:
                        node_ids.append(node_id)
                        node_id = turns.members[node_id].behind
                    part = turns.parts[part].newer
        return node_ids

    def finished(self, hashes, hints=None):
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        cdef Hint said
        cdef const Hint* hint
        cdef list batch
        self.require_ready()
        hint = self.hint_of(hints, None, &said)  # before the batch: this may run Python code
        batch = self.open_batch(hashes, "hashes", "finished")
        find_all(self.table, &self.batch)
        self.finish_request(&self.batch, hint)

    # -- hints -------------------------------------------------------------------------------

    cdef int c_source(self, str source) except -1:
        cdef int number = 0
        while number < self.num_sources and self.source_names[number] != source:
            number += 1
        if not self.prepare_hints(number):
            raise MemoryError("no room for hints")
        self.new_source = source
        return number

    cdef bint prepare_hints(self, int source) noexcept:
        """Make room for the state that the first hint of a source creates."""
        cdef uint64_t num_ghosts = <uint64_t>self.memory.clocks[0].size + self.memory.clocks[1].size
        if not guard_ensure_release(&self.protector):
            return False
        if self.prepared == NULL:
            self.prepared = hinted_open(
                self.num_last, num_ghosts, &self.protector.trials if self.protector.on else NULL
            )
        return self.prepared != NULL and returns_ensure(&self.prepared.returns, source)

    cdef void heed(self, const Hint* hint) noexcept:
        """Note the hint of a return, unless the session ends."""
        cdef Hinted* prepared = self.prepared
        self.says = False
        if hint == NULL or hint.expect_s <= 0.0:
            return
        # NULL if the policy was cleared after the call of `c_source`.
        if prepared == NULL or prepared.returns.sources[hint.source] == NULL:
            return
        if self.hinted == NULL:
            self.hinted = prepared
            self.has_hints = True
            densities_copy(&prepared.plain, &self.learned)
            if self.protector.on:
                guard_divide(&self.protector, &prepared.plain_trial)
                trials_heed(
                    &self.protector.trials,
                    &prepared.trial_turns,
                    &prepared.returns,
                    &prepared.tails,
                )
        if hint.source == self.num_sources and hint.source < MOST_SOURCES:
            self.source_names[self.num_sources] = self.new_source
            self.num_sources += 1
        prepared.returns.num_sources = max(prepared.returns.num_sources, hint.source + 1)
        self.says = not hint.ends
        self.said = said_seconds(hint.expect_s)
        self.source = hint.source

    cdef uint32_t new_turn(self, double now) noexcept:
        """Begin the turn that the hints at work describe."""
        self.hinted.returns.sources[self.source].hints += 1
        return turns_begin(
            &self.hinted.turns,
            now,
            self.said,
            self.source,
            expected_half_octave(&self.hinted.returns, self.said, self.source),
        )

    cdef uint32_t turn_with(self, Batch* batch) noexcept:
        """Return the turn of a request's own blocks, if it began with the same hint, or 0.

        The turn is open then.
        """
        cdef Turns* turns = &self.hinted.turns
        cdef Turn* turn
        cdef Py_ssize_t index
        cdef uint32_t part
        for index in range(batch.size - 1, -1, -1):
            part = self.part_in_batch(batch, index) if batch.indexes[index] else 0
            if part:
                turn = turns.turns + turns.parts[part].turn
                if turn.said == self.said and turn.source == self.source:
                    turn.is_open = True
                    return turns.parts[part].turn
        return 0

    cdef void note_own(self, Batch* batch) noexcept:
        """Set ``indexes`` to 1 for each of a request's own blocks.

        Blocks that were used after the deepest known one get 0.
        """
        cdef uint32_t last = 0, part = 0, used = 0
        cdef Py_ssize_t index
        cdef bint is_known = self.find_deepest(batch, &last, &part)
        for index in range(batch.size):
            batch.indexes[index] = 1
            if is_known and self.last_in_batch(batch, index, &used):
                batch.indexes[index] = self.request - used >= self.request - last

    cdef bint last_in_batch(self, Batch* batch, Py_ssize_t index, uint32_t* last) noexcept:
        """Find the last use of a key; False if it is unknown."""
        cdef uint32_t node_id = batch.node_ids[index], position
        if node_id != NIL:
            last[0] = self.last[node_id]
            return True
        position = ghosts_find(&self.memory, hash_item(self.table, batch, index))
        if position != NIL:
            last[0] = self.memory.items[position].last
        return position != NIL

    cdef uint32_t part_in_batch(self, Batch* batch, Py_ssize_t index) noexcept:
        """Return the part of a key, 0 for none."""
        cdef uint32_t node_id = batch.node_ids[index], position
        if node_id != NIL:
            return part_of(self, node_id, node_at(self.table, node_id))
        position = ghosts_find(&self.memory, hash_item(self.table, batch, index))
        return self.part_of_ghost(position) if position != NIL else 0

    cdef bint find_deepest(self, Batch* batch, uint32_t* last, uint32_t* part) noexcept:
        """Find the last use of the deepest known block, and its part unless it is released."""
        cdef Py_ssize_t index
        cdef uint32_t node_id, position
        cdef Node* node
        cdef Ghost* ghost
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                node = node_at(self.table, node_id)
                last[0] = self.last[node_id]
                part[0] = 0 if node.note & UNCOUNTED else part_of(self, node_id, node)
                return True
            position = ghosts_find(&self.memory, hash_item(self.table, batch, index))
            if position != NIL:
                ghost = self.memory.items + position
                last[0] = ghost.last
                part[0] = 0 if ghost.flags & UNCOUNTED else self.part_of_ghost(position)
                return True
        return False

    cdef void join(self, Batch* batch, uint32_t turn) noexcept:
        """Add a request's own blocks to a turn, except those that sessions share."""
        cdef uint32_t node_id, position
        cdef Py_ssize_t index
        for index in range(batch.size - 1, -1, -1):
            if not batch.indexes[index]:
                continue
            node_id = batch.node_ids[index]
            if node_id != NIL:
                self.join_block(node_id, node_at(self.table, node_id), turn)
                continue
            position = ghosts_find(&self.memory, hash_item(self.table, batch, index))
            if position != NIL:
                self.join_ghost(position, turn)

    cdef void join_block(self, uint32_t node_id, Node* node, uint32_t turn) noexcept:
        cdef uint32_t last = self.last[node_id]
        cdef uint32_t part = part_of(self, node_id, node)
        cdef int reuse_class = class_of(node)
        if node.note & SHARED:
            return
        if self.hinted.turns.parts[part].turn != turn:
            if not node.note & UNCOUNTED:
                end_record(&self.learned, self.hinted, reuse_class, last, self.request, part)
            self.belong(node_id, node, turn)
            if not node.note & UNCOUNTED:
                start_block(self, node_id, node, reuse_class, last)
        renew_block(self, node_id, node)

    cdef void join_ghost(self, uint32_t position, uint32_t turn) noexcept:
        cdef Ghost* ghost = self.memory.items + position
        cdef uint32_t part = self.part_of_ghost(position)
        cdef int reuse_class = ghost.kind - 1
        if ghost.flags & SHARED or self.hinted.turns.parts[part].turn == turn:
            return
        if not ghost.flags & UNCOUNTED:
            end_record(&self.learned, self.hinted, reuse_class, ghost.last, self.request, part)
        self.belong_ghost(position, turn, reuse_class)
        if not ghost.flags & UNCOUNTED:
            self.start_ghost(position)

    # -- the records of turns ----------------------------------------------------------------

    cdef void start_ghost(self, uint32_t position) noexcept:
        cdef Ghost* ghost = self.memory.items + position
        start_record(
            &self.learned,
            self.hinted,
            ghost.kind - 1,
            ghost.last,
            self.request,
            self.part_of_ghost(position),
        )

    cdef void belong(self, uint32_t node_id, Node* node, uint32_t turn) noexcept:
        """Assign a block to a turn or none; its age is not counted meanwhile."""
        cdef uint32_t part = part_of(self, node_id, node)
        cdef int ring = ring_of(node)
        if part == 0 and (turn == 0 or node.note & SHARED):
            return
        if part and self.hinted.turns.parts[part].turn == turn and not node.note & SHARED:
            return
        lift(self, node_id, node)
        leave_part(self, part)
        put(self, node_id, node, ring, join_part(self, turn, ring, node.note))

    cdef void belong_ghost(self, uint32_t position, uint32_t turn, int reuse_class) noexcept:
        """Assign a ghost, of `reuse_class` from now on, to a turn or none."""
        cdef Ghost* ghost = self.memory.items + position
        cdef uint32_t part = self.part_of_ghost(position)
        ghost.kind = <uint8_t>(reuse_class + 1)
        if part == 0 and turn == 0:
            return
        leave_part(self, part)
        part = join_part(self, turn, reuse_class, ghost.flags)
        ghost.flags &= <uint8_t>(~OF_TURN & 0xFF)
        if part:
            ghost.flags |= OF_TURN
            self.hinted.ghost_parts[position] = part

    cdef void change_ring(self, uint32_t node_id, Node* node, int ring) noexcept:
        """Move a block to another ring of its class, in the same turn."""
        cdef uint32_t former = part_of(self, node_id, node), part = former
        lift(self, node_id, node)
        if former:
            part = turns_join(
                &self.hinted.turns, self.hinted.turns.parts[former].turn, ring
            )
            if not node.note & UNCOUNTED:
                self.hinted.turns.parts[former].living -= 1
                self.hinted.turns.parts[part].living += 1
            turns_leave(&self.hinted.turns, former)
        put(self, node_id, node, ring, part)

    # -- uses --------------------------------------------------------------------------------

    cdef void c_touch(self, Batch* batch) noexcept:
        self.says = False
        self.serve(batch, False, 0.0, False)

    cdef void c_begun(self, Batch* batch, const Hint* hint) noexcept:
        cdef double now = 0.0
        self.heed(hint)
        if self.hinted != NULL and batch.size:
            now = time_of(hint)
            returns_begin(&self.hinted.returns, now)
        self.serve(batch, self.hinted != NULL, now, hint != NULL and hint.ends)

    cdef void serve(self, Batch* batch, bint is_timed, double now, bint ends) noexcept:
        """Count a request, at time `now` in seconds if it is timed."""
        cdef Py_ssize_t num_stored
        cdef uint32_t turn = 0, latest_age = 0
        if batch.size == 0:
            return
        if self.repeats_request(batch):
            self.renew(batch)
            if self.protector.rule == ARC:
                self.use_at_once(batch)
            if self.says:
                self.note_own(batch)
                turn = self.turn_with(batch)
                if turn == 0:
                    turn = self.new_turn(now)
                self.join(batch, turn)
            num_stored = self.num_stored(batch)
        else:
            self.request += 1
            if self.hinted != NULL:
                latest_age = self.count_return(batch, is_timed)
                if self.says:
                    turn = self.new_turn(now)
            num_stored = self.use(batch, False, turn, latest_age)
            self.end_request(<uint64_t>batch.size)
        if self.protector.on:
            guard_serve(
                &self.protector,
                self.table,
                batch,
                num_stored,
                &self.learned,
                &self.hinted.plain if self.hinted != NULL else NULL,
                self.request,
                self.hinted.turns.turns + turn if turn else NULL,
                ends,
            )
        if turn:
            turns_settle(&self.hinted.turns, turn)

    cdef uint32_t count_return(self, Batch* batch, bint is_timed) noexcept:
        """Count a return to the turn of the deepest known block.

        Return how many requests ago that block was used; 0 if none is known.
        """
        cdef uint32_t last = 0, part = 0
        if not self.find_deepest(batch, &last, &part):
            return 0
        if is_timed and part:
            count_return(
                &self.hinted.returns, &self.hinted.turns, self.hinted.turns.parts[part].turn
            )
        return self.request - last

    cdef void end_request(self, uint64_t length) noexcept:
        cdef double factor = end_request(&self.learned, length, self.request)
        if self.hinted == NULL:
            return
        end_request(&self.hinted.plain, length, self.request)
        if factor != 0.0:
            returns_compute(
                &self.hinted.returns, &self.hinted.turns, prior_of(&self.learned), factor
            )

    cdef void c_extended(self, Batch* batch) noexcept:
        self.use(batch, False, 0, 0)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        cdef uint32_t turn
        self.heed(hint)
        if self.repeats_request(batch):
            self.renew(batch)
            if self.says:
                self.note_own(batch)
        else:
            if self.says:  # before all become recent
                self.note_own(batch)
            self.use(batch, True, 0, 0)
        if not self.says:
            return
        turn = self.turn_with(batch)
        if turn == 0:
            turn = self.new_turn(time_of(hint))
            if self.protector.on:
                guard_say(&self.protector, batch, self.hinted.turns.turns + turn)
        self.join(batch, turn)
        turns_settle(&self.hinted.turns, turn)

    cdef Py_ssize_t use(
        self, Batch* batch, bint finishes, uint32_t turn, uint32_t latest_age
    ) noexcept:
        """Count a use of each block, or no use if the request only `finishes`.

        The blocks belong to `turn` from now on, 0 for none; blocks that were used less than
        `latest_age` requests ago never belong to a turn again. Return the number of leading blocks
        not being stored.
        """
        cdef uint32_t now = self.request, node_id, last, part
        cdef uint32_t ghost_position = NIL
        cdef uint64_t hashed = 0
        cdef uint32_t least_age = 0, age
        cdef int use_class = NONE, reuse_class
        cdef Py_ssize_t index, num_stored = batch.size
        cdef Hinted* hinted = self.hinted
        cdef bint is_plain = not self.has_hints and not finishes
        cdef uint8_t note
        cdef uint8_t* flags
        cdef Node* node
        cdef Ghost* ghost
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                node = node_at(self.table, node_id)
                ghost = NULL
                reuse_class = class_of(node)
                last = self.last[node_id]
            else:
                hashed = hash_item(self.table, batch, index)
                ghost_position = ghosts_find(&self.memory, hashed)
                if ghost_position == NIL:
                    reuse_class = 0
                    if use_class != NONE:
                        reuse_class = class_after(least_age, use_class)
                    part = join_part(self, turn, reuse_class, 0) if turn else 0
                    start_record(&self.learned, hinted, reuse_class, now, now, part)
                    self.remember(hashed, reuse_class, now, 0, part)
                    continue
                node = NULL
                ghost = self.memory.items + ghost_position
                reuse_class = ghost.kind - 1
                last = ghost.last
            if last == now:  # a repeat within the batch
                if node != NULL:
                    to_most_recent(self, node_id, node)
                else:
                    self.renew_ghost(ghost_position)
                continue
            # The use covers all blocks before it, too: this record replaces lost ones.
            age = now - last
            if use_class == NONE or age <= least_age:
                least_age = age
                use_class = reuse_class
            if node != NULL and is_plain and node.block.ref_cnt >= 0:
                # The common case without hints: the code below, reduced.
                self.last[node_id] = now
                end_age(&self.learned, reuse_class, last, now)
                self.learned.reused[reuse_class][age_bin(age)] += 1.0
                reuse_class = class_after(least_age, use_class)
                start_age(&self.learned, reuse_class, now, now)
                ring_remove(self.table, &self.rings[node.ring - 1], node)
                ring_append(self.table, &self.rings[reuse_class], node_id, node)
                continue
            flags = &node.note if node != NULL else &ghost.flags
            part = 0
            if hinted != NULL:
                if age < latest_age:
                    flags[0] |= SHARED
                if node != NULL:
                    part = part_of(self, node_id, node)
                else:
                    part = self.part_of_ghost(ghost_position)
            note = flags[0]
            if note & UNCOUNTED:
                flags[0] = note & <uint8_t>(~UNCOUNTED & 0xFF)
            else:
                end_record(&self.learned, hinted, reuse_class, last, now, part)
            if node != NULL:
                self.last[node_id] = now
                if node.block.ref_cnt < 0:  # the touch of the request that stores it
                    num_stored = index
                if finishes or node.block.ref_cnt < 0:
                    if hinted != NULL and not finishes:
                        self.belong(node_id, node, turn)
                    start_block(self, node_id, node, reuse_class, now)
                    renew_block(self, node_id, node)
                    continue
                if not note & UNCOUNTED:
                    count_reuse(&self.learned, hinted, reuse_class, age, part)
                reuse_class = class_after(least_age, use_class)
                lift(self, node_id, node)
                leave_part(self, part)
                part = join_part(self, turn, reuse_class, note) if turn else 0
                start_record(&self.learned, hinted, reuse_class, now, now, part)
                put(self, node_id, node, reuse_class, part)
                continue
            if ghost.flags & DECLINED:  # of the request that could not store it
                num_stored = index
            ghost.last = now
            if finishes or ghost.flags & DECLINED:
                ghost.flags &= <uint8_t>(~DECLINED & 0xFF)
                if not finishes:
                    self.belong_ghost(ghost_position, turn, reuse_class)
                self.start_ghost(ghost_position)
                continue
            if not note & UNCOUNTED:
                count_reuse(&self.learned, hinted, reuse_class, age, part)
            reuse_class = class_after(least_age, use_class)
            if ghost.kind > 1:
                self.belong_ghost(ghost_position, turn, reuse_class)
                self.start_ghost(ghost_position)
                ghost.flags |= PASSED_OVER
            else:
                leave_part(self, part)
                part = join_part(self, turn, reuse_class, note) if turn else 0
                start_record(&self.learned, hinted, reuse_class, now, now, part)
                ghosts_remove(&self.memory, ghost_position)
                self.remember(hashed, reuse_class, now, note & SHARED, part)
        return num_stored

    cdef void renew_ghost(self, uint32_t position) noexcept:
        cdef Ghost* ghost = self.memory.items + position
        if ghost.flags & UNCOUNTED:
            self.start_ghost(position)
        ghost.flags &= <uint8_t>(~(DECLINED | UNCOUNTED) & 0xFF)

    cdef bint repeats_request(self, Batch* batch) noexcept:
        """Return whether the request that began last has used all blocks of a batch.

        If so, ``indexes`` of the batch holds the positions of the ghosts.
        """
        cdef Py_ssize_t index
        cdef uint32_t node_id, ghost_position
        for index in range(batch.size):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                if self.last[node_id] != self.request:
                    return False
                continue
            ghost_position = ghosts_find(&self.memory, hash_item(self.table, batch, index))
            if ghost_position == NIL or self.memory.items[ghost_position].last != self.request:
                return False
            batch.indexes[index] = ghost_position
        return True

    cdef Py_ssize_t num_stored(self, Batch* batch) noexcept:
        """Return the number of leading blocks that are not being stored."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        for index in range(batch.size):
            node_id = batch.node_ids[index]
            if node_id != NIL and node_at(self.table, node_id).block.ref_cnt < 0:
                return index
        return batch.size

    cdef void renew(self, Batch* batch) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        if self.has_hints:
            self.renew_with_hints(batch)
            return
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                node = node_at(self.table, node_id)
                ring_renew(self.table, &self.rings[node.ring - 1], node_id, node)
            else:
                self.renew_ghost(batch.indexes[index])

    cdef void renew_with_hints(self, Batch* batch) noexcept:
        """Implement `renew` if blocks may be released, or belong to turns."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                to_most_recent(self, node_id, node_at(self.table, node_id))
            else:
                self.renew_ghost(batch.indexes[index])

    cdef void use_at_once(self, Batch* batch) noexcept:
        """Move the blocks of an immediately repeated request to ARC's T2."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if ring_of(node) == 0 and node.block.ref_cnt >= 0:
                self.change_ring(node_id, node, AGAIN)

    # -- residence ---------------------------------------------------------------------------

    def make_room(self, hashes, num_free, protected):
        """Decide how many of `hashes` to store, and evict for them; never refuse the store."""
        cdef list batch, marked
        cdef int64_t count
        cdef int collecting
        self.require_ready()
        # A copy: `protected` may be an iterator that changes the caller's list.
        batch = list(hashes) if type(hashes) is list else as_batch(hashes)
        if not check_items(batch):
            raise batch_error(batch)
        count = check_int("num_free", num_free, 0)
        marked = self.open_batch(protected, "protected", "make_room")
        collecting = PyGC_Disable()
        try:
            if not self.c_ensure(0):
                raise MemoryError()
            self.mark_protected()
            if not batch_ensure(&self.batch, len(batch)):
                raise MemoryError()
            batch_set(&self.batch, list_items(batch), len(batch))
            return self.room_now(count)
        finally:
            if collecting:
                PyGC_Enable()

    def _set_declining(self, bint allowed):
        self.declines = allowed
        self.protector.trials.declines = allowed
        if self.protector.plain != NULL:
            self.protector.plain.declines = allowed

    cdef tuple room_now(self, int64_t num_free):
        cdef Batch* batch = &self.batch
        cdef int64_t admitted
        cdef Py_ssize_t index
        for index in range(batch.size):
            batch.indexes[index] = <uint32_t>index
        self.victims.no_memory = False
        admitted = self.c_make_room(batch, batch.size, num_free)
        if admitted < 0:
            raise MemoryError()
        return admitted, self.let_go()

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        cdef uint64_t hashed = hash_node(self.table, node)
        cdef uint32_t position = ghosts_find(&self.memory, hashed)
        if position == NIL:
            self.last[node_id] = self.request
            start_record(&self.learned, self.hinted, 0, self.request, self.request, 0)
            ring_append(self.table, &self.rings[0], node_id, node)
        else:
            self.take_in(node_id, node, position)
        if self.protector.store_begins:
            guard_note_store(&self.protector, hashed)

    cdef void take_in(self, uint32_t node_id, Node* node, uint32_t position) noexcept:
        """Turn a ghost into a block."""
        cdef Ghost* ghost = self.memory.items + position
        cdef int reuse_class = ghost.kind - 1
        cdef uint32_t part = self.part_of_ghost(position)
        self.last[node_id] = ghost.last
        node.note = ghost.flags & <uint8_t>(UNCOUNTED | SHARED)
        ghosts_remove(&self.memory, position)
        put(self, node_id, node, reuse_class, part)

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        cdef uint32_t part = part_of(self, node_id, node)
        cdef int ring = ring_of(node)
        if not node.note & UNCOUNTED:
            end_record(
                &self.learned,
                self.hinted,
                class_of(node),
                self.last[node_id],
                self.request,
                part,
            )
        if part:  # it leaves a ring of the policy
            lift(self, node_id, node)
            leave_part(self, part)
            put(self, node_id, node, ring, 0)

    # -- released blocks ---------------------------------------------------------------------

    cdef bint ensure_release(self, Py_ssize_t n) noexcept:
        return CompiledPolicy.ensure_release(self, n) and guard_ensure_release(&self.protector)

    cdef void c_release(self, Batch* batch) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id, position
        cdef Node* node
        CompiledPolicy.c_release(self, batch)
        self.has_hints = True
        for index in range(batch.size):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                node = node_at(self.table, node_id)
                if not node.note & UNCOUNTED:
                    end_record(
                        &self.learned,
                        self.hinted,
                        class_of(node),
                        self.last[node_id],
                        self.request,
                        part_of(self, node_id, node),
                    )
                    node.note |= UNCOUNTED
                continue
            position = ghosts_find(&self.memory, hash_item(self.table, batch, index))
            if position != NIL:
                self.release_ghost(position)
        if self.protector.on:
            guard_release(&self.protector, batch)

    cdef void release_ghost(self, uint32_t position) noexcept:
        cdef Ghost* ghost = self.memory.items + position
        if ghost.flags & UNCOUNTED:
            return
        end_record(
            &self.learned,
            self.hinted,
            ghost.kind - 1,
            ghost.last,
            self.request,
            self.part_of_ghost(position),
        )
        ghost.flags |= UNCOUNTED

    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept:
        if node.ring <= NUM_RINGS:
            return CompiledPolicy.take_one(self, node_id, node)
        return victims_take(&self.victims, self.table, NULL, node_id)

    # -- searches ----------------------------------------------------------------------------

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef int ring_index
        if not self.take_released(n):
            victims_cancel(&self.victims, self.table)
            return False
        self.open_candidates()
        while self.victims.size < n and not self.victims.no_memory:
            ring_index = self.next_to_leave()
            if ring_index == NONE:
                break
            self.take(ring_index)
        self.close_candidates()
        if self.victims.size < n or self.victims.no_memory:
            victims_cancel(&self.victims, self.table)
            return False
        return True

    cdef int64_t c_make_room(self, Batch* batch, int64_t n, int64_t num_free) noexcept:
        cdef int64_t admitted = min(n, num_free)
        cdef int ring_index
        cdef bint admits_all = self.protector.rule == LRU or self.protector.rule == ARC
        if admitted < n:
            if not self.take_released(<uint64_t>(n - admitted)):
                victims_cancel(&self.victims, self.table)
                return -1
            admitted += <int64_t>self.victims.size
        if admitted < n:
            self.open_candidates()
            while admitted < n and not self.victims.no_memory:
                ring_index = self.next_to_leave()
                if ring_index == NONE:
                    break
                if admits_all or not self.declines:
                    self.take(ring_index)
                    admitted += 1
                    continue
                # A continuation is no denser than its prefix: the first to fail decides.
                if self.density_of(ring_index) >= self.stored_density(
                    self.ghost_offered(batch, admitted)
                ):
                    break
                self.take(ring_index)
                admitted += 1
            self.close_candidates()
            if self.victims.no_memory:
                victims_cancel(&self.victims, self.table)
                return -1
            if admits_all and self.declines and admitted < n:
                victims_cancel(&self.victims, self.table)
                admitted = 0
        self.offer(batch, admitted, n)
        return admitted

    cdef int64_t c_make_room_of_released(
        self, Batch* batch, int64_t n, int64_t num_free
    ) noexcept:
        cdef int64_t admitted = min(n, num_free)
        if not self.take_released(<uint64_t>(n - admitted)):
            victims_cancel(&self.victims, self.table)
            return -1
        admitted += <int64_t>self.victims.size
        self.offer(batch, admitted, n)
        return admitted

    cdef void offer(self, Batch* batch, int64_t admitted, int64_t n) noexcept:
        """Note the offered batch until the search is settled."""
        self.offered = batch
        self.num_admitted = admitted
        self.num_offered = n

    cdef uint32_t ghost_offered(self, Batch* batch, int64_t index) noexcept:
        """Return the position of the ghost of an offered key, or NIL."""
        return ghosts_find(
            &self.memory, hash_item(self.table, batch, <Py_ssize_t>batch.indexes[index])
        )

    cdef void open_candidates(self) noexcept:
        """Find the oldest block of each ring that may leave."""
        cdef int ring_index
        cdef uint64_t index
        for ring_index in range(NUM_RINGS):
            self.cursors[ring_index].started = False
            self.candidates[ring_index].present = False
        for ring_index in range(NUM_RINGS):
            self.advance(ring_index)
        self.t1_size = <int64_t>self.rings[0].size
        for index in range(self.victims.size):  # each was released
            self.t1_size += ring_of(node_at(self.table, self.victims.items[index].node_id)) != 0
        if self.protector.rule == ARC:
            self.t1_target = guard_target(&self.protector)
        if self.hinted != NULL:
            self.t1_size += <int64_t>self.hinted.turns.num_on[0]
            self.open_tails()

    cdef void open_tails(self) noexcept:
        """Find the blocks of turns that may leave, at the ends of their rings."""
        cdef Tails* tails = &self.hinted.tails
        tails.turns = &self.hinted.turns
        tails.returns = &self.hinted.returns
        tails.learned = &self.hinted.plain
        tails.owner = <void*>self
        tails.may_leave = may_leave
        tails.age_of = age_of
        tails_begin(tails, SEARCHES[self.protector.rule])

    cdef int next_to_leave(self) noexcept:
        """Return the candidate that leaves next by the rule in force, or NONE.

        That is the number of a ring or, NUM_RINGS greater, of a tail of a ring of turns.
        """
        cdef int oldest = NONE, other = NONE, index, ring
        if self.hinted != NULL and self.hinted.tails.size:
            return self.next_with_turns()
        if self.protector.rule == HIT_DENSITY or self.protector.rule == PLAIN:
            return self.sparsest()
        for index in range(NUM_RINGS):
            ring = SPARSEST_FIRST[index]
            if not self.candidates[ring].present:
                continue
            if oldest == NONE or self.candidates[ring].age > self.candidates[oldest].age:
                oldest = ring
            if ring and (other == NONE or self.candidates[ring].age > self.candidates[other].age):
                other = ring
        if self.protector.rule != ARC:
            return oldest
        if self.candidates[0].present and <double>self.t1_size > self.t1_target:
            return 0
        if other == NONE:
            return 0 if self.candidates[0].present else NONE
        # The blocks of a request that were never used again are its tail.
        if self.candidates[0].present and self.candidates[0].age == self.candidates[other].age:
            return 0
        self.t1_size += 1       # the block that replaces it enters T1
        return other

    cdef void advance(self, int ring_index) noexcept:
        cdef Candidate* candidate = &self.candidates[ring_index]
        candidate.present = False
        if self.victims.no_memory:
            return
        candidate.node_id = victims_find(
            &self.victims, self.table, &self.rings[ring_index], &self.cursors[ring_index]
        )
        if candidate.node_id == NIL:
            return
        candidate.present = True
        candidate.age = self.request - self.last[candidate.node_id]
        # Its next chance is the next request.
        candidate.density = self.rule_densities().table[
            0 if ring_index == AGAIN else ring_index
        ][age_bin(candidate.age + 1)]

    cdef const Densities* rule_densities(self) noexcept:
        """Return the densities by class and last use that the rule in force reads."""
        if self.hinted == NULL or self.protector.rule == HIT_DENSITY:
            return &self.learned
        return &self.hinted.plain

    cdef double stored_density(self, uint32_t ghost_position) noexcept:
        """Return the density of a block that is stored now."""
        cdef uint32_t part
        cdef int reuse_class = 0
        if ghost_position != NIL:
            part = self.part_of_ghost(ghost_position)
            if part and self.protector.rule != PLAIN:
                return stored_part_density(&self.hinted.returns, &self.hinted.turns, part)
            reuse_class = self.memory.items[ghost_position].kind - 1
        if self.protector.rule == PLAIN:
            return self.hinted.plain.table[reuse_class][STORED]
        return self.learned.table[reuse_class][STORED]

    cdef double density_of(self, int index) noexcept:
        """Return the density of a candidate."""
        if index >= NUM_RINGS:
            return self.hinted.tails.items[index - NUM_RINGS].density
        return self.candidates[index].density

    cdef int next_with_turns(self) noexcept:
        """Implement `next_to_leave` if blocks of turns may leave."""
        cdef const Tails* tails = &self.hinted.tails
        cdef Offer offer, least, oldest, once, again
        cdef int index, heap
        if self.protector.rule == HIT_DENSITY:
            return self.next_by_return()
        least = oldest = once = again = NO_OFFER
        for index in range(NUM_RINGS):
            if self.candidates[index].present:
                self.offer_of(index, &offer)
                take_sparser(&least, &offer)
                take_older(&oldest, &offer)
                take_older(&once if index == 0 else &again, &offer)
        for heap in range(2):
            index = tails_first(tails, heap)
            if index != NO_TAIL:
                self.offer_of(NUM_RINGS + index, &offer)
                if heap == 1 and tails.search == BY_DENSITY:
                    take_sparser(&least, &offer)
                elif tails.search == BY_LISTS:
                    take_older(&again if heap else &once, &offer)
                else:
                    take_older(&oldest, &offer)
        if self.protector.rule == LRU or oldest.index == NONE and once.index == again.index:
            return oldest.index
        if self.protector.rule == PLAIN:
            return least.index if oldest.density > NEARLY * least.density else oldest.index
        # The blocks of a request that were never used again are its tail.
        if again.index == NONE or once.index != NONE and (
            <double>self.t1_size > self.t1_target or once.age == again.age
        ):
            return once.index
        self.t1_size += 1       # the block that replaces it enters T1
        return again.index

    cdef int next_by_return(self) noexcept:
        """Return the sparsest candidate, or the oldest of the rings if that is nearly as sparse."""
        cdef const Tails* tails = &self.hinted.tails
        cdef const Candidate* candidate
        cdef int index, first = tails_first(tails, 0)
        if first == NO_TAIL:
            return self.sparsest()
        for index in range(NUM_RINGS):
            candidate = &self.candidates[index]
            if candidate.present and not is_sparser(
                &tails.items[first], candidate.density, candidate.age
            ):
                return self.sparsest()
        return NUM_RINGS + first

    cdef void offer_of(self, int index, Offer* offer) noexcept:
        """Return the offer of a candidate."""
        cdef const Tail* tail
        offer.index = index
        if index < NUM_RINGS:
            offer.age = self.candidates[index].age
            offer.density = self.candidates[index].density
            offer.place = <uint32_t>(PLACES * PLACE_OF[index])
        else:
            tail = self.hinted.tails.items + (index - NUM_RINGS)
            offer.age = tail.age
            offer.density = tail.density
            offer.place = tail.place

    cdef int sparsest(self) noexcept:
        """Return the ring of the sparsest, or the nearly as sparse oldest candidate, or NONE."""
        cdef int oldest = NONE, least = NONE, index, ring
        for index in range(NUM_RINGS):
            ring = SPARSEST_FIRST[index]
            if not self.candidates[ring].present:
                continue
            if least == NONE or self.candidates[ring].density < self.candidates[least].density:
                least = ring
            if oldest == NONE or self.candidates[ring].age > self.candidates[oldest].age:
                oldest = ring
        if least == NONE:
            return NONE
        if self.candidates[oldest].density > NEARLY * self.candidates[least].density:
            return least
        return oldest

    cdef void take(self, int index) noexcept:
        """Choose a candidate, unless there is no memory."""
        cdef int tail = index - NUM_RINGS
        if tail >= 0:
            if victims_take(
                &self.victims, self.table, NULL, self.hinted.tails.items[tail].block
            ):
                tails_give(&self.hinted.tails, tail)
        elif victims_take(
            &self.victims, self.table, &self.rings[index], self.candidates[index].node_id
        ):
            self.advance(index)

    cdef void close_candidates(self) noexcept:
        """Return the candidates that were not chosen to their rings."""
        cdef int ring_index
        cdef uint32_t node_id
        if not self.victims.managed:
            return
        for ring_index in range(NUM_RINGS):
            if self.candidates[ring_index].present:
                node_id = self.candidates[ring_index].node_id
                ring_list(
                    self.table, &self.rings[ring_index], node_id, node_at(self.table, node_id)
                )

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        cdef uint64_t hashed = hash_node(self.table, node)
        cdef int reuse_class = class_of(node)
        cdef uint32_t last = self.last[victim.node_id]
        cdef uint32_t part
        cdef uint8_t note = node.note
        if node.ring > NUM_RINGS and ring_of(node) == AGAIN:
            self.change_ring(victim.node_id, node, 0)
        part = part_of(self, victim.node_id, node)
        if part:  # it leaves a ring of the policy
            lift(self, victim.node_id, node)
            put(self, victim.node_id, node, reuse_class, 0)
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, hashed)
        self.remember(hashed, reuse_class, last, note, part)

    cdef void cancel(self) noexcept:
        # The batch is the manager's; the manager may be gone when the next search is settled.
        self.offered = NULL
        Records.cancel(self)

    cdef void c_settled(self) noexcept:
        """Mark the ghosts of the offered blocks that were not stored."""
        cdef int64_t index
        cdef uint32_t position
        if self.offered == NULL:
            return
        self.protector.store_begins = self.protector.on
        for index in range(self.num_admitted, self.num_offered):
            position = self.ghost_offered(self.offered, index)
            if position != NIL:
                self.memory.items[position].flags |= DECLINED
        self.offered = NULL

    cdef void c_clear(self) noexcept:
        self.clear_records()
        self.offered = NULL
        self.num_sources = 0
        self.has_hints = False
        guard_clear(&self.protector)

    cdef const char* c_check(self) noexcept:
        cdef const char* broken = Records.c_check(self)
        return broken if broken != NULL else guard_check(&self.protector)


cdef inline uint32_t part_of(_HitDensity policy, uint32_t node_id, const Node* node) noexcept:
    """Return the part of a block, 0 for none."""
    return policy.hinted.turns.members[node_id].part if node.ring > NUM_RINGS else 0


cdef inline void start_block(
    _HitDensity policy, uint32_t node_id, const Node* node, int reuse_class, uint32_t last
) noexcept:
    """Count the age of a block that started at request `last`."""
    start_record(
        &policy.learned,
        policy.hinted,
        reuse_class,
        last,
        policy.request,
        part_of(policy, node_id, node),
    )


cdef inline void lift(_HitDensity policy, uint32_t node_id, Node* node) noexcept:
    """Remove a block from its ring; its record still belongs to its turn."""
    if node.ring > NUM_RINGS:
        turns_take(&policy.hinted.turns, node_id)
        node.ring = 0
    else:
        ring_remove(policy.table, &policy.rings[node.ring - 1], node)


cdef inline void put(
    _HitDensity policy, uint32_t node_id, Node* node, int ring, uint32_t part
) noexcept:
    """Make a block the most recent of its part's ring, or of its class's ring if `part` is 0."""
    if part:
        turns_put(&policy.hinted.turns, part, node_id)
        node.ring = <uint8_t>(NUM_RINGS + 1 + ring)
    else:
        ring_append(policy.table, &policy.rings[ring], node_id, node)


cdef inline void renew_block(_HitDensity policy, uint32_t node_id, Node* node) noexcept:
    if node.ring > NUM_RINGS:
        turns_renew(&policy.hinted.turns, node_id)
    else:
        ring_renew(policy.table, &policy.rings[node.ring - 1], node_id, node)


cdef inline void to_most_recent(_HitDensity policy, uint32_t node_id, Node* node) noexcept:
    if node.note & UNCOUNTED:
        node.note &= <uint8_t>(~UNCOUNTED & 0xFF)
        start_block(policy, node_id, node, class_of(node), policy.last[node_id])
    renew_block(policy, node_id, node)


cdef inline uint32_t join_part(
    _HitDensity policy, uint32_t turn, int ring, uint8_t note
) noexcept:
    """Add a record to a turn, unless the turn is 0 or the record shared; return the part."""
    return turns_join(&policy.hinted.turns, turn, ring) if turn and not note & SHARED else 0


cdef inline void leave_part(_HitDensity policy, uint32_t part) noexcept:
    if part:
        turns_leave(&policy.hinted.turns, part)


class HitDensityCachePolicy(_HitDensity, CachePolicy):
    """A policy that evicts the block with the fewest expected hits, and stores none with fewer.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    ghosts : float
        Number of evicted or never stored blocks to remember per block of capacity.
    guard : int
        1 to evict by LRU or ARC while a sample of the blocks does better under it, 0 never to.

    References
    ----------
    Beckmann, Chen & Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity, *, ghosts=3.5, guard=1):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _HitDensity.__init__(self, cache_capacity, ghosts=ghosts, guard=guard)
