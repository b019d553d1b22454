"""Records of the hit-density policy; see ``_records_c.pxd``."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kvoffload._core.ghosts cimport (
    NUM_CLOCKS,
    OF_TURN,
    SHARED,
    UNCOUNTED,
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
    Densities,
    counts_at,
    densities_clear,
    densities_open,
)
from kvoffload.policies._hinted_c cimport (
    count_drop,
    end_record,
    hinted_close,
    hinted_ensure,
)
from kvoffload.policies._returns_c cimport returns_check
from kvoffload.policies._turns_c cimport NUM_RINGS, Part, Turns, turns_check, turns_leave
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef class Records(CompiledPolicy):
    def __cinit__(self):
        self.last = NULL
        memset(&self.memory, 0, sizeof(Ghosts))

    def __dealloc__(self):
        release(self.last, self.num_last * sizeof(uint32_t))
        ghosts_close(&self.memory)
        hinted_close(self.prepared)

    cdef int open_records(self, uint32_t never_reused, uint32_t reused) except -1:
        ghosts_close(&self.memory)
        if not ghosts_open(&self.memory, never_reused, reused) or not self.ensure_last():
            raise MemoryError(f"no room for {<uint64_t>never_reused + reused} ghosts")
        densities_open(&self.learned, <uint64_t>self.capacity)
        self.forget_hints()
        self.request = 0
        return 0

    cdef void clear_records(self) noexcept:
        ghosts_clear(&self.memory)
        densities_clear(&self.learned)
        self.forget_hints()
        self.request = 0

    cdef void forget_hints(self) noexcept:
        hinted_close(self.prepared)
        self.prepared = self.hinted = NULL

    cdef void remember(
        self, uint64_t hashed, int reuse_class, uint32_t last, uint8_t note, uint32_t part
    ) noexcept:
        cdef Clock* clock = &self.memory.clocks[reuse_class > 0]
        cdef uint32_t position
        cdef Ghost* ghost
        if clock.size == 0:
            self.forget(reuse_class, last, note, part)
            return
        position = clock_next(&self.memory, clock)
        ghost = self.memory.items + position
        if ghost.kind:
            self.forget(ghost.kind - 1, ghost.last, ghost.flags, self.part_of_ghost(position))
            ghosts_remove(&self.memory, position)
        ghosts_set(&self.memory, position, hashed, <uint8_t>(reuse_class + 1), last)
        ghost.flags = note & <uint8_t>(UNCOUNTED | SHARED)
        if part:
            ghost.flags |= OF_TURN
            self.hinted.ghost_parts[position] = part

    cdef void forget(self, int reuse_class, uint32_t last, uint8_t note, uint32_t part) noexcept:
        if not note & UNCOUNTED:
            count_drop(&self.learned, self.hinted, reuse_class, self.request - last, part)
            end_record(&self.learned, self.hinted, reuse_class, last, self.request, part)
        if part:
            turns_leave(&self.hinted.turns, part)

    cdef uint32_t part_of_ghost(self, uint32_t position) noexcept:
        if self.memory.items[position].flags & OF_TURN:
            return self.hinted.ghost_parts[position]
        return 0

    cdef uint64_t c_num_ghosts(self) noexcept:
        return self.memory.size

    cdef bint ensure_last(self) noexcept:
        """Reserve a time of last use for every node."""
        cdef Table* table = &self.storage.table
        cdef uint64_t wanted = table.num_reserved + (<uint64_t>table.num_segments << SEGMENT_BITS)
        return extend(<void**>&self.last, &self.num_last, wanted, sizeof(uint32_t), self.num_last)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return (
            CompiledPolicy.c_ensure(self, more)
            and self.ensure_last()
            and (self.prepared == NULL or hinted_ensure(self.prepared, self.num_last))
        )

    cdef const char* c_check(self) noexcept:
        cdef const char* broken = ghosts_check(&self.memory)
        cdef Clock* clock
        cdef Ghost* ghost
        cdef Node* node
        cdef uint32_t node_id, position
        cdef uint64_t resident = 0
        cdef int index
        if broken != NULL:
            return broken
        for index in range(self.num_rings):
            resident += self.rings[index].size
        if self.hinted != NULL:
            resident += self.hinted.turns.num_blocks
        if resident != self.num_resident:
            return b"resident is all rings"
        for index in range(NUM_CLOCKS):
            clock = &self.memory.clocks[index]
            for position in range(clock.start, clock.start + clock.reached):
                ghost = self.memory.items + position
                if ghost.kind and (ghost.kind > 1) != (index == 1):
                    return b"a ghost stands in the clock of its class"
        if not self.ages_are_counted(&self.learned, False) or (
            self.hinted != NULL and not self.ages_are_counted(&self.hinted.plain, True)
        ):
            return b"ages that go on are counted"
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.key_length and not node.flags & RESIDENT:
                return b"every node is resident"
        return self.check_turns() if self.hinted != NULL else NULL

    cdef bint ages_are_counted(self, Densities* densities, bint of_turns) noexcept:
        """Remove all ages from the counts, check that nothing is left, and restore them."""
        cdef int reuse_class, index
        cdef bint counted = True
        self.count_ages(densities, of_turns, -1)
        for reuse_class in range(NUM_CLASSES):
            counted = counted and densities.ancient[reuse_class] == 0
            for index in range(NUM_EPOCHS):
                counted = counted and densities.living[index][reuse_class] == 0
        self.count_ages(densities, of_turns, 1)
        return counted

    cdef void count_ages(self, Densities* densities, bint of_turns, int64_t change) noexcept:
        """Add `change` for each counted age; for those of turns if `of_turns`."""
        cdef Clock* clock
        cdef Ghost* ghost
        cdef Node* node
        cdef uint32_t node_id, position
        cdef int index
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if not node.flags & RESIDENT or node.note & UNCOUNTED:
                continue
            if of_turns or node.ring <= NUM_RINGS:
                counts_at(densities, self.last[node_id], self.request)[class_of(node)] += change
        for index in range(NUM_CLOCKS):
            clock = &self.memory.clocks[index]
            for position in range(clock.start, clock.start + clock.reached):
                ghost = self.memory.items + position
                if not ghost.kind or ghost.flags & UNCOUNTED:
                    continue
                if of_turns or not ghost.flags & OF_TURN:
                    counts_at(densities, ghost.last, self.request)[ghost.kind - 1] += change

    cdef const char* check_turns(self) noexcept:
        cdef Turns* turns = &self.hinted.turns
        cdef const char* broken = turns_check(turns)
        cdef Clock* clock
        cdef Ghost* ghost
        cdef Node* node
        cdef Part* part
        cdef uint32_t node_id, position
        cdef uint64_t living = 0, records = 0
        cdef int index
        if broken == NULL:
            broken = returns_check(&self.hinted.returns)
        if broken != NULL:
            return broken
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if not node.flags & RESIDENT or node.ring <= NUM_RINGS:
                continue
            part = turns.parts + turns.members[node_id].part
            if part.turn == 0 or part.ring != ring_of(node):
                return b"a block is of its part's class"
            if node.note & SHARED:
                return b"shared blocks belong to no turn"
            records += 1
            living += not node.note & UNCOUNTED
        for index in range(NUM_CLOCKS):
            clock = &self.memory.clocks[index]
            for position in range(clock.start, clock.start + clock.reached):
                ghost = self.memory.items + position
                if not ghost.kind or not ghost.flags & OF_TURN:
                    continue
                part = turns.parts + self.hinted.ghost_parts[position]
                if part.turn == 0 or part.ring != ghost.kind - 1:
                    return b"a ghost is of its part's class"
                if ghost.flags & SHARED:
                    return b"shared blocks belong to no turn"
                records += 1
                living += not ghost.flags & UNCOUNTED
        for node_id in range(1, turns.used_parts + 1):
            part = turns.parts + node_id
            if part.turn:
                records -= part.num_records
                living -= part.living
        if records or living:
            return b"ages are counted by turn"
        return NULL
