"""LRU with uses counted per request, as in vLLM: the policy.

A request takes one provisional rank, which its chunks share, newest position first; when it
finishes, the chunks that it used get new ranks, tail first. The order is (rank, reverse position,
key). If no request takes a rank, as before vLLM 0.33, this is plain LRU.

Nodes can join the order in its middle, and it returns the oldest node that may leave.

Structure
    ``log`` holds node ids in order of rank; a rank is an index into it, counted from ``first``. A
    node that moves is appended again and its older entry is stale: the entry of rank r is live if
    its node is IN_LOG with rank r. An entry may name a *group* instead: the nodes that a running
    request has ranked provisionally, linked through ``prev`` and ``next``; more may join at any
    time, and inside a group the order is (reverse position, key).
    ``heap`` holds idle nodes that the front of the log has passed, by (rank, reverse position,
    key).
Invariants
    Every node in the heap is older than every node in the log: the front only advances, and a node
    of a passed rank enters the heap when it is (again) idle. A node that was passed over because it
    was pinned or pending is NOWHERE and PARKED, and costs nothing. So *heap, then log* is the order
    in which a scan that started over would find the idle nodes.
Cost
    O(1) for everything, O(log heap) for nodes that return behind the front; 16 bytes per node, and
    4 bytes per entry of the log, which is compacted when it is full and grows if half is live.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from kvoffload._core.batch cimport Batch
from kvoffload._core.memory cimport discard, resize
from kvoffload._core.table cimport (
    CHOSEN,
    NIL,
    PARKED,
    RESIDENT,
    Node,
    Table,
    drop_hashed_key,
    hash_ahead,
    key_bytes,
    kvo_prefetch,
    node_at,
)
from kvoffload._core.victims cimport Victim, victims_ensure, victims_take
from kvoffload.policies._released_c cimport released_remove
from kvoffload.policies._twin_c cimport CompiledPolicy, key_of

cdef extern from *:
    """
    #define KVO_GROUP 0x80000000u
    """
    const uint32_t GROUP "KVO_GROUP"  # marks an entry of the log that names a group

# The place of a node, in Node.note.
cdef enum:
    NOWHERE = 0
    IN_LOG = 1
    IN_GROUP = 2
    IN_HEAP = 3

cdef enum:
    SMALLEST = 64
    AHEAD = 8           # entries of the log that a scan prefetches


# -- the order: places of nodes --------------------------------------------------------------------


cdef inline bint is_older(Order* order, uint32_t left, uint32_t right) noexcept nogil:
    cdef Rank* one = order.ranks + left
    cdef Rank* other = order.ranks + right
    cdef const uint8_t* left_key
    cdef const uint8_t* right_key
    cdef uint64_t left_length, right_length
    cdef int difference
    if one.rank != other.rank:
        return one.rank < other.rank
    if one.reverse_position != other.reverse_position:
        return one.reverse_position < other.reverse_position
    left_key = key_bytes(node_at(order.table, left), &left_length)
    right_key = key_bytes(node_at(order.table, right), &right_length)
    difference = memcmp(left_key, right_key, min(left_length, right_length))
    return difference < 0 if difference else left_length < right_length


cdef inline void heap_put(Order* order, uint64_t index, uint32_t node_id) noexcept nogil:
    order.heap[index] = node_id
    order.ranks[node_id].heap_index = <uint32_t>index


cdef inline void heap_rise(Order* order, uint64_t index, uint32_t node_id) noexcept nogil:
    cdef uint64_t parent
    while index:
        parent = (index - 1) // 2
        if not is_older(order, node_id, order.heap[parent]):
            break
        heap_put(order, index, order.heap[parent])
        index = parent
    heap_put(order, index, node_id)


cdef inline void heap_push(Order* order, uint32_t node_id) noexcept nogil:
    """Add an idle node that is NOWHERE; room was made by `order_ensure`."""
    cdef Node* node = node_at(order.table, node_id)
    node.note = IN_HEAP
    node.flags &= <uint8_t>(~PARKED & 0xFF)
    order.heap_size += 1
    heap_rise(order, order.heap_size - 1, node_id)


cdef inline void heap_remove(Order* order, uint32_t node_id) noexcept nogil:
    cdef uint64_t index = order.ranks[node_id].heap_index
    cdef uint64_t child
    cdef uint32_t moved
    node_at(order.table, node_id).note = NOWHERE
    order.heap_size -= 1
    if index == order.heap_size:
        return
    moved = order.heap[order.heap_size]
    while True:
        child = 2 * index + 1
        if child >= order.heap_size:
            break
        if child + 1 < order.heap_size and is_older(
            order, order.heap[child + 1], order.heap[child]
        ):
            child += 1
        if not is_older(order, order.heap[child], moved):
            break
        heap_put(order, index, order.heap[child])
        index = child
    heap_rise(order, index, moved)


cdef inline bint is_passed(const Order* order, uint64_t rank) noexcept nogil:
    return rank < order.first + order.head


cdef inline void group_give(Order* order, uint32_t group_id) noexcept nogil:
    order.groups[group_id].member = order.free_group
    order.free_group = group_id


cdef inline uint32_t group_open(Order* order) noexcept nogil:
    """Take the next rank for a request; room was made by `order_ensure`."""
    cdef uint32_t group_id = order.free_group
    if group_id != NIL:
        order.free_group = order.groups[group_id].member
    else:
        group_id = order.groups_size
        order.groups_size += 1
    order.groups[group_id].rank = order.first + order.size
    order.groups[group_id].member = NIL
    order.groups[group_id].held = True
    order.log[order.size] = GROUP | group_id
    order.size += 1
    return group_id


cdef inline void group_release(Order* order, uint32_t group_id) noexcept nogil:
    """End the reference of a request to a group, whose members keep their rank."""
    order.groups[group_id].held = False
    if is_passed(order, order.groups[group_id].rank):
        group_give(order, group_id)  # otherwise when the front reaches it


cdef inline void group_unlink(Order* order, Node* node, uint64_t rank) noexcept nogil:
    if node.next != NIL:
        node_at(order.table, node.next).prev = node.prev
    if node.prev != NIL:
        node_at(order.table, node.prev).next = node.next
    else:
        order.groups[order.log[rank - order.first] & ~GROUP].member = node.next


cdef inline void order_leave(Order* order, uint32_t node_id, Node* node) noexcept nogil:
    """Take a node from its place."""
    if node.note == IN_HEAP:
        heap_remove(order, node_id)
    elif node.note == IN_GROUP:
        group_unlink(order, node, order.ranks[node_id].rank)
    node.note = NOWHERE
    node.flags &= <uint8_t>(~PARKED & 0xFF)


cdef inline void park(Node* node) noexcept nogil:
    """Pass over a node in use, which returns when it is idle."""
    node.note = NOWHERE
    node.flags |= PARKED


cdef inline void order_append(Order* order, uint32_t node_id, Node* node) noexcept nogil:
    """Make a node that is NOWHERE the newest; room was made by `order_ensure`."""
    order.ranks[node_id].rank = order.first + order.size
    order.ranks[node_id].reverse_position = 0
    node.note = IN_LOG
    order.log[order.size] = node_id
    order.size += 1


cdef inline void order_join(
    Order* order, uint32_t node_id, Node* node, uint32_t group_id, int32_t reverse_position
) noexcept nogil:
    """Give a node that is NOWHERE the provisional rank of a group."""
    cdef Group* group = order.groups + group_id
    order.ranks[node_id].rank = group.rank
    order.ranks[node_id].reverse_position = reverse_position
    if is_passed(order, group.rank):
        if node.block.ref_cnt == 0:
            heap_push(order, node_id)
        else:
            park(node)
        return
    node.note = IN_GROUP
    node.prev = NIL
    node.next = group.member
    if group.member != NIL:
        node_at(order.table, group.member).prev = node_id
    group.member = node_id


cdef inline void order_idle(Order* order, uint32_t node_id, Node* node) noexcept nogil:
    """Handle a node that has become idle, or is idle and no longer protected."""
    if node.note == NOWHERE:
        heap_push(order, node_id)


cdef void order_open(Order* order, Table* table) noexcept:
    memset(order, 0, sizeof(Order))
    order.table = table
    order.first = 1
    order.free_group = NIL
    order.aside = NIL


cdef void order_close(Order* order) noexcept:
    discard(order.ranks)
    discard(order.log)
    discard(order.heap)
    discard(order.groups)
    order_open(order, order.table)


cdef inline bint is_live(Order* order, uint64_t index) noexcept nogil:
    cdef uint32_t node_id = order.log[index]
    return (
        order.ranks[node_id].rank == order.first + index
        and node_at(order.table, node_id).note == IN_LOG
    )


cdef void compact(Order* order) noexcept nogil:
    """Drop stale entries and renumber the others from the rank of the front on."""
    cdef uint64_t kept = 0, index
    cdef uint64_t first = order.first + order.head
    cdef uint32_t entry, node_id
    cdef Group* group
    for index in range(order.head, order.size):
        entry = order.log[index]
        if entry & GROUP:
            group = order.groups + (entry & ~GROUP)
            if group.member == NIL and not group.held:
                group_give(order, entry & ~GROUP)
                continue
            group.rank = first + kept
            node_id = group.member
            while node_id != NIL:
                order.ranks[node_id].rank = group.rank
                node_id = node_at(order.table, node_id).next
        elif is_live(order, index):
            order.ranks[entry].rank = first + kept
        else:
            continue
        order.log[kept] = entry
        kept += 1
    order.first = first
    order.head = 0
    order.size = kept


cdef bint grow(void** array, uint64_t* room, uint64_t wanted, uint64_t item_bytes) noexcept:
    cdef uint64_t larger
    cdef void* grown
    if wanted <= room[0]:
        return True
    larger = max(wanted, room[0] + room[0] // 2, <uint64_t>SMALLEST)
    grown = resize(array[0], larger * item_bytes)
    if grown == NULL:
        return False
    array[0] = grown
    room[0] = larger
    return True


cdef bint order_ensure(Order* order, uint64_t entries, uint64_t idle) noexcept:
    cdef uint64_t groups_room = order.groups_room
    cdef bint done
    if order.size + entries > order.room:
        compact(order)
        if 2 * (order.size + entries) > order.room and not grow(
            <void**>&order.log, &order.room, 2 * (order.size + entries), sizeof(uint32_t)
        ):
            return False
    if order.free_group == NIL and order.groups_size == order.groups_room:
        done = grow(
            <void**>&order.groups, &groups_room, <uint64_t>order.groups_size + 1, sizeof(Group)
        )
        order.groups_room = <uint32_t>groups_room
        if not done:
            return False
    return grow(
        <void**>&order.ranks, &order.ranks_room, order.table.num_ready, sizeof(Rank)
    ) and grow(<void**>&order.heap, &order.heap_room, idle, sizeof(uint32_t))


cdef inline bint may_leave(Order* order, uint32_t node_id) noexcept nogil:
    """Return whether a node that has just been passed may leave."""
    cdef Node* node = node_at(order.table, node_id)
    if node.flags & CHOSEN:
        return False  # a victim already
    if node.block.ref_cnt != 0:
        park(node)
        return False
    if node.block.mark != order.table.epoch:
        return True
    node.next = order.aside
    order.aside = node_id
    return False


cdef void order_settle(Order* order) noexcept nogil:
    cdef uint32_t node_id = order.aside
    cdef uint32_t following
    while node_id != NIL:
        following = node_at(order.table, node_id).next
        heap_push(order, node_id)
        node_id = following
    order.aside = NIL


cdef void pass_group(Order* order, uint32_t group_id) noexcept nogil:
    """Move the front past a group, whose idle members enter the heap."""
    cdef uint32_t node_id = order.groups[group_id].member
    cdef Node* node
    order.groups[group_id].member = NIL
    while node_id != NIL:
        node = node_at(order.table, node_id)
        node.note = NOWHERE
        if node.block.ref_cnt == 0:
            heap_push(order, node_id)
        else:
            park(node)
        node_id = node.next
    if not order.groups[group_id].held:
        group_give(order, group_id)


cdef uint32_t order_take(Order* order) noexcept nogil:
    cdef uint32_t node_id, entry
    while True:
        while order.heap_size:
            node_id = order.heap[0]
            heap_remove(order, node_id)
            if may_leave(order, node_id):
                return node_id
        if order.head == order.size:
            return NIL
        if order.head + AHEAD < order.size:
            entry = order.log[order.head + AHEAD]
            if not entry & GROUP:
                kvo_prefetch(order.ranks + entry)
                kvo_prefetch(node_at(order.table, entry))
        entry = order.log[order.head]
        if entry & GROUP:
            order.head += 1
            pass_group(order, entry & ~GROUP)
        elif is_live(order, order.head):
            order.head += 1
            node_at(order.table, entry).note = NOWHERE
            if may_leave(order, entry):
                return entry
        else:
            order.head += 1


cdef list order_node_ids(Order* order):
    cdef list found = []
    cdef uint32_t node_id
    cdef uint64_t length
    cdef const uint8_t* key
    cdef Node* node
    for node_id in range(order.table.num_used):
        node = node_at(order.table, node_id)
        if node.flags & RESIDENT:
            key = key_bytes(node, &length)
            found.append((
                order.ranks[node_id].rank,
                order.ranks[node_id].reverse_position,
                <bytes>(<const char*>key)[:length],
                node_id,
            ))
    found.sort()
    return [entry[3] for entry in found]


cdef const char* order_check(Order* order) noexcept:
    cdef uint64_t index, live = 0, linked = 0, standing = 0
    cdef uint32_t node_id, before, entry
    cdef Node* node
    for index in range(order.heap_size):
        node_id = order.heap[index]
        node = node_at(order.table, node_id)
        if node.note != IN_HEAP or order.ranks[node_id].heap_index != index:
            return b"a node in the heap knows its index"
        if not is_passed(order, order.ranks[node_id].rank):
            return b"the heap is older than the log"
        if index and is_older(order, node_id, order.heap[(index - 1) // 2]):
            return b"the heap is ordered"
    for index in range(order.head, order.size):
        entry = order.log[index]
        if not entry & GROUP:
            live += is_live(order, index)
            continue
        if order.groups[entry & ~GROUP].rank != order.first + index:
            return b"a group's rank is its index in the log"
        node_id = order.groups[entry & ~GROUP].member
        before = NIL
        while node_id != NIL:
            node = node_at(order.table, node_id)
            if node.note != IN_GROUP or node.prev != before:
                return b"the links of a group agree in both directions"
            if order.ranks[node_id].rank != order.first + index:
                return b"the members of a group have its rank"
            linked += 1
            before = node_id
            node_id = node.next
    for node_id in range(order.table.num_used):
        node = node_at(order.table, node_id)
        if not node.flags & RESIDENT:
            if node.note != NOWHERE:
                return b"only resident nodes stand in the order"
            continue
        standing += node.note != NOWHERE
        if node.note == NOWHERE and node.block.ref_cnt == 0:
            return b"every idle node stands in the order"
        if (node.note == NOWHERE) != (node.flags & PARKED != 0):
            return b"a node that is passed over is parked"
    if standing != live + linked + order.heap_size:
        return b"every node stands in one place"
    return NULL


# -- the policy ------------------------------------------------------------------------------------


cdef class RankedLRU(CompiledPolicy):
    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 1, 0)
        self.victims.managed = True
        order_close(&self.order)
        order_open(&self.order, &self.storage.table)
        self.generation += 1
        self.publish()

    def __dealloc__(self):
        order_close(&self.order)

    def _keys(self):
        """Return the resident keys, oldest first."""
        self.require_ready()
        return [key_of(node_at(self.table, node_id)) for node_id in order_node_ids(&self.order)]

    # -- moves -------------------------------------------------------------------------------

    cdef bint ensure_moves(self, uint64_t entries) noexcept:
        # Besides the moves, a request may take a rank.
        return order_ensure(&self.order, entries + 1, self.table.num_keys)

    cdef void renew(self, uint32_t node_id, Node* node) noexcept:
        released_remove(&self.released, node_id)
        order_leave(&self.order, node_id, node)
        order_append(&self.order, node_id, node)

    cdef void raise_to(
        self, uint32_t node_id, Node* node, uint32_t group, int32_t reverse_position
    ) noexcept:
        cdef uint64_t rank = self.order.groups[group].rank
        if self.order.ranks[node_id].rank > rank or (
            self.order.ranks[node_id].rank == rank
            and self.order.ranks[node_id].reverse_position >= reverse_position
        ):
            return
        released_remove(&self.released, node_id)
        order_leave(&self.order, node_id, node)
        order_join(&self.order, node_id, node, group, reverse_position)

    cdef void join(
        self, uint32_t node_id, Node* node, uint32_t group, int32_t reverse_position
    ) noexcept:
        order_join(&self.order, node_id, node, group, reverse_position)

    cdef uint32_t open_group(self) noexcept:
        return group_open(&self.order)

    cdef void close_group(self, uint64_t generation, uint32_t group) noexcept:
        if generation == self.generation:
            group_release(&self.order, group)

    # -- the steps of a policy ---------------------------------------------------------------

    cdef bint c_ensure(self, uint64_t more) noexcept:
        # Each new node makes a move, and each may enter the heap later.
        return CompiledPolicy.c_ensure(self, more) and order_ensure(
            &self.order, more + 1, self.table.num_keys + more
        )

    cdef void c_touch(self, Batch* batch) noexcept:
        # Without memory for the log the order stays as it is.
        cdef Py_ssize_t index
        if not self.ensure_moves(<uint64_t>batch.size):
            return
        for index in range(batch.size - 1, -1, -1):
            if batch.node_ids[index] != NIL:
                self.renew(batch.node_ids[index], node_at(self.table, batch.node_ids[index]))

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        order_append(&self.order, node_id, node)

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef Victim* victim
        cdef uint32_t node_id
        if not victims_ensure(&self.victims, n, 0):
            self.victims.no_memory = True
            return False
        if not self.take_released(n):
            self.cancel()
            return False
        while self.victims.size < n:
            node_id = order_take(&self.order)
            if node_id == NIL:
                self.cancel()
                return False
            if victims_take(&self.victims, self.table, NULL, node_id):  # room was made
                victim = &self.victims.items[self.victims.size - 1]
                victim.hashed = hash_ahead(self.table, node_at(self.table, node_id))
        return True

    cdef void cancel(self) noexcept:
        """End a search and give the victims back at the positions where a scan would find them
        again."""
        cdef uint64_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(self.victims.size):
            node_id = self.victims.items[index].node_id
            node = node_at(self.table, node_id)
            node.flags &= <uint8_t>(~CHOSEN & 0xFF)
            if node.note == NOWHERE:
                order_idle(&self.order, node_id, node)
        self.victims.size = 0
        order_settle(&self.order)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, victim.hashed)

    cdef void c_settled(self) noexcept:
        order_settle(&self.order)

    cdef void take_off(self, uint32_t node_id, Node* node) noexcept:
        released_remove(&self.released, node_id)
        order_leave(&self.order, node_id, node)
        self.num_resident -= 1

    cdef void became_idle(self, uint32_t node_id, Node* node) noexcept:
        order_idle(&self.order, node_id, node)

    cdef void c_clear(self) noexcept:
        order_close(&self.order)
        self.generation += 1

    cdef const char* c_check(self) noexcept:
        return order_check(&self.order)
