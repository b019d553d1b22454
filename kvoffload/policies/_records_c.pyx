"""Records of the hit-density policy; see ``_records_c.pxd``."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kvoffload._core.ghosts cimport (
    NUM_CLOCKS,
    Clock,
    Ghost,
    Ghosts,
    clock_next,
    ghosts_check,
    ghosts_clear,
    ghosts_close,
    ghosts_open,
    ghosts_remove,
    ghosts_set,
)
from kvoffload._core.memory cimport extend, release
from kvoffload._core.table cimport RESIDENT, SEGMENT_BITS, Node, Table, node_at
from kvoffload.policies._densities_c cimport (
    NUM_CLASSES,
    NUM_EPOCHS,
    age_bin,
    counts_at,
    densities_clear,
    densities_open,
    end_age,
)
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef class Records(CompiledPolicy):
    def __cinit__(self):
        self.last = NULL
        memset(&self.memory, 0, sizeof(Ghosts))

    def __dealloc__(self):
        release(self.last, self.num_last * sizeof(uint32_t))
        ghosts_close(&self.memory)

    cdef int open_records(self, uint32_t never_reused, uint32_t reused) except -1:
        ghosts_close(&self.memory)
        if not ghosts_open(&self.memory, never_reused, reused) or not self.ensure_last():
            raise MemoryError(f"no room for {<uint64_t>never_reused + reused} ghosts")
        densities_open(&self.learned, <uint64_t>self.capacity)
        self.request = 0
        return 0

    cdef void clear_records(self) noexcept:
        ghosts_clear(&self.memory)
        densities_clear(&self.learned)
        self.request = 0

    cdef void remember(self, uint64_t hashed, int reuse_class, uint32_t last) noexcept:
        cdef Clock* clock = &self.memory.clocks[reuse_class > 0]
        cdef uint32_t position
        cdef Ghost* ghost
        if clock.size == 0:
            self.forget(reuse_class, last)
            return
        position = clock_next(&self.memory, clock)
        ghost = self.memory.items + position
        if ghost.kind:
            self.forget(ghost.kind - 1, ghost.last)
            ghosts_remove(&self.memory, position)
        ghosts_set(&self.memory, position, hashed, <uint8_t>(reuse_class + 1), last)

    cdef void forget(self, int reuse_class, uint32_t last) noexcept:
        self.learned.dropped[reuse_class][age_bin(self.request - last)] += 1.0
        end_age(&self.learned, reuse_class, last, self.request)

    cdef uint64_t c_num_ghosts(self) noexcept:
        return self.memory.size

    cdef bint ensure_last(self) noexcept:
        """Reserve a time of last use for every node."""
        cdef Table* table = &self.storage.table
        cdef uint64_t wanted = table.num_reserved + (<uint64_t>table.num_segments << SEGMENT_BITS)
        return extend(<void**>&self.last, &self.num_last, wanted, sizeof(uint32_t), self.num_last)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return CompiledPolicy.c_ensure(self, more) and self.ensure_last()

    cdef const char* c_check(self) noexcept:
        cdef const char* broken = ghosts_check(&self.memory)
        cdef Clock* clock
        cdef Ghost* ghost
        cdef Node* node
        cdef uint32_t node_id, position
        cdef uint64_t resident = 0
        cdef int index, reuse_class
        cdef bint counted
        if broken != NULL:
            return broken
        for index in range(self.num_rings):
            resident += self.rings[index].size
        if resident != self.num_resident:
            return b"resident is all rings"
        for index in range(NUM_CLOCKS):
            clock = &self.memory.clocks[index]
            for position in range(clock.start, clock.start + clock.reached):
                ghost = self.memory.items + position
                if ghost.kind and (ghost.kind > 1) != (index == 1):
                    return b"a ghost stands in the clock of its class"
        # Take all ages out of the counts, look whether nothing is left, and put them back.
        self.count_ages(-1)
        counted = True
        for reuse_class in range(NUM_CLASSES):
            counted = counted and self.learned.ancient[reuse_class] == 0
            for index in range(NUM_EPOCHS):
                counted = counted and self.learned.living[index][reuse_class] == 0
        self.count_ages(1)
        if not counted:
            return b"ages that go on are counted"
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.key_length and not node.flags & RESIDENT:
                return b"every node is resident"
        return NULL

    cdef void count_ages(self, int64_t change) noexcept:
        cdef Clock* clock
        cdef Ghost* ghost
        cdef Node* node
        cdef uint32_t node_id, position
        cdef int index
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.flags & RESIDENT:
                counts_at(&self.learned, self.last[node_id], self.request)[class_of(node)] += change
        for index in range(NUM_CLOCKS):
            clock = &self.memory.clocks[index]
            for position in range(clock.start, clock.start + clock.reached):
                ghost = self.memory.items + position
                if ghost.kind:
                    counts_at(&self.learned, ghost.last, self.request)[ghost.kind - 1] += change
