"""The base of compiled policies whose queues are not ordered by use; see the ``.pxd``."""

from libc.stdint cimport uint8_t

from kvoffload._core.memory cimport discard, grow
from kvoffload._core.ring cimport (
    Ring,
    parking_position,
    ring_append,
    ring_ensure_parking,
    ring_list,
    ring_node_ids,
    ring_park_as,
    ring_put_before,
    ring_remove,
    ring_renew,
    ring_unlist_before,
)
from kvoffload._core.table cimport CHOSEN, LISTED, NIL, PARKED, SEGMENT_BITS, hash_ahead, node_at
from kvoffload._core.victims cimport evictable, victims_settle, victims_take
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


cdef inline bint leaves_before(const Waiting* one, const Waiting* other) noexcept:
    """Compare waiting blocks: the deepest first, then in queue order."""
    if one.depth != other.depth:
        return one.depth > other.depth
    if one.queue_index != other.queue_index:
        return one.queue_index < other.queue_index
    return one.position < other.position


cdef inline void put(Waiting* heap, Link* links, uint64_t index, const Waiting* entry) noexcept:
    heap[index] = entry[0]
    links[entry.node_id].waiting = <uint32_t>(index + 1)


cdef void sift(Waiting* heap, Link* links, uint64_t size, uint64_t gap, Waiting entry) noexcept:
    """Put an entry into the gap of a heap."""
    cdef uint64_t child
    while gap and leaves_before(&entry, &heap[(gap - 1) // 2]):
        put(heap, links, gap, &heap[(gap - 1) // 2])
        gap = (gap - 1) // 2
    while True:
        child = 2 * gap + 1
        if child + 1 < size and leaves_before(&heap[child + 1], &heap[child]):
            child += 1
        if child >= size or not leaves_before(&heap[child], &entry):
            break
        put(heap, links, gap, &heap[child])
        gap = child
    put(heap, links, gap, &entry)


cdef inline void add_waiting(QueuePolicy policy, int queue_index, uint32_t node_id) noexcept:
    """Add a waiting block, outside the heap; there is room."""
    policy.waiting[policy.num_waiting].node_id = node_id
    policy.waiting[policy.num_waiting].queue_index = queue_index
    policy.num_waiting += 1
    policy.chains.links[node_id].waiting = <uint32_t>policy.num_waiting


cdef class QueuePolicy(CompiledPolicy):
    """The chains and the search of a policy whose queues are not ordered by use."""

    def __cinit__(self):
        chains_open(&self.chains)
        self.waiting = NULL

    def __dealloc__(self):
        chains_close(&self.chains)
        discard(self.waiting)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return CompiledPolicy.c_ensure(self, more) and chains_ensure(
            &self.chains,
            self.table.num_reserved + (<uint64_t>self.table.num_segments << SEGMENT_BITS),
        )

    cdef bint c_search(self, uint64_t n) noexcept:
        self.undo()
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

    cdef bint may_leave(self, const Node* node) noexcept:
        return evictable(self.table, node)

    cdef bint is_worth_parking(self, const Node* node) noexcept:
        """Return whether scans would repeatedly meet a block that may not leave: not protected."""
        return self.victims.managed and (node.block.ref_cnt != 0 or node.flags & CHOSEN != 0)

    cdef bint choose(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        """Make a block of a ring a victim; False if there is no memory."""
        if not victims_take(&self.victims, self.table, &self.rings[queue_index], node_id):
            if node.flags & PARKED:
                ring_list(self.table, &self.rings[queue_index], node_id, node)
            return False
        self.victims.items[self.victims.size - 1].hashed = hash_ahead(self.table, node)
        return self.leave_chain(node_id)

    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept:
        return self.choose(node.ring - 1, node_id, node)

    cdef bint leave_chain(self, uint32_t node_id) noexcept:
        cdef Link* before = chains_before(&self.chains, self.chains.links + node_id)
        cdef uint32_t waiting = self.chains.links[node_id].before
        cdef Node* node
        chains_leave(&self.chains, node_id)
        if before == NULL or before.num_behind:
            return True
        node = node_at(self.table, waiting)
        if node.flags & (PARKED | LISTED | CHOSEN) != PARKED or node.block.ref_cnt != 0:
            return True
        return self.c_became_tail(waiting, node)

    cdef bint take_deepest(self, uint64_t n) noexcept:
        cdef uint64_t end, index, num_protected = 0
        cdef Waiting entry
        cdef Node* node
        if not self.victims.managed and not self.gather():
            return False
        self.order_waiting()
        end = self.num_waiting
        while self.num_waiting and self.victims.size < n:
            entry = self.waiting[0]
            node = node_at(self.table, entry.node_id)
            self.wait_no_longer(entry.node_id)
            if node.block.ref_cnt != 0 or node.flags & CHOSEN:
                continue  # it is listed when it is idle again, or is given back
            if node.block.mark == self.table.epoch:
                num_protected += 1
                self.waiting[end - num_protected] = entry  # there is room behind the heap now
            elif not self.choose(entry.queue_index, entry.node_id, node):
                break
        for index in range(end - num_protected, end):
            add_waiting(self, self.waiting[index].queue_index, self.waiting[index].node_id)
        if not self.victims.managed:
            self.forget_waiting()
        return self.victims.size == n

    cdef bint gather(self) noexcept:
        """List all that may leave as waiting, in a policy used alone; False without memory."""
        cdef uint32_t node_id
        cdef Node* node
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if 0 < node.ring <= self.num_queues and self.may_leave(node):
                if self.num_waiting == self.waiting_room and not self.grow_waiting():
                    self.forget_waiting()
                    return False
                add_waiting(self, node.ring - 1, node_id)
        return True

    # -- the heap of waiting blocks ----------------------------------------------------------

    cdef bint grow_waiting(self) noexcept:
        """Double the room; False if there is no memory."""
        if grow(
            <void**>&self.waiting,
            &self.waiting_room,
            self.num_waiting + 1,
            sizeof(Waiting),
            FIRST_ROOM,
        ):
            return True
        self.victims.no_memory = True
        return False

    cdef void order_waiting(self) noexcept:
        """Add to the heap the blocks that came since it was last read."""
        cdef Waiting entry
        while self.num_ordered < self.num_waiting:
            entry = self.waiting[self.num_ordered]
            entry.position = self.chains.links[entry.node_id].position
            entry.depth = self.chains.links[entry.node_id].depth
            self.num_ordered += 1
            sift(self.waiting, self.chains.links, self.num_ordered, self.num_ordered - 1, entry)

    cdef void wait_no_longer(self, uint32_t node_id) noexcept:
        cdef Waiting* heap = self.waiting
        cdef Link* links = self.chains.links
        cdef uint64_t gap = links[node_id].waiting - 1
        links[node_id].waiting = 0
        self.num_waiting -= 1
        if gap < self.num_ordered:
            self.num_ordered -= 1
            if gap < self.num_ordered:
                sift(heap, links, self.num_ordered, gap, heap[self.num_ordered])
            gap = self.num_ordered
        if gap < self.num_waiting:
            put(heap, links, gap, &heap[self.num_waiting])

    cdef void forget_waiting(self) noexcept:
        """Empty the heap."""
        cdef uint64_t index
        for index in range(self.num_waiting):
            self.chains.links[self.waiting[index].node_id].waiting = 0
        self.num_waiting = self.num_ordered = 0

    # -- queues ------------------------------------------------------------------------------

    cdef void join(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        self.chains.links[node_id].position = queue.next_position
        queue.next_position += 1
        ring_append(self.table, queue, node_id, node)

    cdef void renew(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        if node.flags & PARKED and self.chains.links[node_id].waiting:
            self.wait_no_longer(node_id)
        self.chains.links[node_id].position = queue.next_position
        queue.next_position += 1
        ring_renew(self.table, queue, node_id, node)

    cdef void put_back(
        self, int queue_index, uint32_t node_id, Node* node, uint64_t position
    ) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        cdef uint32_t following = NIL, before = queue.newest
        # Blocks are put back from the newest on: the last one is a good start.
        if self.last_put_back < self.table.num_used:
            if (
                node_at(self.table, self.last_put_back).ring == queue.id
                and self.chains.links[self.last_put_back].position > position
            ):
                following = self.last_put_back
                before = node_at(self.table, following).prev
        while before != NIL and self.chains.links[before].position > position:
            following = before
            before = node_at(self.table, before).prev
        self.chains.links[node_id].position = position
        ring_put_before(self.table, queue, node_id, node, following)
        self.last_put_back = node_id

    cdef uint32_t scan(self, int queue_index, uint32_t* rest) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        cdef uint32_t node_id = rest[0]
        cdef uint64_t position = (
            BEYOND_ALL if node_id == NIL else self.chains.links[node_id].position
        )
        cdef uint32_t returning = ring_unlist_before(self.table, queue, position)
        cdef Node* node
        if returning != NIL:
            node = node_at(self.table, returning)
            if self.chains.links[returning].waiting:
                self.wait_no_longer(returning)
            ring_remove(self.table, queue, node)
            ring_put_before(self.table, queue, returning, node, node_id)
            return returning
        if node_id != NIL:
            rest[0] = node_at(self.table, node_id).next
        return node_id

    cdef uint64_t num_to_scan(self, int queue_index) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        return queue.size - queue.num_parked + queue.num_listed

    cdef bint park(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        if not ring_ensure_parking(queue):
            self.victims.no_memory = True
            return False
        ring_park_as(self.table, queue, node, self.chains.links[node_id].position)
        return True

    cdef bint wait(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        if self.num_waiting == self.waiting_room and not self.grow_waiting():
            return False
        if not self.park(queue_index, node_id, node):
            return False
        add_waiting(self, queue_index, node_id)
        return True

    cdef void became_idle(self, uint32_t node_id, Node* node) noexcept:
        # The order of returning blocks depends on the position of the scan.
        self.undo()
        CompiledPolicy.became_idle(self, node_id, node)

    cdef list c_node_ids(self, int queue_index):
        cdef uint32_t node_id
        self.undo()
        node_ids = ring_node_ids(self.table, &self.rings[queue_index])
        if queue_index < self.num_queues:
            node_ids.sort(
                key=[
                    self.chains.links[node_id].position for node_id in range(self.table.num_used)
                ].__getitem__
            )
        return node_ids

    cdef const char* check_queues(self) noexcept:
        """Verify that the queues are in the order of their positions; return what is broken."""
        cdef Ring* queue
        cdef Node* node
        cdef uint32_t node_id
        cdef uint64_t position
        cdef int queue_index
        for queue_index in range(self.num_queues):
            queue = &self.rings[queue_index]
            node_id = queue.oldest
            while node_id != NIL:
                node = node_at(self.table, node_id)
                position = self.chains.links[node_id].position
                if position >= queue.next_position:
                    return b"positions were given out"
                if node.next != NIL and self.chains.links[node.next].position <= position:
                    return b"a queue is in the order of its positions"
                node_id = node.next
            for node_id in range(self.table.num_used):
                node = node_at(self.table, node_id)
                if node.ring == queue.id and node.flags & PARKED:
                    if self.chains.links[node_id].position != parking_position(node):
                        return b"a block is parked under its position"
                    # Once the manager is gone, anyone may write to the statuses.
                    if (
                        not self.was_owned
                        and node.block.ref_cnt == 0
                        and not node.flags & LISTED
                        and (
                            self.chains.links[node_id].num_behind == 0
                            or self.chains.links[node_id].waiting == 0
                        )
                    ):
                        return b"a parked block is in use, waits for others, or is listed"
        return self.check_waiting()

    cdef const char* check_waiting(self) noexcept:
        """Verify the heap of waiting blocks and the chains; return what is broken."""
        cdef uint64_t index
        cdef Waiting* entry
        cdef Link* link
        cdef Node* node
        for index in range(self.num_waiting):
            entry = &self.waiting[index]
            link = &self.chains.links[entry.node_id]
            node = node_at(self.table, entry.node_id)
            if link.waiting != index + 1 or not node.flags & PARKED:
                return b"what waits is parked and knows its index"
            if node.ring != entry.queue_index + 1:
                return b"what waits has kept its queue"
            if index >= self.num_ordered:
                continue
            # A block in use may be linked again meanwhile; it is listed, and met, when it is idle.
            if node.block.ref_cnt == 0 and not node.flags & LISTED and (
                link.position != entry.position or link.depth != entry.depth
            ):
                return b"what waits has kept its position and depth"
            if index and leaves_before(entry, &self.waiting[(index - 1) // 2]):
                return b"the heap of waiting blocks is ordered"
        return chains_check(&self.chains, self.table)

    # -- undoing -----------------------------------------------------------------------------

    cdef void undo(self) noexcept:
        """Undo the changes of a search that was not settled."""
        cdef uint64_t index
        cdef uint32_t node_id
        cdef Node* node
        if not self.searching:
            return
        self.searching = False
        self.last_put_back = NIL
        for index in range(self.num_chosen):
            node_id = self.victims.items[index].node_id
            chains_return(&self.chains, node_id)
            node_at(self.table, node_id).flags &= <uint8_t>(~CHOSEN & 0xFF)
        self.c_undo()
        for index in range(self.num_chosen):
            node_id = self.victims.items[index].node_id
            node = node_at(self.table, node_id)
            if node.flags & PARKED:
                ring_list(self.table, &self.rings[node.ring - 1], node_id, node)

    cdef void leave(self, uint32_t node_id) noexcept:
        self.searching = False
        if self.chains.links[node_id].waiting:
            self.wait_no_longer(node_id)
        self.chains.links[node_id].link_id = 0

    cdef void c_unparked(self) noexcept:
        self.forget_waiting()

    cdef void c_clear(self) noexcept:
        self.searching = False
        self.forget_waiting()

    cdef bint c_sift(self, uint64_t n) noexcept:
        return False

    cdef void c_undo(self) noexcept:
        pass

    cdef bint c_became_tail(self, uint32_t node_id, Node* node) noexcept:
        return True
