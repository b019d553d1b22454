"""What compiled policies share whose queues are not ordered by use; see the ``.pxd``."""

from libc.stdlib cimport qsort

from kvoffload._core.memory cimport discard, resize
from kvoffload._core.table cimport NIL, hash_ahead, node_at, table_ensure
from kvoffload._core.victims cimport Victim
from kvoffload.policies._chains_c cimport (
    chains_clear,
    chains_close,
    chains_ensure,
    chains_leave,
    chains_open,
    chains_return,
)

cdef enum:
    FIRST_ROOM = 64


# A block that may leave although others are behind it.
cdef struct Deep:
    uint64_t place          # in the order of the scan
    uint32_t depth
    uint32_t slot
    int number              # its ring's, from 0


cdef int deeper(const void* left, const void* right) noexcept nogil:
    """Order the deepest first, then as the scan comes by."""
    cdef const Deep* one = <const Deep*>left
    cdef const Deep* other = <const Deep*>right
    if one.depth != other.depth:
        return -1 if one.depth > other.depth else 1
    return -1 if one.place < other.place else 1


cdef class QueuePolicy(CompiledPolicy):
    """Hold the chains and the search of a policy whose queues are not ordered by use."""

    def __cinit__(self):
        chains_open(&self.chains)

    def __dealloc__(self):
        chains_close(&self.chains)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        more += <uint64_t>len(self.storage.exports)
        return table_ensure(self.table, more) and chains_ensure(
            &self.chains, self.table.num_used + more
        )

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef uint32_t slot
        self.undo()
        # These policies park nothing, whoever drives them.
        self.victims.managed = False
        self.search += 1
        if self.search == 0:
            for slot in range(self.table.num_used):
                self.chains.links[slot].search = 0
            self.search = 1
        if not self.enough(n):
            return False
        self.searching = True
        self.num_chosen = 0
        if self.c_sift(n):
            self.num_chosen = n
            return True
        self.num_chosen = self.victims.size
        self.victims.size = 0
        self.undo()
        return False

    cdef bint may_leave(self, uint32_t slot, const Node* node) noexcept:
        return (
            node.block.ref_cnt == 0
            and node.block.mark != self.table.epoch
            and not self.is_chosen(slot)
        )

    cdef bint is_chosen(self, uint32_t slot) noexcept:
        return self.chains.links[slot].search == self.search

    cdef bint enough(self, uint64_t n) noexcept:
        """Tell whether `n` blocks may leave."""
        cdef uint64_t found = 0
        cdef uint32_t slot
        cdef int number
        cdef Node* node
        for number in range(self.num_queues):
            slot = self.rings[number].oldest
            while slot != NIL and found < n:
                node = node_at(self.table, slot)
                found += self.may_leave(slot, node)
                slot = node.next
        return found >= n

    cdef bint choose(self, int number, uint32_t slot, Node* node) noexcept:
        """Make a block of a ring a victim; False if there is no memory."""
        cdef Victim* victim
        cdef uint64_t room
        if self.victims.size == self.victims.room:
            room = max(2 * self.victims.room, <uint64_t>FIRST_ROOM)
            victim = <Victim*>resize(self.victims.items, room * sizeof(Victim))
            if victim == NULL:
                self.victims.no_memory = True
                return False
            self.victims.items = victim
            self.victims.room = room
        victim = &self.victims.items[self.victims.size]
        victim.slot = slot
        victim.ring = &self.rings[number]
        victim.hashed = hash_ahead(self.table, node)
        self.victims.size += 1
        self.chains.links[slot].search = self.search
        chains_leave(&self.chains, slot)
        return True

    cdef bint take_deepest(self, uint64_t n, uint32_t start) noexcept:
        cdef uint64_t found = 0, place = 0, left
        cdef uint32_t slot
        cdef int number
        cdef bint chosen = True
        cdef Deep* deep = <Deep*>resize(NULL, self.num_resident * sizeof(Deep))
        if deep == NULL:
            self.victims.no_memory = True
            return False
        for number in range(self.num_queues):
            slot = start if number == 0 else NIL
            for left in range(self.rings[number].size):
                if slot == NIL:
                    slot = self.rings[number].oldest
                if self.may_leave(slot, node_at(self.table, slot)):
                    deep[found].depth = self.chains.links[slot].depth
                    deep[found].place = place
                    deep[found].slot = slot
                    deep[found].number = number
                    found += 1
                place += 1
                slot = node_at(self.table, slot).next
        qsort(deep, found, sizeof(Deep), deeper)
        place = 0
        while chosen and self.victims.size < n:
            slot = deep[place].slot
            chosen = self.choose(deep[place].number, slot, node_at(self.table, slot))
            place += 1
        discard(deep)
        return chosen

    cdef void undo(self) noexcept:
        """Take back what a search changed that was not settled."""
        cdef uint64_t place
        cdef uint32_t slot
        if not self.searching:
            return
        self.searching = False
        for place in range(self.num_chosen):
            slot = self.victims.items[place].slot
            chains_return(&self.chains, slot)
            self.chains.links[slot].search = 0
        self.c_undo()

    cdef void leave(self, uint32_t slot) noexcept:
        self.searching = False
        self.chains.links[slot].number = 0

    cdef void c_clear(self) noexcept:
        self.searching = False
        chains_clear(&self.chains)

    cdef bint c_sift(self, uint64_t n) noexcept:
        return False

    cdef void c_undo(self) noexcept:
        pass
