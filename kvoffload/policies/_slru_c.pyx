"""SLRU, compiled: segmented LRU (Karedla, Love & Wherry, IEEE Computer 27(3), 1994).

Structure
    Two rings of one table, probation and protected. See ``_slru_py`` for the Python twin and the
    differences from the paper.
Cost
    insert, remove, get O(1); touch O(n) and evict O(n), amortised, regardless of pinned blocks.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ring cimport ring_append, ring_remove, ring_renew
from kvoffload._core.table cimport NIL, Node, drop_hashed_key, hash_ahead, node_at, table_new_epoch
from kvoffload._core.victims cimport (
    Cursor,
    Victim,
    victims_cancel,
    victims_find,
    victims_next,
    victims_settle,
)
from kvoffload.policies._twin_c cimport CompiledPolicy

from kvoffload._checks import check_cache_capacity
from kvoffload.policies import registry
from kvoffload.policies._views import BlocksView
from kvoffload.policies.base import CachePolicy

cdef enum:
    PROBATION = 0
    PROTECTED = 1


cdef class _SLRU(CompiledPolicy):
    cdef int64_t _protected_size    # most blocks that protected should hold

    def __init__(self, cache_capacity, *, protected=0.5):
        cdef int64_t capacity = check_cache_capacity(cache_capacity)
        share = registry.entry("slru").option("protected").check(protected)
        self.set_up(capacity, 1, 2)
        self._protected_size = int(share * capacity)
        self.publish()

    @property
    def probation(self):
        """Blocks seen once or demoted and their live statuses, least recent first; read-only."""
        self.require_ready()
        return BlocksView(self, PROBATION)

    @property
    def protected(self):
        """Blocks seen again and their live statuses, least recent first; read-only."""
        self.require_ready()
        return BlocksView(self, PROTECTED)

    @property
    def protected_size(self):
        """Number of blocks that protected should hold at most."""
        self.require_ready()
        return self._protected_size

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        ring_append(self.table, &self.rings[PROBATION], node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef bint later_is_protected = False
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.ring == PROBATION + 1:
                if node.block.ref_cnt < 0 and not later_is_protected:
                    ring_renew(self.table, &self.rings[PROBATION], node_id, node)
                    continue
                ring_remove(self.table, &self.rings[PROBATION], node)
                ring_append(self.table, &self.rings[PROTECTED], node_id, node)
            else:
                ring_renew(self.table, &self.rings[PROTECTED], node_id, node)
            later_is_protected = True
        if self.rings[PROTECTED].size > <uint64_t>self._protected_size:
            self.demote()

    cdef void demote(self) noexcept:
        """Move the excess of protected to probation."""
        cdef uint64_t excess = self.rings[PROTECTED].size - <uint64_t>self._protected_size
        cdef Cursor cursor
        cdef uint32_t node_id
        cdef Node* node
        cursor.started = False
        table_new_epoch(self.table)
        while excess:
            node_id = victims_find(&self.victims, self.table, &self.rings[PROTECTED], &cursor)
            if node_id == NIL:
                break
            node = node_at(self.table, node_id)
            ring_remove(self.table, &self.rings[PROTECTED], node)
            ring_append(self.table, &self.rings[PROBATION], node_id, node)
            excess -= 1
        victims_settle(&self.victims, self.table)
        # If there was no memory to skip a block, the next touch demotes.
        self.victims.no_memory = False

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef Cursor cursor
        cdef Victim* victim
        cdef int ring = PROBATION
        cursor.started = False
        if not self.take_released(n):
            victims_cancel(&self.victims, self.table)
            return False
        while self.victims.size < n:
            if victims_next(&self.victims, self.table, &self.rings[ring], &cursor):
                victim = &self.victims.items[self.victims.size - 1]
                victim.hashed = hash_ahead(self.table, node_at(self.table, victim.node_id))
                continue
            if self.victims.no_memory or ring == PROTECTED:
                victims_cancel(&self.victims, self.table)
                return False
            ring = PROTECTED
            cursor.started = False
        return True

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, victim.hashed)

    cdef const char* c_check(self) noexcept:
        if self.rings[PROBATION].size + self.rings[PROTECTED].size != self.num_resident:
            return b"resident is probation and protected"
        return NULL


class SLRUCachePolicy(_SLRU, CachePolicy):
    """A policy that evicts the least recently used block that was not seen again.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    protected : float
        Share of the capacity for blocks that were seen again, ``0.0 ... 1.0``; 0 is LRU.

    References
    ----------
    Karedla, Love & Wherry, "Caching Strategies to Improve Disk System Performance", IEEE Computer
    27(3), 1994.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity, *, protected=0.5):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _SLRU.__init__(self, cache_capacity, protected=protected)
