"""The base of compiled policies whose queues are not ordered by use; see the ``.pxd``."""

from libc.stdint cimport uint8_t

from kvoffload._core.memory cimport extend, release
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
from kvoffload._core.victims cimport victims_settle, victims_take


cdef class QueuePolicy(CompiledPolicy):
    """The positions and the search of a policy whose queues are not ordered by use."""

    def __cinit__(self):
        self.positions = NULL

    def __dealloc__(self):
        release(self.positions, self.num_positions * sizeof(uint64_t))

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return CompiledPolicy.c_ensure(self, more) and extend(
            <void**>&self.positions,
            &self.num_positions,
            self.table.num_reserved + (<uint64_t>self.table.num_segments << SEGMENT_BITS),
            sizeof(uint64_t),
            self.num_positions,
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

    cdef bint choose(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        if not victims_take(&self.victims, self.table, &self.rings[queue_index], node_id):
            if node.flags & PARKED:
                ring_list(self.table, &self.rings[queue_index], node_id, node)
            return False
        self.victims.items[self.victims.size - 1].hashed = hash_ahead(self.table, node)
        return True

    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept:
        return self.choose(node.ring - 1, node_id, node)

    # -- queues ------------------------------------------------------------------------------

    cdef void join(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        self.positions[node_id] = queue.next_position
        queue.next_position += 1
        ring_append(self.table, queue, node_id, node)

    cdef void renew(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        if node.flags & PARKED:
            self.c_returning(node_id)
        self.positions[node_id] = queue.next_position
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
                and self.positions[self.last_put_back] > position
            ):
                following = self.last_put_back
                before = node_at(self.table, following).prev
        while before != NIL and self.positions[before] > position:
            following = before
            before = node_at(self.table, before).prev
        self.positions[node_id] = position
        ring_put_before(self.table, queue, node_id, node, following)
        self.last_put_back = node_id

    cdef uint32_t scan(self, int queue_index, uint32_t* rest) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        cdef uint32_t node_id = rest[0]
        cdef uint64_t position = BEYOND_ALL if node_id == NIL else self.positions[node_id]
        cdef uint32_t returning = ring_unlist_before(self.table, queue, position)
        cdef Node* node
        if returning != NIL:
            node = node_at(self.table, returning)
            self.c_returning(returning)
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
        ring_park_as(self.table, queue, node, self.positions[node_id])
        return True

    cdef bint skip(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        if not self.victims.managed or node.block.ref_cnt == 0 and not node.flags & CHOSEN:
            return True
        return self.park(queue_index, node_id, node)

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
                key=[self.positions[node_id] for node_id in range(self.table.num_used)].__getitem__
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
                position = self.positions[node_id]
                if position >= queue.next_position:
                    return b"positions were given out"
                if node.next != NIL and self.positions[node.next] <= position:
                    return b"a queue is in the order of its positions"
                node_id = node.next
            for node_id in range(self.table.num_used):
                node = node_at(self.table, node_id)
                if node.ring == queue.id and node.flags & PARKED:
                    if self.positions[node_id] != parking_position(node):
                        return b"a block is parked under its position"
                    # Once the manager is gone, anyone may write to the statuses.
                    if (
                        not self.was_owned
                        and node.block.ref_cnt == 0
                        and not node.flags & LISTED
                        and not self.c_waits(node_id)
                    ):
                        return b"a parked block is in use, waits for others, or is listed"
        return NULL

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
            node_at(self.table, self.victims.items[index].node_id).flags &= <uint8_t>(
                ~CHOSEN & 0xFF
            )
        self.c_undo()
        for index in range(self.num_chosen):
            node_id = self.victims.items[index].node_id
            node = node_at(self.table, node_id)
            if node.flags & PARKED:
                ring_list(self.table, &self.rings[node.ring - 1], node_id, node)
        self.num_chosen = 0

    cdef void c_clear(self) noexcept:
        self.searching = False

    cdef bint c_sift(self, uint64_t n) noexcept:
        return False

    cdef void c_undo(self) noexcept:
        pass

    cdef void c_returning(self, uint32_t node_id) noexcept:
        pass

    cdef bint c_waits(self, uint32_t node_id) noexcept:
        return False
