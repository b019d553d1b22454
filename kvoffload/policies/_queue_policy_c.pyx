"""What compiled policies share whose queues are not ordered by use; see the ``.pxd``."""

from libc.stdlib cimport qsort

from kvoffload._core.memory cimport discard, resize
from kvoffload._core.ring cimport (
    Ring,
    parking_number,
    ring_append,
    ring_ensure_parking,
    ring_park_as,
    ring_put_before,
    ring_remove,
    ring_renew,
    ring_slots,
    ring_unlist_before,
)
from kvoffload._core.table cimport LISTED, NIL, PARKED, SEGMENT_BITS, hash_ahead, node_at
from kvoffload._core.victims cimport Victim, victims_settle
from kvoffload.policies._chains_c cimport (
    Link,
    chains_before,
    chains_check,
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
    uint64_t place
    uint32_t depth
    uint32_t slot
    int number              # its ring's, from 0


cdef int deeper(const void* left, const void* right) noexcept nogil:
    """Order the deepest first, then as the queues stand."""
    cdef const Deep* one = <const Deep*>left
    cdef const Deep* other = <const Deep*>right
    if one.depth != other.depth:
        return -1 if one.depth > other.depth else 1
    if one.number != other.number:
        return one.number - other.number
    return -1 if one.place < other.place else 1


cdef class QueuePolicy(CompiledPolicy):
    """Hold the chains and the search of a policy whose queues are not ordered by use."""

    def __cinit__(self):
        chains_open(&self.chains)

    def __dealloc__(self):
        chains_close(&self.chains)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return CompiledPolicy.c_ensure(self, more) and chains_ensure(
            &self.chains,
            self.table.num_reserved + (<uint64_t>self.table.num_segments << SEGMENT_BITS),
        )

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef uint32_t slot
        self.undo()
        self.search += 1
        if self.search == 0:
            for slot in range(self.table.num_used):
                self.chains.links[slot].search = 0
            self.search = 1
        self.searching = True
        self.num_chosen = 0
        if self.c_sift(n):
            self.num_chosen = n
            return True
        self.num_chosen = self.victims.size
        self.victims.size = 0
        victims_settle(&self.victims, self.table)
        self.undo()
        return False

    cdef void cancel(self) noexcept:
        CompiledPolicy.cancel(self)
        self.undo()

    cdef bint may_leave(self, uint32_t slot, const Node* node) noexcept:
        return (
            node.block.ref_cnt == 0
            and node.block.mark != self.table.epoch
            and not self.is_chosen(slot)
        )

    cdef bint is_chosen(self, uint32_t slot) noexcept:
        return self.chains.links[slot].search == self.search

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
        return self.leave_chain(slot)

    cdef bint leave_chain(self, uint32_t slot) noexcept:
        cdef Link* before = chains_before(&self.chains, self.chains.links + slot)
        cdef uint32_t waiting = self.chains.links[slot].before
        cdef Node* node
        chains_leave(&self.chains, slot)
        if before == NULL or before.num_behind:
            return True
        node = node_at(self.table, waiting)
        if not node.flags & PARKED or node.flags & LISTED or node.block.ref_cnt != 0:
            return True
        return self.c_became_tail(waiting, node)

    cdef bint take_deepest(self, uint64_t n) noexcept:
        cdef uint64_t found = 0, place
        cdef uint32_t slot
        cdef bint chosen = True
        cdef Node* node
        cdef Deep* deep = <Deep*>resize(NULL, self.num_resident * sizeof(Deep))
        if deep == NULL:
            self.victims.no_memory = True
            return False
        for slot in range(self.table.num_used):
            node = node_at(self.table, slot)
            if 0 < node.ring <= self.num_queues and self.may_leave(slot, node):
                deep[found].depth = self.chains.links[slot].depth
                deep[found].place = self.chains.links[slot].place
                deep[found].slot = slot
                deep[found].number = node.ring - 1
                found += 1
        if found >= n - self.victims.size:
            qsort(deep, found, sizeof(Deep), deeper)
            place = 0
            while chosen and self.victims.size < n:
                slot = deep[place].slot
                chosen = self.choose(deep[place].number, slot, node_at(self.table, slot))
                place += 1
        else:
            chosen = False
        discard(deep)
        return chosen

    # -- queues ------------------------------------------------------------------------------

    cdef void join(self, int number, uint32_t slot, Node* node) noexcept:
        cdef Ring* queue = &self.rings[number]
        self.chains.links[slot].place = queue.next_number
        queue.next_number += 1
        ring_append(self.table, queue, slot, node)

    cdef void renew(self, int number, uint32_t slot, Node* node) noexcept:
        cdef Ring* queue = &self.rings[number]
        self.chains.links[slot].place = queue.next_number
        queue.next_number += 1
        ring_renew(self.table, queue, slot, node)

    cdef void put_back(self, int number, uint32_t slot, Node* node, uint64_t place) noexcept:
        cdef Ring* queue = &self.rings[number]
        cdef uint32_t following = NIL, before = queue.newest
        # Blocks are put back from the newest on: the one before is a good start.
        if self.last_put_back < self.table.num_used:
            if (
                node_at(self.table, self.last_put_back).ring == queue.number
                and self.chains.links[self.last_put_back].place > place
            ):
                following = self.last_put_back
                before = node_at(self.table, following).prev
        while before != NIL and self.chains.links[before].place > place:
            following = before
            before = node_at(self.table, before).prev
        self.chains.links[slot].place = place
        ring_put_before(self.table, queue, slot, node, following)
        self.last_put_back = slot

    cdef uint32_t scan(self, int number, uint32_t* rest) noexcept:
        cdef Ring* queue = &self.rings[number]
        cdef uint32_t slot = rest[0]
        cdef uint64_t place = BEYOND_ALL if slot == NIL else self.chains.links[slot].place
        cdef uint32_t returning = ring_unlist_before(self.table, queue, place)
        cdef Node* node
        if returning != NIL:
            node = node_at(self.table, returning)
            ring_remove(self.table, queue, node)
            ring_put_before(self.table, queue, returning, node, slot)
            return returning
        if slot != NIL:
            rest[0] = node_at(self.table, slot).next
        return slot

    cdef uint64_t num_to_scan(self, int number) noexcept:
        cdef Ring* queue = &self.rings[number]
        return queue.size - queue.num_parked + queue.num_listed

    cdef bint park(self, int number, uint32_t slot, Node* node) noexcept:
        cdef Ring* queue = &self.rings[number]
        if not ring_ensure_parking(queue):
            self.victims.no_memory = True
            return False
        ring_park_as(self.table, queue, node, self.chains.links[slot].place)
        return True

    cdef void became_idle(self, uint32_t slot, Node* node) noexcept:
        # The order of what returns depends on where the scan stands.
        self.undo()
        CompiledPolicy.became_idle(self, slot, node)

    cdef list c_slots(self, int number):
        cdef uint32_t slot
        self.undo()
        slots = ring_slots(self.table, &self.rings[number])
        if number < self.num_queues:
            slots.sort(key=[self.chains.links[slot].place for slot in range(self.table.num_used)]
                       .__getitem__)
        return slots

    cdef const char* check_queues(self) noexcept:
        """Verify that the queues are in the order of their places; return what is broken."""
        cdef Ring* queue
        cdef Node* node
        cdef uint32_t slot
        cdef uint64_t place
        cdef int number
        for number in range(self.num_queues):
            queue = &self.rings[number]
            slot = queue.oldest
            while slot != NIL:
                node = node_at(self.table, slot)
                place = self.chains.links[slot].place
                if place >= queue.next_number:
                    return b"places were given out"
                if node.next != NIL and self.chains.links[node.next].place <= place:
                    return b"a queue is in the order of its places"
                slot = node.next
            for slot in range(self.table.num_used):
                node = node_at(self.table, slot)
                if node.ring == queue.number and node.flags & PARKED:
                    if self.chains.links[slot].place != parking_number(node):
                        return b"a block is parked under its place"
                    if (
                        node.block.ref_cnt == 0
                        and not node.flags & LISTED
                        and self.chains.links[slot].num_behind == 0
                    ):
                        return b"a parked block is in use, waits for others, or is listed"
        return chains_check(&self.chains, self.table)

    # -- undoing -----------------------------------------------------------------------------

    cdef void undo(self) noexcept:
        """Take back what a search changed that was not settled."""
        cdef uint64_t place
        cdef uint32_t slot
        if not self.searching:
            return
        self.searching = False
        self.last_put_back = NIL
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

    cdef bint c_sift(self, uint64_t n) noexcept:
        return False

    cdef void c_undo(self) noexcept:
        pass

    cdef bint c_became_tail(self, uint32_t slot, Node* node) noexcept:
        return True
