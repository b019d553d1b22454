"""ARC, compiled (Megiddo & Modha, FAST'03, fig. 4), as vLLM adapts it.

Structure
    See ``_arc_lists_c`` for the lists, ``_arc_py`` for the Python twin and the differences from the
    paper.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of pinned blocks.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ring cimport Ring, ring_append, ring_remove, ring_renew
from kvoffload._core.table cimport NIL, Node, drop_hashed_key, hash_ahead, node_at
from kvoffload.policies._arc_lists_c cimport B1, B2, T1, T2, ARCLists

from kvoffload.policies.base import CachePolicy

cdef enum:
    TRIM_GROUP = 16     # ghosts forgotten together, their cache misses overlapped


cdef class _ARC(ARCLists):
    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 3, 4)
        self.target = 0.0
        self.newcomers = 0
        self.publish()

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        if node.ring:
            ring_remove(self.table, &self.rings[node.ring - 1], node)
        ring_append(self.table, &self.rings[T1], node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.ring == T1 + 1 and node.block.ref_cnt >= 0:
                ring_remove(self.table, &self.rings[T1], node)
                ring_append(self.table, &self.rings[T2], node_id, node)
                continue
            if node.ring == B1 + 1:
                self.raise_target()
            elif node.ring == B2 + 1:
                self.lower_target()
            ring_renew(self.table, &self.rings[node.ring - 1], node_id, node)

    cdef bint t1_gives(self, uint64_t t1_size) noexcept:
        return t1_size >= <uint64_t>self.target

    cdef void c_settled(self) noexcept:
        self.trim(&self.rings[B1])
        self.trim(&self.rings[B2])

    cdef void trim(self, Ring* ghosts) noexcept:
        """Forget the oldest ghosts beyond the capacity."""
        cdef uint64_t hashes[TRIM_GROUP]
        cdef uint64_t index, count
        cdef uint32_t node_id
        cdef Node* node
        while ghosts.size > <uint64_t>self.capacity:
            count = min(ghosts.size - <uint64_t>self.capacity, <uint64_t>TRIM_GROUP)
            node_id = ghosts.oldest
            for index in range(count):
                node = node_at(self.table, node_id)
                hashes[index] = hash_ahead(self.table, node)
                node_id = node.next
            for index in range(count):
                node_id = ghosts.oldest
                node = node_at(self.table, node_id)
                ring_remove(self.table, ghosts, node)
                # A ghost of the batch at work is about to be inserted: its key stays.
                if node.block.mark != self.table.epoch:
                    drop_hashed_key(self.table, node_id, node, hashes[index])

    cdef const char* c_check(self) noexcept:
        if max(self.rings[B1].size, self.rings[B2].size) > <uint64_t>self.capacity:
            return b"B1 and B2 are within the capacity"
        return ARCLists.c_check(self)


class ARCCachePolicy(_ARC, CachePolicy):
    """A policy that balances recency and frequency by adaptive replacement, in vLLM's variant.

    Parameters
    ----------
    cache_capacity : int
        Upper bound of the target size of T1, and of each ghost list.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _ARC.__init__(self, cache_capacity)
