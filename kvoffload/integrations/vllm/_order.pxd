"""An order of recency that has room in its middle, and gives the oldest node that may leave.

Structure
    ``log`` holds slots in order of rank; a rank is an index into it, counted from ``first``. A node
    that moves is appended again and its older entry is stale: the entry of rank r is live if its
    node is IN_LOG with rank r. An entry may name a *group* instead: the nodes that a running
    request has ranked provisionally, linked through ``prev`` and ``next``; more may join at any
    time, and inside a group the order is (reverse position, key).
    ``heap`` holds idle nodes that the front of the log has passed, by (rank, reverse position,
    key).
Invariants
    Whatever is in the heap is older than whatever is in the log: the front only moves on, and a
    node of a rank that it has passed enters the heap when it is (again) idle. A node that it
    passed over because it was pinned, pending or protected is NOWHERE, and costs nothing.
    So *heap, then log* is the order in which a scan that started over would find the idle nodes.
Cost
    O(1) for everything, O(log heap) for nodes that return behind the front; 16 bytes a node, and
    4 bytes an entry of the log, which is compacted when it is full and grows if half is live.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from kvoffload._core.table cimport NIL, Node, Table, key_bytes, node_at

cdef extern from *:
    """
    #define KVO_GROUP 0x80000000u
    """
    const uint32_t GROUP "KVO_GROUP"  # marks an entry of the log that names a group

# Where a node stands; kept in Node.note.
cdef enum:
    NOWHERE = 0
    IN_LOG = 1
    IN_GROUP = 2
    IN_HEAP = 3

cdef struct Rank:
    uint64_t rank               # greater is newer; shared by the nodes of a group
    int32_t reverse_position    # minus the token position; 0 where the rank is the node's own
    uint32_t heap_place         # IN_HEAP: index in the heap

cdef struct Group:
    uint64_t rank
    uint32_t member             # the node linked last, NIL if none; free: the next free group
    bint held                   # a request still refers to it

cdef struct Order:
    Table* table
    Rank* ranks                 # by slot
    uint64_t ranks_room
    uint64_t first              # rank of log[0]
    uint32_t* log               # slot, or GROUP | number of a group
    uint64_t head               # entries before it are passed
    uint64_t size
    uint64_t room
    uint32_t* heap
    uint64_t heap_size
    uint64_t heap_room
    Group* groups
    uint32_t groups_size
    uint32_t groups_room
    uint32_t free_group         # stack of groups to use again
    uint32_t aside              # idle nodes passed over as protected, linked through ``next``

cdef void order_open(Order* order, Table* table) noexcept
cdef void order_close(Order* order) noexcept
# Make room for `entries` of the log, one group, and all nodes of the table in ranks and heap;
# False, with nothing lost, if there is no memory.
cdef bint order_ensure(Order* order, uint64_t entries, uint64_t idle) noexcept
# Take the oldest node that is idle and not of the table's epoch; NIL if there is none. Such nodes
# that were passed over stand aside until `order_settle`.
cdef uint32_t order_take(Order* order) noexcept nogil
cdef void order_settle(Order* order) noexcept nogil
# Slots of the resident nodes, oldest first.
cdef list order_slots(Order* order)
# Verify the invariants; return the broken one, or NULL.
cdef const char* order_check(Order* order) noexcept


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


cdef inline void heap_put(Order* order, uint64_t place, uint32_t slot) noexcept nogil:
    order.heap[place] = slot
    order.ranks[slot].heap_place = <uint32_t>place


cdef inline void heap_rise(Order* order, uint64_t place, uint32_t slot) noexcept nogil:
    cdef uint64_t parent
    while place:
        parent = (place - 1) // 2
        if not is_older(order, slot, order.heap[parent]):
            break
        heap_put(order, place, order.heap[parent])
        place = parent
    heap_put(order, place, slot)


cdef inline void heap_push(Order* order, uint32_t slot) noexcept nogil:
    """Add an idle node that is NOWHERE; room was made by `order_ensure`."""
    node_at(order.table, slot).note = IN_HEAP
    order.heap_size += 1
    heap_rise(order, order.heap_size - 1, slot)


cdef inline void heap_remove(Order* order, uint32_t slot) noexcept nogil:
    cdef uint64_t place = order.ranks[slot].heap_place
    cdef uint64_t child
    cdef uint32_t moved
    node_at(order.table, slot).note = NOWHERE
    order.heap_size -= 1
    if place == order.heap_size:
        return
    moved = order.heap[order.heap_size]
    while True:
        child = 2 * place + 1
        if child >= order.heap_size:
            break
        if child + 1 < order.heap_size and is_older(
            order, order.heap[child + 1], order.heap[child]
        ):
            child += 1
        if not is_older(order, order.heap[child], moved):
            break
        heap_put(order, place, order.heap[child])
        place = child
    heap_rise(order, place, moved)


cdef inline bint is_passed(const Order* order, uint64_t rank) noexcept nogil:
    return rank < order.first + order.head


cdef inline void group_give(Order* order, uint32_t number) noexcept nogil:
    order.groups[number].member = order.free_group
    order.free_group = number


cdef inline uint32_t group_open(Order* order) noexcept nogil:
    """Take the next rank for a request; room was made by `order_ensure`."""
    cdef uint32_t number = order.free_group
    if number != NIL:
        order.free_group = order.groups[number].member
    else:
        number = order.groups_size
        order.groups_size += 1
    order.groups[number].rank = order.first + order.size
    order.groups[number].member = NIL
    order.groups[number].held = True
    order.log[order.size] = GROUP | number
    order.size += 1
    return number


cdef inline void group_release(Order* order, uint32_t number) noexcept nogil:
    """Say that no request refers to the group any more; its members keep their rank."""
    order.groups[number].held = False
    if is_passed(order, order.groups[number].rank):
        group_give(order, number)  # otherwise when the front gets there


cdef inline void group_unlink(Order* order, Node* node, uint64_t rank) noexcept nogil:
    if node.next != NIL:
        node_at(order.table, node.next).prev = node.prev
    if node.prev != NIL:
        node_at(order.table, node.prev).next = node.next
    else:
        order.groups[order.log[rank - order.first] & ~GROUP].member = node.next


cdef inline void order_leave(Order* order, uint32_t slot, Node* node) noexcept nogil:
    """Take a node out of wherever it stands."""
    if node.note == IN_HEAP:
        heap_remove(order, slot)
    elif node.note == IN_GROUP:
        group_unlink(order, node, order.ranks[slot].rank)
    node.note = NOWHERE


cdef inline void order_append(Order* order, uint32_t slot, Node* node) noexcept nogil:
    """Make a node that is NOWHERE the newest; room was made by `order_ensure`."""
    order.ranks[slot].rank = order.first + order.size
    order.ranks[slot].reverse_position = 0
    node.note = IN_LOG
    order.log[order.size] = slot
    order.size += 1


cdef inline void order_join(
    Order* order, uint32_t slot, Node* node, uint32_t number, int32_t reverse_position
) noexcept nogil:
    """Give a node that is NOWHERE the provisional rank of a group."""
    cdef Group* group = order.groups + number
    order.ranks[slot].rank = group.rank
    order.ranks[slot].reverse_position = reverse_position
    if is_passed(order, group.rank):
        if node.block.ref_cnt == 0:
            heap_push(order, slot)
        return
    node.note = IN_GROUP
    node.prev = NIL
    node.next = group.member
    if group.member != NIL:
        node_at(order.table, group.member).prev = slot
    group.member = slot


cdef inline void order_idle(Order* order, uint32_t slot, Node* node) noexcept nogil:
    """Say that a node has become idle, or is idle and not protected any more."""
    if node.note == NOWHERE:
        heap_push(order, slot)
