"""LFU with dynamic aging, compiled (Arlitt, Cherkasova, Dilley, Friedrich & Jin, 1999).

Structure
    Sixteen rings of one table: blocks of priority K are on the ring of K mod 16. A block's count is
    its node's ``note``. See ``_lfu_py`` for the Python twin and the differences from the paper.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of pinned blocks.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ring cimport ring_append, ring_remove, ring_renew
from kvoffload._core.table cimport NIL, Node, drop_hashed_key, hash_ahead, node_at
from kvoffload._core.victims cimport Cursor, Victim, victims_cancel, victims_next
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

from kvoffload.policies.base import CachePolicy

cdef enum:
    MOST_COUNTED = 15
    NUM_RINGS = 16


cdef class _LFU(CompiledPolicy):
    cdef int64_t _age               # the age L
    cdef int64_t last_priority      # of the last victim that left in its turn
    cdef uint64_t num_early         # victims of the search at work that leave before their turn

    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 1, NUM_RINGS)
        self._age = self.last_priority = 0
        self.publish()

    @property
    def age(self):
        """The least priority that a block can have."""
        self.require_ready()
        return self._age

    def finished(self, hashes, hints=None):
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self.finish_alone(hashes)

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        node.note = 1
        ring_append(self.table, &self.rings[(self._age + 1) % NUM_RINGS], node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        self.use(batch, True)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        self.use(batch, False)

    cdef void use(self, Batch* batch, bint counts) noexcept:
        """Set K of resident blocks, last key first, with a higher F if the use counts."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef uint8_t ring
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if counts and node.block.ref_cnt >= 0 and node.note < MOST_COUNTED:
                node.note += 1
            ring = <uint8_t>((self._age + node.note) % NUM_RINGS)
            if node.ring == ring + 1:
                ring_renew(self.table, &self.rings[ring], node_id, node)
            else:
                ring_remove(self.table, &self.rings[node.ring - 1], node)
                ring_append(self.table, &self.rings[ring], node_id, node)

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef int64_t priority = self._age
        cdef Cursor cursor
        cdef Victim* victim
        cursor.started = False
        if not self.take_released(n):
            victims_cancel(&self.victims, self.table)
            return False
        self.num_early = self.victims.size
        while self.victims.size < n:
            if victims_next(&self.victims, self.table, &self.rings[priority % NUM_RINGS], &cursor):
                victim = &self.victims.items[self.victims.size - 1]
                victim.hashed = hash_ahead(self.table, node_at(self.table, victim.node_id))
                continue
            priority += 1
            cursor.started = False
            if self.victims.no_memory or priority == self._age + NUM_RINGS:
                victims_cancel(&self.victims, self.table)
                return False
        return True

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        cdef int64_t ahead = (node.ring - 1 - self._age) % NUM_RINGS
        if <uint64_t>(victim - self.victims.items) >= self.num_early:
            self.last_priority = self._age + (ahead + NUM_RINGS) % NUM_RINGS
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, victim.hashed)

    cdef void c_settled(self) noexcept:
        while self._age < self.last_priority and self.rings[self._age % NUM_RINGS].size == 0:
            self._age += 1
        self.last_priority = self._age

    cdef void c_clear(self) noexcept:
        self._age = self.last_priority = 0

    cdef const char* c_check(self) noexcept:
        cdef uint64_t in_rings = 0
        cdef uint32_t node_id
        cdef int index
        cdef Node* node
        for index in range(NUM_RINGS):
            in_rings += self.rings[index].size
        if in_rings != self.num_resident:
            return b"resident is the union of the rings"
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.ring and not 1 <= node.note <= MOST_COUNTED:
                return b"F is 1 ... 15"
        return NULL


class LFUCachePolicy(_LFU, CachePolicy):
    """A policy that evicts the least frequently used block; old counts fade as the cache ages.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.

    References
    ----------
    Arlitt, Cherkasova, Dilley, Friedrich & Jin, "Evaluating Content Management Techniques for Web
    Proxy Caches", Workshop on Internet Server Performance, 1999.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _LFU.__init__(self, cache_capacity)
