"""The parts of the order that are not inlined; see ``_order.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport discard, resize
from kvoffload._core.table cimport RESIDENT, kvo_prefetch

cdef enum:
    SMALLEST = 64
    AHEAD = 8           # entries of the log that a scan prefetches


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


cdef inline bint is_live(Order* order, uint64_t place) noexcept nogil:
    cdef uint32_t slot = order.log[place]
    return (
        order.ranks[slot].rank == order.first + place
        and node_at(order.table, slot).note == IN_LOG
    )


cdef void compact(Order* order) noexcept nogil:
    """Drop stale entries and number the others anew, from the rank of the front on."""
    cdef uint64_t kept = 0, place
    cdef uint64_t first = order.first + order.head
    cdef uint32_t entry, slot
    cdef Group* group
    for place in range(order.head, order.size):
        entry = order.log[place]
        if entry & GROUP:
            group = order.groups + (entry & ~GROUP)
            if group.member == NIL and not group.held:
                group_give(order, entry & ~GROUP)
                continue
            group.rank = first + kept
            slot = group.member
            while slot != NIL:
                order.ranks[slot].rank = group.rank
                slot = node_at(order.table, slot).next
        elif is_live(order, place):
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


cdef inline bint may_leave(Order* order, uint32_t slot) noexcept nogil:
    """Tell whether a node that has just been passed may leave."""
    cdef Node* node = node_at(order.table, slot)
    if node.block.ref_cnt != 0:
        return False
    if node.block.mark != order.table.epoch:
        return True
    node.next = order.aside
    order.aside = slot
    return False


cdef void order_settle(Order* order) noexcept nogil:
    cdef uint32_t slot = order.aside
    cdef uint32_t following
    while slot != NIL:
        following = node_at(order.table, slot).next
        heap_push(order, slot)
        slot = following
    order.aside = NIL


cdef void pass_group(Order* order, uint32_t number) noexcept nogil:
    """Let the front pass a group: its idle members go to the heap."""
    cdef uint32_t slot = order.groups[number].member
    cdef Node* node
    order.groups[number].member = NIL
    while slot != NIL:
        node = node_at(order.table, slot)
        node.note = NOWHERE
        if node.block.ref_cnt == 0:
            heap_push(order, slot)
        slot = node.next
    if not order.groups[number].held:
        group_give(order, number)


cdef uint32_t order_take(Order* order) noexcept nogil:
    cdef uint32_t slot, entry
    while True:
        while order.heap_size:
            slot = order.heap[0]
            heap_remove(order, slot)
            if may_leave(order, slot):
                return slot
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


cdef list order_slots(Order* order):
    cdef list found = []
    cdef uint32_t slot
    cdef uint64_t length
    cdef const uint8_t* key
    cdef Node* node
    for slot in range(order.table.num_used):
        node = node_at(order.table, slot)
        if node.flags & RESIDENT:
            key = key_bytes(node, &length)
            found.append((
                order.ranks[slot].rank,
                order.ranks[slot].reverse_position,
                <bytes>(<const char*>key)[:length],
                slot,
            ))
    found.sort()
    return [entry[3] for entry in found]


cdef const char* order_check(Order* order) noexcept:
    cdef uint64_t place, live = 0, linked = 0, standing = 0
    cdef uint32_t slot, before, entry
    cdef Node* node
    for place in range(order.heap_size):
        slot = order.heap[place]
        node = node_at(order.table, slot)
        if node.note != IN_HEAP or order.ranks[slot].heap_place != place:
            return b"a node in the heap knows its place"
        if not is_passed(order, order.ranks[slot].rank):
            return b"the heap is older than the log"
        if place and is_older(order, slot, order.heap[(place - 1) // 2]):
            return b"the heap is ordered"
    for place in range(order.head, order.size):
        entry = order.log[place]
        if not entry & GROUP:
            live += is_live(order, place)
            continue
        if order.groups[entry & ~GROUP].rank != order.first + place:
            return b"a group's rank is its place in the log"
        slot = order.groups[entry & ~GROUP].member
        before = NIL
        while slot != NIL:
            node = node_at(order.table, slot)
            if node.note != IN_GROUP or node.prev != before:
                return b"the links of a group agree in both directions"
            if order.ranks[slot].rank != order.first + place:
                return b"the members of a group have its rank"
            linked += 1
            before = slot
            slot = node.next
    for slot in range(order.table.num_used):
        node = node_at(order.table, slot)
        if not node.flags & RESIDENT:
            if node.note != NOWHERE:
                return b"only resident nodes stand in the order"
            continue
        standing += node.note != NOWHERE
        if node.note == NOWHERE and node.block.ref_cnt == 0:
            return b"every idle node stands in the order"
    if standing != live + linked + order.heap_size:
        return b"every node stands in one place"
    return NULL
