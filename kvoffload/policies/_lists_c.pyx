"""Policies that keep their blocks on lists, compiled: LRU, SLRU, LFU, ARC and ARC as published.

Structure
    Rings of one table: the lists of blocks, then as many of ghosts, or none. A block's count in LFU
    is its node's ``note``; a ghost's ``note`` is 1 once its return was counted. See ``_lists_py``
    for the Python twin, the policies, and the differences from their papers.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of pinned blocks.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ring cimport (
    Ring,
    ring_append,
    ring_park_in_use,
    ring_remove,
    ring_renew,
    ring_renew_chain,
)
from kvoffload._core.table cimport (
    NIL,
    Node,
    drop_block,
    drop_hashed_key,
    hash_ahead,
    node_at,
    table_new_epoch,
)
from kvoffload._core.victims cimport (
    Cursor,
    Victim,
    victims_find,
    victims_next,
    victims_settle,
    victims_take_oldest,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

from kvoffload.policies._lists import ARC, LFU, LRU, SLRU, ARCClassic
from kvoffload.policies.base import CachePolicy

cdef enum:
    MOST_COUNTED = 15   # by LFU
    MOST_LISTS = 16
    FORGET_GROUP = 16   # ghosts forgotten together, their cache misses overlapped

# Lists of SLRU and of ARC, from 0.
cdef enum:
    PROBATION = 0
    PROTECTED = 1
    T1 = 0
    T2 = 1
    B1 = 2
    B2 = 3


cdef inline void put(Lists lists, int at, uint32_t node_id, Node* node) noexcept:
    """Make a node the most recent of a list; it leaves its former one."""
    if node.ring:
        ring_remove(lists.table, &lists.rings[node.ring - 1], node)
    ring_append(lists.table, &lists.rings[at], node_id, node)


cdef class Lists(CompiledPolicy):
    """The lists of a policy, and what most of them do."""

    def __cinit__(self):
        self.num_lists = 1

    def _open(self, cache_capacity):
        """Construct the policy."""
        cdef bint has_ghosts = self.ghosts_a_block > 0
        self.set_up(cache_capacity, 1 + self.ghosts_a_block, self.num_lists << has_ghosts)
        self.c_clear()
        self.publish()

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        ring_append(self.table, &self.rings[0], node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        # Not `use` for any number of lists: for one it takes a tenth more instructions.
        cdef Py_ssize_t index = batch.size
        while index:
            index -= 1
            if batch.node_ids[index] != NIL:
                index = ring_renew_chain(self.table, &self.rings[0], batch.node_ids, index)

    cdef void use(self, Batch* batch) noexcept:
        cdef bint is_prefix = False
        cdef Py_ssize_t index = batch.size
        cdef uint32_t node_id
        cdef Node* node
        while index:
            index -= 1
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.ring == PROTECTED + 1:
                index = ring_renew_chain(self.table, &self.rings[PROTECTED], batch.node_ids, index)
            elif node.ring == PROBATION + 1 and (node.block.ref_cnt >= 0 or is_prefix):
                ring_remove(self.table, &self.rings[PROBATION], node)
                ring_append(self.table, &self.rings[PROTECTED], node_id, node)
            else:
                if node.ring > PROTECTED + 1:
                    self.adapt(node)
                ring_renew(self.table, &self.rings[node.ring - 1], node_id, node)
                continue
            is_prefix = self.prefix_joins

    cdef void adapt(self, Node* ghost) noexcept:
        pass

    cdef int first_list(self) noexcept:
        return 0

    cdef bint c_search(self, uint64_t n) noexcept:
        if self.take_released(n) and self.choose(n):
            return True
        self.cancel()
        return False

    cdef bint choose(self, uint64_t n) noexcept:
        cdef int first = self.first_list(), later
        cdef Cursor cursor
        cdef Ring* ring
        cdef Victim* victim
        for later in range(self.num_lists):
            self.turn = (first + later) % self.num_lists
            ring = &self.rings[self.turn]
            cursor.started = False
            victims_take_oldest(&self.victims, self.table, ring, n)
            while self.victims.size < n:
                if not victims_next(&self.victims, self.table, ring, &cursor):
                    break
                victim = &self.victims.items[self.victims.size - 1]
                victim.hashed = hash_ahead(self.table, node_at(self.table, victim.node_id))
            if self.victims.size == n or self.victims.no_memory:
                break
        return self.victims.size == n

    cdef void c_park(self, uint64_t most) noexcept:
        cdef int index
        for index in range(self.num_lists):
            ring_park_in_use(self.table, &self.rings[index], most)

    cdef const char* c_check(self) noexcept:
        cdef uint64_t total = 0
        cdef int index
        for index in range(self.num_lists):
            total += self.rings[index].size
        if total != self.num_resident:
            return b"resident is the union of the lists of blocks"
        return NULL


cdef class _SLRU(Lists):
    cdef readonly int64_t _protected_size   # most blocks that protected should hold

    def __cinit__(self):
        self.num_lists = 2
        self.prefix_joins = True

    def _open(self, cache_capacity, int64_t protected_size):
        Lists._open(self, cache_capacity)  # nothing after it can fail
        self._protected_size = protected_size

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Cursor cursor
        cdef uint32_t node_id
        self.use(batch)
        if self.rings[PROTECTED].size <= <uint64_t>self._protected_size:
            return
        cursor.started = False
        table_new_epoch(self.table)
        while self.rings[PROTECTED].size > <uint64_t>self._protected_size:
            node_id = victims_find(&self.victims, self.table, &self.rings[PROTECTED], &cursor)
            if node_id == NIL:
                break
            put(self, PROBATION, node_id, node_at(self.table, node_id))
        victims_settle(&self.victims, self.table)
        # If there was no memory to skip a block, the next touch demotes.
        self.victims.no_memory = False


cdef class _LFU(Lists):
    cdef readonly int64_t _age      # the age L; `turn` is its list unless a search is open

    def __cinit__(self):
        self.num_lists = MOST_LISTS

    def finished(self, hashes, hints=None):
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self.finish_alone(hashes)

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        node.note = 1
        put(self, (self._age + 1) % MOST_LISTS, node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        self.set_priorities(batch, True)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        self.set_priorities(batch, False)

    cdef void set_priorities(self, Batch* batch, bint counts) noexcept:
        """Set K of resident blocks, last key first, with a higher F if the use counts."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if counts and node.block.ref_cnt >= 0 and node.note < MOST_COUNTED:
                node.note += 1
            put(self, (self._age + node.note) % MOST_LISTS, node_id, node)

    cdef int first_list(self) noexcept:
        return self._age % MOST_LISTS

    cdef void cancel(self) noexcept:
        self.turn = self.first_list()
        CompiledPolicy.cancel(self)

    cdef void c_settled(self) noexcept:
        while self._age % MOST_LISTS != self.turn and not self.rings[self._age % MOST_LISTS].size:
            self._age += 1
        self.turn = self.first_list()

    cdef void c_clear(self) noexcept:
        self._age = self.turn = 0

    cdef const char* c_check(self) noexcept:
        cdef uint32_t node_id
        cdef Node* node
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.ring and not 1 <= node.note <= MOST_COUNTED:
                return b"F is 1 ... 15"
        return Lists.c_check(self)


cdef class _ARC(Lists):
    """The lists T1, T2, B1 and B2, and the target size of T1."""

    cdef public double _target  # target size of T1, in blocks: the paper's p
    cdef bint as_published      # the policy is the paper's, not vLLM's variant

    def __cinit__(self):
        self.num_lists = self.ghosts_a_block = 2

    cdef uint64_t c_num_ghosts(self) noexcept:
        return self.rings[B1].size + self.rings[B2].size

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        put(self, T1, node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        self.use(batch)

    cdef void adapt(self, Node* ghost) noexcept:
        """Raise the target for a ghost of B1 (case II), lower it for one of B2 (case III)."""
        cdef int at = ghost.ring - 1
        cdef double step
        if ghost.note:
            return
        step = <double>self.rings[B1 + B2 - at].size / <double>self.rings[at].size
        if at == B1:
            self._target = min(self._target + max(1.0, step), <double>self.capacity)
        else:
            self._target = max(self._target - max(1.0, step), 0.0)
        ghost.note = self.as_published

    cdef bint choose(self, uint64_t n) noexcept:
        # T1 yields while |T1| > target as published, while |T1| >= int(target) in vLLM's variant.
        cdef int64_t t1_size = <int64_t>self.rings[T1].size + (not self.as_published)
        cdef Cursor cursors[2]
        cdef uint64_t index
        cdef int at
        for index in range(self.victims.size):
            t1_size += self.as_published
            t1_size -= self.victims.items[index].ring == &self.rings[T1]
        cursors[T1].started = cursors[T2].started = False
        while self.victims.size < n:
            at = T1 if <double>t1_size > self._target else T2
            if not victims_next(&self.victims, self.table, &self.rings[at], &cursors[at]):
                at = T1 + T2 - at
                if self.victims.no_memory or not victims_next(
                    &self.victims, self.table, &self.rings[at], &cursors[at]
                ):
                    return False
            t1_size += self.as_published
            t1_size -= at == T1
        return True

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        cdef int ghosts = B1 if node.ring == T1 + 1 else B2
        cdef uint32_t node_id
        self.take_off(victim.node_id, node)
        node_id = drop_block(self.table, victim.node_id, node)
        ring_append(self.table, &self.rings[ghosts], node_id, node_at(self.table, node_id))

    cdef void c_settled(self) noexcept:
        cdef int64_t most = self.capacity
        if not self.as_published:
            self.forget(&self.rings[B1], most)
            self.forget(&self.rings[B2], most)
            return
        self.forget(&self.rings[B1], most - <int64_t>self.rings[T1].size)
        self.forget(&self.rings[B2], 2 * most - <int64_t>(self.num_resident + self.rings[B1].size))

    cdef void forget(self, Ring* ghosts, int64_t most) noexcept:
        """Forget the oldest ghosts of a list beyond `most`."""
        cdef uint64_t hashes[FORGET_GROUP]
        cdef uint64_t index, count, least = <uint64_t>max(most, 0)
        cdef uint32_t node_id
        cdef Node* node
        while ghosts.size > least:
            count = min(ghosts.size - least, <uint64_t>FORGET_GROUP)
            node_id = ghosts.oldest
            for index in range(count):
                node = node_at(self.table, node_id)
                hashes[index] = hash_ahead(self.table, node)
                node_id = node.next
            for index in range(count):
                node_id = ghosts.oldest
                node = node_at(self.table, node_id)
                ring_remove(self.table, ghosts, node)
                node.note = 0
                # A ghost of the batch at work is about to be inserted: its key stays.
                if node.block.mark != self.table.epoch:
                    drop_hashed_key(self.table, node_id, node, hashes[index])

    cdef void c_clear(self) noexcept:
        self._target = 0.0

    cdef const char* c_check(self) noexcept:
        cdef uint64_t before = self.c_num_ghosts()
        if not 0.0 <= self._target <= <double>self.capacity:
            return b"the target is within the capacity"
        self.c_settled()
        if before != self.c_num_ghosts():
            return b"the ghosts are within their bounds"
        return Lists.c_check(self)


cdef class _ARCClassic(_ARC):
    def __cinit__(self):
        self.ghosts_a_block = 1
        self.as_published = self.prefix_joins = True

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        cdef int at = T1
        if node.ring:
            at = T2
            self.adapt(node)
        put(self, at, node_id, node)
        node.note = 0
        self.c_settled()


class LRUCachePolicy(LRU, Lists, CachePolicy):
    __doc__ = LRU.__doc__
    __slots__ = ("__weakref__",)


class SLRUCachePolicy(SLRU, _SLRU, CachePolicy):
    __doc__ = SLRU.__doc__
    __slots__ = ("__weakref__",)


class LFUCachePolicy(LFU, _LFU, CachePolicy):
    __doc__ = LFU.__doc__
    __slots__ = ("__weakref__",)


class ARCCachePolicy(ARC, _ARC, CachePolicy):
    __doc__ = ARC.__doc__
    __slots__ = ("__weakref__",)


class ARCClassicCachePolicy(ARCClassic, _ARCClassic, CachePolicy):
    __doc__ = ARCClassic.__doc__
    __slots__ = ("__weakref__",)
