"""Hit density, compiled: evict, or do not store, what brings the fewest hits for its room.

Structure
    One ring a class of blocks, beside the records of ``_records_c``. See ``_hit_density_py`` for the Python twin and for where both differ
    from the paper.
Cost
    insert, remove, get O(1); touch O(n); evict and make_room amortised O(n), whatever is pinned,
    with the 15 rings for a constant.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch, batch_ensure, batch_set, item_key, item_length
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.ghosts cimport (
    DECLINED,
    PASSED_OVER,
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
from kvoffload._core.victims cimport Cursor, Victim, victims_cancel, victims_next
from kvoffload.policies._densities_c cimport (
    NUM_BINS,
    NUM_CLASSES,
    age_bin,
    class_after,
    end_age,
    end_request,
    start_age,
)
from kvoffload.policies._records_c cimport Records

from kvoffload._checks import as_batch, batch_error, check_cache_capacity, check_int
from kvoffload.policies import registry
from kvoffload.policies._views import BlocksView
from kvoffload.policies.base import CachePolicy

# Classes from the sparsest on, where densities tie: longer gaps first, then fewer uses.
cdef int[NUM_CLASSES] SPARSEST_FIRST = [0, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8]
# Leave LRU order only for a block that is sparser by a quarter: estimates are no better.
cdef double NEARLY = 1.25

cdef enum:
    NONE = -1
    STORED = 2              # bin of age 1
    # Two in seven ghosts are of blocks that were used again.
    REUSED_GHOSTS = 2
    ALL_GHOSTS = 7

cdef object MOST_GHOSTS = 2**32 - 2


cdef inline uint64_t hash_item(Table* table, const Batch* batch, Py_ssize_t place) noexcept:
    return hash_key(table, item_key(batch, place), item_length(batch, place))


# The oldest block of a ring that may leave.
cdef struct Candidate:
    bint present
    Victim victim
    uint32_t age            # in requests
    double density


cdef class _HitDensity(Records):
    cdef double ghosts_a_block
    cdef Candidate candidates[NUM_CLASSES]
    cdef Cursor cursors[NUM_CLASSES]
    cdef Batch* offered             # the batch of a store that is being settled
    cdef int64_t num_admitted       # of its keys
    cdef int64_t num_offered

    def __init__(self, cache_capacity, *, ghosts=3.5):
        cdef int64_t capacity = check_cache_capacity(cache_capacity)
        cdef uint32_t total, reused
        ghosts = registry.entry("hit-density").option("ghosts").check(ghosts)
        total = min(int(ghosts * capacity), MOST_GHOSTS)
        reused = <uint32_t>(<uint64_t>total * REUSED_GHOSTS // ALL_GHOSTS)
        self.set_up(capacity, 1, NUM_CLASSES)
        self.open_records(total - reused, reused)
        self.ghosts_a_block = ghosts
        self.offered = NULL
        self.publish()

    @property
    def ghosts(self):
        """Number of ghosts for each block of the capacity, as given."""
        self.require_ready()
        return self.ghosts_a_block

    @property
    def num_requests(self):
        """Number of requests that were seen: ages are counted in these."""
        self.require_ready()
        return self.request

    @property
    def rings(self):
        """Resident blocks by class, with their live statuses, least recent first; read-only."""
        self.require_ready()
        return tuple([BlocksView(self, number) for number in range(NUM_CLASSES)])

    @property
    def densities(self):
        """Hits to expect a block and request, by class and by bin of age."""
        self.require_ready()
        return tuple([
            tuple([self.learned.table[number][place] for place in range(NUM_BINS)])
            for number in range(NUM_CLASSES)
        ])

    # -- uses --------------------------------------------------------------------------------

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef uint32_t now, slot, last
        cdef uint32_t place_of_ghost = NIL
        cdef uint64_t hashed = 0
        cdef uint32_t least_age = 0, age
        cdef int use_class = NONE, reuse_class
        cdef Py_ssize_t place
        cdef Node* node
        cdef Ghost* ghost
        if self.continues_request(batch):
            self.renew(batch)
            return
        self.request += 1
        now = self.request
        for place in range(batch.size - 1, -1, -1):
            slot = batch.slots[place]
            if slot != NIL:
                node = node_at(self.table, slot)
                ghost = NULL
                reuse_class = node.ring - 1
                last = self.last[slot]
            else:
                hashed = hash_item(self.table, batch, place)
                place_of_ghost = ghosts_find(&self.memory, hashed)
                if place_of_ghost == NIL:
                    reuse_class = 0
                    if use_class != NONE:
                        reuse_class = class_after(least_age, use_class)
                    start_age(&self.learned, reuse_class, now, now)
                    self.remember(hashed, reuse_class, now)
                    continue
                node = NULL
                ghost = self.memory.places + place_of_ghost
                reuse_class = ghost.kind - 1
                last = ghost.last
            if last == now:  # a repeat within the batch
                if node != NULL:
                    ring_renew(self.table, &self.rings[reuse_class], slot, node)
                else:
                    ghost.flags &= <uint8_t>(~DECLINED & 0xFF)
                continue
            # Who uses a block uses all before it: what is unknown of those, this one tells.
            age = now - last
            if use_class == NONE or age <= least_age:
                least_age = age
                use_class = reuse_class
            end_age(&self.learned, reuse_class, last, now)
            if node != NULL:
                self.last[slot] = now
                if node.block.ref_cnt < 0:  # the touch of the request that stores it
                    start_age(&self.learned, reuse_class, now, now)
                    ring_renew(self.table, &self.rings[reuse_class], slot, node)
                    continue
                self.learned.reused[reuse_class][age_bin(age)] += 1.0
                reuse_class = class_after(least_age, use_class)
                start_age(&self.learned, reuse_class, now, now)
                ring_remove(self.table, &self.rings[node.ring - 1], node)
                ring_append(self.table, &self.rings[reuse_class], slot, node)
            elif ghost.flags & DECLINED:  # of the request that could not store it
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
                    ghosts_remove(&self.memory, place_of_ghost)
                    self.remember(hashed, reuse_class, now)
        end_request(&self.learned, <uint64_t>batch.size, now)

    cdef bint continues_request(self, Batch* batch) noexcept:
        """Tell whether all blocks of a batch were already used in the request at work.

        Where that is so, ``places`` of the batch holds the places of the ghosts.
        """
        cdef Py_ssize_t place
        cdef uint32_t slot, place_of_ghost
        for place in range(batch.size):
            slot = batch.slots[place]
            if slot != NIL:
                if self.last[slot] != self.request:
                    return False
                continue
            place_of_ghost = ghosts_find(&self.memory, hash_item(self.table, batch, place))
            if (
                place_of_ghost == NIL
                or self.memory.places[place_of_ghost].last != self.request
            ):
                return False
            batch.places[place] = place_of_ghost
        return True

    cdef void renew(self, Batch* batch) noexcept:
        cdef Py_ssize_t place
        cdef uint32_t slot
        cdef Node* node
        for place in range(batch.size - 1, -1, -1):
            slot = batch.slots[place]
            if slot != NIL:
                node = node_at(self.table, slot)
                ring_renew(self.table, &self.rings[node.ring - 1], slot, node)
            else:
                self.memory.places[batch.places[place]].flags &= <uint8_t>(~DECLINED & 0xFF)

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

    cdef tuple room_now(self, int64_t num_free):
        cdef Batch* batch = &self.batch
        cdef int64_t admitted
        cdef Py_ssize_t place
        for place in range(batch.size):
            batch.places[place] = <uint32_t>place
        self.victims.no_memory = False
        admitted = self.c_make_room(batch, batch.size, num_free)
        if admitted < 0:
            raise MemoryError()
        return admitted, self.let_go()

    cdef void c_insert(self, uint32_t slot, Node* node) noexcept:
        cdef uint32_t place = ghosts_find(&self.memory, hash_node(self.table, node))
        cdef Ghost* ghost
        cdef int reuse_class = 0
        if place == NIL:
            self.last[slot] = self.request
            start_age(&self.learned, 0, self.request, self.request)
        else:
            ghost = self.memory.places + place
            reuse_class = ghost.kind - 1
            self.last[slot] = ghost.last
            ghosts_remove(&self.memory, place)
        ring_append(self.table, &self.rings[reuse_class], slot, node)

    cdef void c_removed(self, uint32_t slot, Node* node) noexcept:
        end_age(&self.learned, node.ring - 1, self.last[slot], self.request)

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef int number
        self.open_candidates()
        while self.victims.size < n and not self.victims.no_memory:
            number = self.sparsest()
            if number == NONE:
                break
            self.take(number)
        self.close_candidates()
        if self.victims.size < n or self.victims.no_memory:
            victims_cancel(&self.victims, self.table)
            return False
        return True

    cdef int64_t c_make_room(self, Batch* batch, int64_t n, int64_t num_free) noexcept:
        cdef int64_t admitted = min(n, num_free)
        cdef int number
        cdef uint32_t place
        cdef int reuse_class
        if admitted < n:
            self.open_candidates()
            while admitted < n and not self.victims.no_memory:
                number = self.sparsest()
                if number == NONE:
                    break
                place = self.ghost_offered(batch, admitted)
                reuse_class = self.memory.places[place].kind - 1 if place != NIL else 0
                # What continues a prefix is no denser: the first to fail decides for the rest.
                if self.candidates[number].density >= self.learned.table[reuse_class][STORED]:
                    break
                self.take(number)
                admitted += 1
            self.close_candidates()
            if self.victims.no_memory:
                victims_cancel(&self.victims, self.table)
                return -1
        self.offered = batch
        self.num_admitted = admitted
        self.num_offered = n
        return admitted

    cdef uint32_t ghost_offered(self, Batch* batch, int64_t number) noexcept:
        """Return the place of the ghost of a key that is offered, or NIL."""
        return ghosts_find(
            &self.memory, hash_item(self.table, batch, <Py_ssize_t>batch.places[number])
        )

    cdef void open_candidates(self) noexcept:
        """Find the oldest block of each ring that may leave."""
        cdef int number
        for number in range(NUM_CLASSES):
            self.cursors[number].started = False
            self.candidates[number].present = False
        for number in range(NUM_CLASSES):
            self.advance(number)

    cdef void advance(self, int number) noexcept:
        cdef Candidate* candidate = &self.candidates[number]
        candidate.present = not self.victims.no_memory and victims_next(
            &self.victims, self.table, &self.rings[number], &self.cursors[number]
        )
        if not candidate.present:
            return
        # It was found, not chosen yet.
        self.victims.size -= 1
        candidate.victim = self.victims.items[self.victims.size]
        candidate.age = self.request - self.last[candidate.victim.slot]
        # Its next chance is a request on.
        candidate.density = self.learned.table[number][age_bin(candidate.age + 1)]

    cdef int sparsest(self) noexcept:
        """Return the ring whose candidate is to leave next, or NONE."""
        cdef int oldest = NONE, least = NONE, place, number
        for place in range(NUM_CLASSES):
            number = SPARSEST_FIRST[place]
            if not self.candidates[number].present:
                continue
            if least == NONE or self.candidates[number].density < self.candidates[least].density:
                least = number
            if oldest == NONE or self.candidates[number].age > self.candidates[oldest].age:
                oldest = number
        if least == NONE:
            return NONE
        if self.candidates[oldest].density > NEARLY * self.candidates[least].density:
            return least
        return oldest

    cdef void take(self, int number) noexcept:
        """Choose the candidate of a ring; `advance` has made sure of room."""
        self.victims.items[self.victims.size] = self.candidates[number].victim
        self.victims.size += 1
        self.advance(number)

    cdef void close_candidates(self) noexcept:
        """Give back the candidates that were not chosen."""
        cdef int number
        cdef Victim* victim
        if not self.victims.managed:
            return
        for number in range(NUM_CLASSES):
            if self.candidates[number].present:
                victim = &self.candidates[number].victim
                ring_list(self.table, victim.ring, victim.slot, node_at(self.table, victim.slot))

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.slot)
        cdef uint64_t hashed = hash_node(self.table, node)
        cdef int reuse_class = node.ring - 1
        cdef uint32_t last = self.last[victim.slot]
        self.take_off(node)
        drop_hashed_key(self.table, victim.slot, node, hashed)
        self.remember(hashed, reuse_class, last)

    cdef void cancel(self) noexcept:
        # The batch is the manager's, which may be gone when the next search is settled.
        self.offered = NULL
        Records.cancel(self)

    cdef void c_settled(self) noexcept:
        """Mark the ghosts of what was offered and not stored."""
        cdef int64_t number
        cdef uint32_t place
        if self.offered == NULL:
            return
        for number in range(self.num_admitted, self.num_offered):
            place = self.ghost_offered(self.offered, number)
            if place != NIL:
                self.memory.places[place].flags |= DECLINED
        self.offered = NULL

    cdef void c_clear(self) noexcept:
        self.clear_records()
        self.offered = NULL

class HitDensityCachePolicy(_HitDensity, CachePolicy):
    """Keep the blocks of which most hits are to be expected, and store no others.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    ghosts : float
        Number of evicted or never stored blocks to remember, for each block of the capacity.

    References
    ----------
    Beckmann, Chen & Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity, *, ghosts=3.5):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _HitDensity.__init__(self, cache_capacity, ghosts=ghosts)
