"""The four lists of ARC and its target, compiled; see the ``.pxd``."""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.ring cimport ring_append, ring_park_in_use
from kvoffload._core.table cimport Node, drop_block, node_at
from kvoffload._core.victims cimport Cursor, Victim, victims_cancel, victims_next

from kvoffload.policies._views import BlocksView, GhostsView


cdef class ARCLists(CompiledPolicy):
    """The lists T1, T2, B1 and B2, and the target size of T1."""

    @property
    def t1(self):
        """Blocks seen once and their live statuses, least recent first; read-only."""
        self.require_ready()
        return BlocksView(self, T1)

    @property
    def t2(self):
        """Blocks seen again and their live statuses, least recent first; read-only."""
        self.require_ready()
        return BlocksView(self, T2)

    @property
    def b1(self):
        """Ghosts of T1, least recent first; read-only."""
        self.require_ready()
        return GhostsView(self, B1)

    @property
    def b2(self):
        """Ghosts of T2, least recent first; read-only."""
        self.require_ready()
        return GhostsView(self, B2)

    @property
    def target_t1_size(self):
        """Target size of T1 in blocks, ``0.0 ... cache_capacity``; adapts."""
        self.require_ready()
        return self.target

    cdef void raise_target(self) noexcept:
        """Adapt to a ghost of B1: raise the target by max(1, |B2| / |B1|)."""
        cdef double share = <double>self.rings[B2].size / <double>self.rings[B1].size
        self.target = min(self.target + max(1.0, share), <double>self.capacity)

    cdef void lower_target(self) noexcept:
        """Adapt to a ghost of B2: T2 was too small."""
        cdef double share = <double>self.rings[B1].size / <double>self.rings[B2].size
        self.target = max(self.target - max(1.0, share), 0.0)

    cdef bint t1_gives(self, uint64_t t1_size) noexcept:
        return False

    cdef bint c_search(self, uint64_t n) noexcept:
        """Choose victims by REPLACE of figure 4; an exhausted list stays exhausted."""
        cdef Cursor cursors[2]
        cdef bint exhausted[2]
        cdef uint64_t t1_size = self.rings[T1].size, index
        cdef int first, attempt, ring
        cdef bint found
        cursors[T1].started = cursors[T2].started = False
        exhausted[T1] = exhausted[T2] = False
        if not self.take_released(n):
            victims_cancel(&self.victims, self.table)
            return False
        for index in range(self.victims.size):
            t1_size += <uint64_t>(
                self.newcomers - (self.victims.items[index].ring == &self.rings[T1])
            )
        while self.victims.size < n:
            first = T1 if self.t1_gives(t1_size) else T2
            found = False
            for attempt in range(2):
                ring = first if attempt == 0 else 1 - first
                if exhausted[ring]:
                    continue
                found = victims_next(&self.victims, self.table, &self.rings[ring], &cursors[ring])
                if found:
                    t1_size += <uint64_t>(self.newcomers - (ring == T1))
                    break
                if self.victims.no_memory:
                    break
                exhausted[ring] = True
            if not found:
                victims_cancel(&self.victims, self.table)
                return False
        return True

    cdef void c_park(self, uint64_t most) noexcept:
        ring_park_in_use(self.table, &self.rings[T1], most)
        ring_park_in_use(self.table, &self.rings[T2], most)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        cdef int ghosts = B1 if node.ring == T1 + 1 else B2
        cdef uint32_t node_id
        self.take_off(victim.node_id, node)
        node_id = drop_block(self.table, victim.node_id, node)
        ring_append(self.table, &self.rings[ghosts], node_id, node_at(self.table, node_id))

    cdef uint64_t c_num_ghosts(self) noexcept:
        return self.rings[B1].size + self.rings[B2].size

    cdef void c_clear(self) noexcept:
        self.target = 0.0

    cdef const char* c_check(self) noexcept:
        if not 0.0 <= self.target <= <double>self.capacity:
            return b"the target is within the capacity"
        if self.rings[T1].size + self.rings[T2].size != self.num_resident:
            return b"resident is T1 and T2"
        return NULL
