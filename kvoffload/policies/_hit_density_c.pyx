"""Hit density, compiled: evict, or do not store, what brings the fewest hits for its slot.

Structure
    One ring for each class of blocks and one more for class 0, beside the records of
    ``_records_c`` and the guard. See ``_hit_density_py`` for the Python twin and for where both
    differ from the paper.
Cost
    insert, remove, get O(1); touch O(n); evict and make_room amortised O(n), whatever is pinned,
    with the 16 rings for a constant.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kvoffload._core.batch cimport Batch, batch_ensure, batch_set, item_key, item_length
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.ghosts cimport DECLINED, PASSED_OVER, Ghost, ghosts_find, ghosts_remove
from kvoffload._core.items cimport check_items, list_items
from kvoffload._core.ring cimport ring_append, ring_list, ring_remove, ring_renew
from kvoffload._core.table cimport NIL, Node, Table, drop_hashed_key, hash_key, hash_node, node_at
from kvoffload._core.victims cimport Cursor, Victim, victims_cancel, victims_next
from kvoffload.policies._densities_c cimport (
    NEARLY,
    NUM_BINS,
    NUM_CLASSES,
    STORED,
    age_bin,
    class_after,
    end_age,
    end_request,
    start_age,
)
from kvoffload.policies._guard_c cimport (
    Guard,
    guard_check,
    guard_clear,
    guard_close,
    guard_note_store,
    guard_open,
    guard_serve,
    guard_target,
    sample_shift,
)
from kvoffload.policies._records_c cimport AGAIN, NUM_RINGS, Records, class_of
from kvoffload.policies._trials_c cimport ARC, HIT_DENSITY, NUM_TRIALS
from kvoffload.policies._twin_c cimport Hint

from kvoffload._checks import as_batch, batch_error, check_cache_capacity, check_int
from kvoffload.policies import registry
from kvoffload.policies._views import BlocksView
from kvoffload.policies.base import CachePolicy

cdef enum:
    NONE = -1
    # Two in seven ghosts are of blocks that were used again.
    REUSED_GHOSTS = 2
    ALL_GHOSTS = 7

cdef object MOST_GHOSTS = 2**32 - 2
# Rings from the sparsest on, where densities tie: longer gaps first, then fewer uses.
cdef int[NUM_RINGS] SPARSEST_FIRST = [0, AGAIN, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8]
# Names of the trials, by their ids.
cdef tuple RULES = ("lru", "hit-density", "arc-classic")


cdef inline uint64_t hash_item(Table* table, const Batch* batch, Py_ssize_t index) noexcept:
    return hash_key(table, item_key(batch, index), item_length(batch, index))


# The oldest block of a ring that may leave.
cdef struct Candidate:
    bint present
    Victim victim
    uint32_t age            # in requests
    double density


cdef class _HitDensity(Records):
    cdef double ghosts_a_block
    cdef Candidate candidates[NUM_RINGS]
    cdef Cursor cursors[NUM_RINGS]
    cdef Batch* offered             # the batch of a store that is being settled
    cdef int64_t num_admitted       # of its keys
    cdef int64_t num_offered
    cdef bint declines              # blocks that are sparser than those that they would push out
    cdef Guard protector
    cdef int64_t t1_size            # by ARC's rule: of ring 0, with what takes victims' places
    cdef double t1_target

    def __cinit__(self):
        memset(&self.protector, 0, sizeof(Guard))

    def __dealloc__(self):
        guard_close(&self.protector)

    def __init__(self, cache_capacity, *, ghosts=3.5, guard=1):
        cdef int64_t capacity = check_cache_capacity(cache_capacity)
        cdef uint32_t total, reused
        ghosts = registry.entry("hit-density").option("ghosts").check(ghosts)
        guard = registry.entry("hit-density").option("guard").check(guard)
        total = min(int(ghosts * capacity), MOST_GHOSTS)
        reused = <uint32_t>(<uint64_t>total * REUSED_GHOSTS // ALL_GHOSTS)
        self.set_up(capacity, 1, NUM_RINGS)
        self.open_records(total - reused, reused)
        self.ghosts_a_block = ghosts
        self.offered = NULL
        self.declines = True
        guard_close(&self.protector)
        guard_clear(&self.protector)
        if guard and capacity:
            total = int(ghosts * (capacity >> sample_shift(capacity)))
            reused = <uint32_t>(<uint64_t>total * REUSED_GHOSTS // ALL_GHOSTS)
            if not guard_open(&self.protector, capacity, total - reused, reused):
                raise MemoryError("no room for the guard")
        self.publish()

    @property
    def ghosts(self):
        """Number of ghosts per block of capacity, as given."""
        self.require_ready()
        return self.ghosts_a_block

    @property
    def guard(self):
        """Whether LRU or ARC may be followed, as given; 0 where the capacity is 0."""
        self.require_ready()
        return int(self.protector.on)

    @property
    def rule(self):
        """The policy that is followed: ``hit-density``, ``lru`` or ``arc-classic``."""
        self.require_ready()
        return RULES[self.protector.rule]

    @property
    def trial_hits(self):
        """Recent hits of each policy on the sample, fading; empty without a guard."""
        self.require_ready()
        if not self.protector.on:
            return {}
        return {RULES[trial]: self.protector.hits[trial] for trial in range(NUM_TRIALS)}

    @property
    def num_requests(self):
        """Number of requests that were seen: ages are counted in these."""
        self.require_ready()
        return self.request

    @property
    def rings(self):
        """Resident blocks by class, with their live statuses, least recent first; read-only.

        The last ring has those of class 0 that ARC's rule takes for used again.
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

    def finished(self, hashes, hints=None):
        """Hear that a request finishes; its blocks become recent, and no use is counted."""
        self.finish_alone(hashes)

    # -- uses --------------------------------------------------------------------------------

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Py_ssize_t num_stored
        if batch.size == 0:
            return
        if self.repeats_request(batch):
            self.renew(batch)
            if self.protector.rule == ARC:
                self.use_at_once(batch)
            num_stored = self.num_stored(batch)
        else:
            self.request += 1
            num_stored = self.use(batch, False)
            end_request(&self.learned, <uint64_t>batch.size, self.request)
        if self.protector.on:
            guard_serve(&self.protector, self.table, batch, num_stored, &self.learned, self.request)

    cdef void c_extended(self, Batch* batch) noexcept:
        self.use(batch, False)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        if self.repeats_request(batch):
            self.renew(batch)
        else:
            self.use(batch, True)

    cdef Py_ssize_t use(self, Batch* batch, bint finishes) noexcept:
        """Count a use of each block, or, where a request only `finishes`, none.

        Return how many leading blocks are not being stored.
        """
        cdef uint32_t now = self.request, node_id, last
        cdef uint32_t ghost_position = NIL
        cdef uint64_t hashed = 0
        cdef uint32_t least_age = 0, age
        cdef int use_class = NONE, reuse_class
        cdef Py_ssize_t index, num_stored = batch.size
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
                    start_age(&self.learned, reuse_class, now, now)
                    self.remember(hashed, reuse_class, now)
                    continue
                node = NULL
                ghost = self.memory.items + ghost_position
                reuse_class = ghost.kind - 1
                last = ghost.last
            if last == now:  # a repeat within the batch
                if node != NULL:
                    ring_renew(self.table, &self.rings[node.ring - 1], node_id, node)
                else:
                    ghost.flags &= <uint8_t>(~DECLINED & 0xFF)
                continue
            # It was a use of all before it, too: this record stands in for those that are lost.
            age = now - last
            if use_class == NONE or age <= least_age:
                least_age = age
                use_class = reuse_class
            end_age(&self.learned, reuse_class, last, now)
            if node != NULL:
                self.last[node_id] = now
                if node.block.ref_cnt < 0:  # the touch of the request that stores it
                    num_stored = index
                if finishes or node.block.ref_cnt < 0:
                    start_age(&self.learned, reuse_class, now, now)
                    ring_renew(self.table, &self.rings[node.ring - 1], node_id, node)
                    continue
                self.learned.reused[reuse_class][age_bin(age)] += 1.0
                reuse_class = class_after(least_age, use_class)
                start_age(&self.learned, reuse_class, now, now)
                ring_remove(self.table, &self.rings[node.ring - 1], node)
                ring_append(self.table, &self.rings[reuse_class], node_id, node)
                continue
            if ghost.flags & DECLINED:  # of the request that could not store it
                num_stored = index
            if finishes or ghost.flags & DECLINED:
                ghost.last = now
                ghost.flags &= <uint8_t>(~DECLINED & 0xFF)
                start_age(&self.learned, reuse_class, now, now)
            else:
                self.learned.reused[reuse_class][age_bin(age)] += 1.0
                reuse_class = class_after(least_age, use_class)
                start_age(&self.learned, reuse_class, now, now)
                if ghost.kind > 1:
                    ghost.last = now
                    ghost.kind = <uint8_t>(reuse_class + 1)
                    ghost.flags |= PASSED_OVER
                else:
                    ghosts_remove(&self.memory, ghost_position)
                    self.remember(hashed, reuse_class, now)
        return num_stored

    cdef bint repeats_request(self, Batch* batch) noexcept:
        """Return whether the request that began last has used all blocks of a batch.

        Where that is so, ``indexes`` of the batch holds the positions of the ghosts.
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
        """Return how many leading blocks are not being stored."""
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
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                node = node_at(self.table, node_id)
                ring_renew(self.table, &self.rings[node.ring - 1], node_id, node)
            else:
                self.memory.items[batch.indexes[index]].flags &= <uint8_t>(~DECLINED & 0xFF)

    cdef void use_at_once(self, Batch* batch) noexcept:
        """Take the blocks of a request that is repeated at once into ARC's T2."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.ring == 1 and node.block.ref_cnt >= 0:
                ring_remove(self.table, &self.rings[0], node)
                ring_append(self.table, &self.rings[AGAIN], node_id, node)

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
        cdef uint32_t position = ghosts_find(&self.memory, hash_node(self.table, node))
        cdef Ghost* ghost
        cdef int reuse_class = 0
        if position == NIL:
            self.last[node_id] = self.request
            start_age(&self.learned, 0, self.request, self.request)
        else:
            ghost = self.memory.items + position
            reuse_class = ghost.kind - 1
            self.last[node_id] = ghost.last
            ghosts_remove(&self.memory, position)
        ring_append(self.table, &self.rings[reuse_class], node_id, node)
        if self.protector.store_begins:
            guard_note_store(&self.protector, hash_node(self.table, node))

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        end_age(&self.learned, class_of(node), self.last[node_id], self.request)

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
        cdef uint32_t position
        cdef int reuse_class
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
                if self.protector.rule != HIT_DENSITY or not self.declines:
                    self.take(ring_index)
                    admitted += 1
                    continue
                position = self.ghost_offered(batch, admitted)
                reuse_class = self.memory.items[position].kind - 1 if position != NIL else 0
                # What continues a prefix is no denser: the first to fail decides for the rest.
                if self.candidates[ring_index].density >= self.learned.table[reuse_class][STORED]:
                    break
                self.take(ring_index)
                admitted += 1
            self.close_candidates()
            if self.victims.no_memory:
                victims_cancel(&self.victims, self.table)
                return -1
            if self.protector.rule != HIT_DENSITY and self.declines and admitted < n:
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
        """Note what is offered, for when the search is settled."""
        self.offered = batch
        self.num_admitted = admitted
        self.num_offered = n

    cdef uint32_t ghost_offered(self, Batch* batch, int64_t index) noexcept:
        """Return the position of the ghost of a key that is offered, or NIL."""
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
            self.t1_size += self.victims.items[index].ring != &self.rings[0]
        if self.protector.rule == ARC:
            self.t1_target = guard_target(&self.protector)

    cdef int next_to_leave(self) noexcept:
        """Return the ring whose candidate is to leave next by the rule in force, or NONE."""
        cdef int oldest = NONE, other = NONE, index, ring
        if self.protector.rule == HIT_DENSITY:
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
        # Of a request's blocks those that were never used again are the tail.
        if self.candidates[0].present and self.candidates[0].age == self.candidates[other].age:
            return 0
        self.t1_size += 1       # the block that takes its place enters T1
        return other

    cdef void advance(self, int ring_index) noexcept:
        cdef Candidate* candidate = &self.candidates[ring_index]
        candidate.present = not self.victims.no_memory and victims_next(
            &self.victims, self.table, &self.rings[ring_index], &self.cursors[ring_index]
        )
        if not candidate.present:
            return
        # It was found, not chosen yet.
        self.victims.size -= 1
        candidate.victim = self.victims.items[self.victims.size]
        candidate.age = self.request - self.last[candidate.victim.node_id]
        # Its next chance is a request on.
        candidate.density = self.learned.table[
            0 if ring_index == AGAIN else ring_index
        ][age_bin(candidate.age + 1)]

    cdef int sparsest(self) noexcept:
        """Return the ring whose candidate is the sparsest or, if nearly so, the oldest, or NONE."""
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

    cdef void take(self, int ring_index) noexcept:
        """Choose the candidate of a ring; `advance` has made sure of room."""
        self.victims.items[self.victims.size] = self.candidates[ring_index].victim
        self.victims.size += 1
        self.advance(ring_index)

    cdef void close_candidates(self) noexcept:
        """Give back the candidates that were not chosen."""
        cdef int ring_index
        cdef Victim* victim
        if not self.victims.managed:
            return
        for ring_index in range(NUM_RINGS):
            if self.candidates[ring_index].present:
                victim = &self.candidates[ring_index].victim
                ring_list(
                    self.table, victim.ring, victim.node_id, node_at(self.table, victim.node_id)
                )

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        cdef uint64_t hashed = hash_node(self.table, node)
        cdef int reuse_class = class_of(node)
        cdef uint32_t last = self.last[victim.node_id]
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, hashed)
        self.remember(hashed, reuse_class, last)

    cdef void cancel(self) noexcept:
        # The batch is the manager's, which may be gone when the next search is settled.
        self.offered = NULL
        Records.cancel(self)

    cdef void c_settled(self) noexcept:
        """Mark the ghosts of what was offered and not stored."""
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
        guard_clear(&self.protector)

    cdef const char* c_check(self) noexcept:
        cdef const char* broken = Records.c_check(self)
        return broken if broken != NULL else guard_check(&self.protector)


class HitDensityCachePolicy(_HitDensity, CachePolicy):
    """A policy that evicts the block with the fewest hits to expect, and stores none with fewer.

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
