"""ARC as published, compiled (Megiddo & Modha, FAST'03, fig. 4).

Structure
    See ``_arc_lists_c`` for the lists. A ghost's ``note`` is 1 once its return was counted. See
    ``_arc_classic_py`` for the Python twin, for how the paper's requests map to calls, and the
    differences from the paper.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of pinned blocks.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ring cimport Ring, ring_append, ring_remove, ring_renew
from kvoffload._core.table cimport NIL, Node, drop_key, node_at
from kvoffload.policies._arc_lists_c cimport B1, B2, T1, T2, ARCLists

from kvoffload.policies.base import CachePolicy


cdef class _ARCClassic(ARCLists):
    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 2, 4)
        self.target = 0.0
        self.newcomers = 1
        self.publish()

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        if node.ring:
            self.adapt(node)
            ring_remove(self.table, &self.rings[node.ring - 1], node)
            ring_append(self.table, &self.rings[T2], node_id, node)
        else:
            ring_append(self.table, &self.rings[T1], node_id, node)
        node.note = 0
        self.trim_ghosts()

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef bint later_is_in_t2 = False
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.ring == T1 + 1 and (node.block.ref_cnt >= 0 or later_is_in_t2):
                ring_remove(self.table, &self.rings[T1], node)
                ring_append(self.table, &self.rings[T2], node_id, node)
                later_is_in_t2 = True
                continue
            if node.ring == T2 + 1:
                later_is_in_t2 = True
            elif node.ring != T1 + 1:
                self.adapt(node)
                node.note = 1
            ring_renew(self.table, &self.rings[node.ring - 1], node_id, node)

    cdef void adapt(self, Node* ghost) noexcept:
        """Adapt the target to the return of a ghost, once."""
        if ghost.note:
            return
        if ghost.ring == B1 + 1:
            self.raise_target()
        else:
            self.lower_target()

    cdef bint t1_gives(self, uint64_t t1_size) noexcept:
        return <double>t1_size > self.target

    cdef void trim_ghosts(self) noexcept:
        """Drop the oldest ghosts that the paper's bounds leave no room for (case IV)."""
        cdef uint64_t capacity = <uint64_t>self.capacity
        cdef uint64_t resident = self.rings[T1].size + self.rings[T2].size
        while self.rings[B1].size and self.rings[T1].size + self.rings[B1].size > capacity:
            self.drop_oldest(&self.rings[B1])
        while (
            self.rings[B2].size
            and resident + self.rings[B1].size + self.rings[B2].size > 2 * capacity
        ):
            self.drop_oldest(&self.rings[B2])

    cdef void drop_oldest(self, Ring* ghosts) noexcept:
        cdef uint32_t node_id = ghosts.oldest
        cdef Node* node = node_at(self.table, node_id)
        ring_remove(self.table, ghosts, node)
        node.note = 0
        # A ghost of the batch at work is about to be inserted: its key stays.
        if node.block.mark != self.table.epoch:
            drop_key(self.table, node_id, node)

    cdef void c_settled(self) noexcept:
        self.trim_ghosts()

    cdef const char* c_check(self) noexcept:
        cdef uint64_t capacity = <uint64_t>self.capacity
        cdef uint64_t l1 = self.rings[T1].size + self.rings[B1].size
        cdef uint64_t l2 = self.rings[T2].size + self.rings[B2].size
        if self.rings[B1].size and l1 > capacity:
            return b"T1 and B1 are within the capacity"
        if self.rings[B2].size and l1 + l2 > 2 * capacity:
            return b"all lists are within twice the capacity"
        return ARCLists.c_check(self)


class ARCClassicCachePolicy(_ARCClassic, CachePolicy):
    """A policy that balances recency and frequency by adaptive replacement, as published.

    Parameters
    ----------
    cache_capacity : int
        The paper's c: upper bound of the target size of T1, and of T1 and its ghosts together.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _ARCClassic.__init__(self, cache_capacity)
