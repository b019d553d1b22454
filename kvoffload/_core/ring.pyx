"""The parts of rings that are not on the fast path; see ``ring.pxd``."""

from libc.string cimport memset

from kvoffload._core.heap cimport (
    SMALLEST_HEAP,
    Entry,
    heap_grow,
    heap_is_ordered,
    heap_order,
    heap_pop,
    heap_push,
)
from kvoffload._core.memory cimport discard


cdef void ring_open(Ring* ring, uint8_t ring_id) noexcept:
    memset(ring, 0, sizeof(Ring))
    ring.oldest = NIL
    ring.newest = NIL
    ring.id = ring_id


cdef void ring_close(Ring* ring) noexcept:
    discard(ring.listed.entries)
    ring.listed.entries = NULL


cdef void ring_clear(Ring* ring) noexcept:
    cdef Ring former = ring[0]
    ring_close(ring)
    ring_open(ring, former.id)
    ring.note = former.note
    ring.note_mask = former.note_mask


cdef inline uint64_t ample_room(const Ring* ring) noexcept:
    """Return twice the entries that the heap needs for the parked nodes and one more."""
    return max(<uint64_t>SMALLEST_HEAP, 4 * (ring.num_parked + 1))


cdef bint ring_grow_heap(Ring* ring) noexcept:
    return heap_grow(&ring.listed, ring.listed.size, ample_room(ring))


cdef void ring_park_in_use(Table* table, Ring* ring, uint64_t most) noexcept:
    cdef Node* node
    while most and ring.oldest != NIL:
        node = node_at(table, ring.oldest)
        if node.block.ref_cnt == 0 or not ring_ensure_parking(ring):
            break
        ring_fetch_ahead(table, ring.oldest, node.next)
        ring_park(table, ring, node)
        most -= 1


cdef inline bint alive(Table* table, Ring* ring, const Entry* entry) noexcept:
    cdef Node* node = node_at(table, entry.node_id)
    return (
        (node.flags & LISTED) != 0
        and is_on_ring(ring, node)
        and parking_position(node) == entry.position
    )


cdef void drop_dead(Table* table, Ring* ring) noexcept:
    """Rebuild the heap from the entries that are alive, one per listed node."""
    cdef Entry* entries = ring.listed.entries
    cdef uint64_t kept = 0, index
    for index in range(ring.listed.size):
        if alive(table, ring, &entries[index]):
            node_at(table, entries[index].node_id).flags &= <uint8_t>(~LISTED & 0xFF)  # only once
            entries[kept] = entries[index]
            kept += 1
    for index in range(kept):
        node_at(table, entries[index].node_id).flags |= LISTED
    ring.listed.size = kept
    heap_order(&ring.listed)


cdef void ring_list(Table* table, Ring* ring, uint32_t node_id, Node* node) noexcept:
    if node.flags & LISTED:
        return
    # The heap has more room if more nodes were parked before.
    if ring.listed.size >= min(ring.listed.room, ample_room(ring)):
        drop_dead(table, ring)
    heap_push(&ring.listed, Entry(position=parking_position(node), rank=0, node_id=node_id))
    node.flags |= LISTED
    ring.num_listed += 1


cdef uint32_t pop(Table* table, Ring* ring) noexcept:
    """Remove the first entry; return its node, NIL if it is dead."""
    cdef Entry first = heap_pop(&ring.listed)
    if not alive(table, ring, &first):
        return NIL
    node_at(table, first.node_id).flags &= <uint8_t>(~LISTED & 0xFF)
    ring.num_listed -= 1
    return first.node_id


cdef uint32_t ring_unlist(Table* table, Ring* ring) noexcept:
    cdef uint32_t node_id
    while ring.num_listed:
        node_id = pop(table, ring)
        if node_id != NIL:
            return node_id
    ring.listed.size = 0
    return NIL


cdef uint32_t ring_unlist_before(Table* table, Ring* ring, uint64_t position) noexcept:
    cdef uint64_t start = ring.listed.start
    cdef uint32_t node_id
    if ring.num_listed == 0:
        ring.listed.size = 0
    while ring.listed.size and ring.listed.entries[0].position - start < position - start:
        node_id = pop(table, ring)
        if node_id != NIL:
            return node_id
    return NIL


cdef Py_ssize_t ring_turn(
    Table* table, Ring* ring, const uint32_t* node_ids, Py_ssize_t index
) noexcept nogil:
    cdef uint32_t first_id = node_ids[index]
    cdef Node* first = node_at(table, first_id)
    cdef Node* last = first
    cdef uint32_t before = first.prev
    while index and before != NIL and before == node_ids[index - 1]:
        last.next = before
        last = node_at(table, before)
        before = last.prev
        last.prev = node_ids[index]
        index -= 1
    first.prev = before
    if before == NIL:
        ring.oldest = first_id
    else:
        node_at(table, before).next = first_id
    last.next = NIL
    ring.newest = node_ids[index]
    return index


cdef void ring_start_at(Table* table, Ring* ring, uint64_t position) noexcept:
    if ring.listed.start != position:
        ring.listed.start = position
        drop_dead(table, ring)


cdef list ring_node_ids(Table* table, Ring* ring):
    cdef uint32_t node_id
    cdef Node* node
    cdef list parked = []
    cdef list node_ids
    if ring.num_parked:
        for node_id in range(table.num_used):
            node = node_at(table, node_id)
            if node.flags & PARKED and is_on_ring(ring, node):
                parked.append((parking_position(node), node_id))
        parked.sort()
    node_ids = [pair[1] for pair in parked]
    node_id = ring.oldest
    while node_id != NIL:
        node_ids.append(node_id)
        node_id = node_at(table, node_id).next
    return node_ids


cdef int ring_unpark(Table* table, Ring* ring, list node_ids) except -1:
    cdef uint32_t node_id
    cdef Node* node
    ring.oldest = ring.newest = NIL
    ring.size = ring.num_parked = ring.num_listed = ring.listed.size = 0
    for node_id in node_ids:
        node = node_at(table, node_id)
        node.ring = 0
        node.flags &= <uint8_t>(~(PARKED | LISTED) & 0xFF)
        ring_append(table, ring, node_id, node)
    return 0


cdef const char* ring_check(Table* table, Ring* ring) noexcept:
    cdef uint32_t node_id = ring.oldest, before = NIL
    cdef uint64_t listed = 0, parked = 0, linked = 0, entries = 0, index
    cdef Node* node
    while node_id != NIL and linked <= ring.size:
        node = node_at(table, node_id)
        if node.prev != before:
            return b"the links of a ring agree in both directions"
        if not is_on_ring(ring, node) or node.flags & (PARKED | LISTED):
            return b"the nodes of a ring's list know it and are not parked"
        linked += 1
        before = node_id
        node_id = node.next
    if node_id != NIL or before != ring.newest:
        return b"a ring's list ends at its newest node"
    for node_id in range(table.num_used):
        node = node_at(table, node_id)
        if is_on_ring(ring, node) and node.flags & PARKED:
            parked += 1
            listed += (node.flags & LISTED) != 0
            if parking_position(node) >= ring.next_position:
                return b"positions of parked nodes were given out"
    for index in range(ring.listed.size):
        entries += alive(table, ring, &ring.listed.entries[index])
    if not heap_is_ordered(&ring.listed):
        return b"the heap of a ring is ordered"
    if linked + parked != ring.size or parked != ring.num_parked:
        return b"the nodes of a ring are counted"
    if listed != ring.num_listed or entries < listed:
        return b"every listed node has a heap entry that is alive"
    if parked and ring.listed.room < 2 * parked:
        return b"the heap has room for what is parked"
    return NULL
