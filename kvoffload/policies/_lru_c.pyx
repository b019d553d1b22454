"""LRU, compiled: the least recently used idle block leaves first.

Structure
    One ring. See ``_lru_py`` for the Python twin.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of pinned blocks.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ring cimport ring_append, ring_park_in_use, ring_renew
from kvoffload._core.table cimport NIL, Node, drop_hashed_key, hash_ahead, node_at
from kvoffload._core.victims cimport Cursor, Victim, victims_cancel, victims_next
from kvoffload.policies._twin_c cimport CompiledPolicy

from kvoffload.policies._views import BlocksView
from kvoffload.policies.base import CachePolicy


cdef class _LRU(CompiledPolicy):
    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 1, 1)
        self.publish()

    @property
    def blocks(self):
        """Resident blocks and their live statuses, least recent first; read-only."""
        self.require_ready()
        return BlocksView(self, 0)

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        ring_append(self.table, &self.rings[0], node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                ring_renew(self.table, &self.rings[0], node_id, node_at(self.table, node_id))

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef Cursor cursor
        cdef Victim* victim
        cursor.started = False
        if not self.take_released(n):
            victims_cancel(&self.victims, self.table)
            return False
        while self.victims.size < n:
            if not victims_next(&self.victims, self.table, &self.rings[0], &cursor):
                victims_cancel(&self.victims, self.table)
                return False
            victim = &self.victims.items[self.victims.size - 1]
            victim.hashed = hash_ahead(self.table, node_at(self.table, victim.node_id))
        return True

    cdef void c_park(self, uint64_t most) noexcept:
        ring_park_in_use(self.table, &self.rings[0], most)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, victim.hashed)


class LRUCachePolicy(_LRU, CachePolicy):
    """A policy that evicts the least recently used idle block.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _LRU.__init__(self, cache_capacity)
