"""The parts of rings that are not on the fast path; see ``ring.pxd``."""

from libc.string cimport memcpy, memset

from kvoffload._core.memory cimport discard, resize

cdef enum:
    SMALLEST_HEAP = 64


cdef void ring_open(Ring* ring, uint8_t ring_id) noexcept:
    memset(ring, 0, sizeof(Ring))
    ring.oldest = NIL
    ring.newest = NIL
    ring.id = ring_id


cdef void ring_close(Ring* ring) noexcept:
    discard(ring.heap)
    ring.heap = NULL


cdef void ring_clear(Ring* ring) noexcept:
    cdef uint8_t note = ring.note, note_mask = ring.note_mask
    ring_close(ring)
    ring_open(ring, ring.id)
    ring.note = note
    ring.note_mask = note_mask


cdef bint ring_grow_heap(Ring* ring) noexcept:
    cdef Listed* heap
    # Twice the room that the nodes and one more need, for growth.
    cdef uint64_t room = max(<uint64_t>SMALLEST_HEAP, 4 * (ring.num_parked + 1))
    # Not grown in place: that would copy, and so touch, memory that was never used.
    heap = <Listed*>resize(NULL, room * sizeof(Listed))
    if heap == NULL:
        return False
    if ring.heap_size:
        memcpy(heap, ring.heap, ring.heap_size * sizeof(Listed))
    discard(ring.heap)
    ring.heap = heap
    ring.heap_room = room
    return True


cdef void ring_park_in_use(Table* table, Ring* ring, uint64_t most) noexcept:
    cdef Node* node
    while most and ring.oldest != NIL:
        node = node_at(table, ring.oldest)
        if node.block.ref_cnt == 0 or not ring_ensure_parking(ring):
            break
        ring_fetch_ahead(table, ring.oldest, node.next)
        ring_park(table, ring, node)
        most -= 1


cdef inline uint64_t most_entries(const Ring* ring) noexcept:
    """Return how many entries the heap may have before the dead ones are dropped.

    Fewer than it has room for if more nodes were parked before.
    """
    return min(ring.heap_room, max(<uint64_t>SMALLEST_HEAP, 4 * (ring.num_parked + 1)))


cdef inline bint alive(Table* table, Ring* ring, const Listed* entry) noexcept:
    cdef Node* node = node_at(table, entry.node_id)
    return (
        (node.flags & LISTED) != 0
        and is_on_ring(ring, node)
        and parking_position(node) == entry.position
    )


cdef inline bint comes_before(const Ring* ring, uint64_t position, uint64_t other) noexcept:
    """Compare two positions in the heap's cyclic order, which begins at `start`."""
    return position - ring.start < other - ring.start


cdef void sift_down(Ring* ring, uint64_t size, uint64_t index) noexcept:
    cdef Listed* heap = ring.heap
    cdef Listed moving = heap[index]
    cdef uint64_t child
    while True:
        child = 2 * index + 1
        if child >= size:
            break
        if child + 1 < size and comes_before(ring, heap[child + 1].position, heap[child].position):
            child += 1
        if not comes_before(ring, heap[child].position, moving.position):
            break
        heap[index] = heap[child]
        index = child
    heap[index] = moving


cdef void drop_dead(Table* table, Ring* ring) noexcept:
    """Rebuild the heap from the entries that are alive, at most one per parked node."""
    cdef uint64_t kept = 0, index
    for index in range(ring.heap_size):
        if alive(table, ring, &ring.heap[index]):
            ring.heap[kept] = ring.heap[index]
            kept += 1
    ring.heap_size = kept
    index = kept // 2
    while index:
        index -= 1
        sift_down(ring, kept, index)


cdef void ring_list(Table* table, Ring* ring, uint32_t node_id, Node* node) noexcept:
    cdef uint64_t index, parent
    cdef Listed entry
    if node.flags & LISTED:
        return
    if ring.heap_size >= most_entries(ring):
        drop_dead(table, ring)
    entry.position = parking_position(node)
    entry.node_id = node_id
    node.flags |= LISTED
    ring.num_listed += 1
    index = ring.heap_size
    ring.heap_size += 1
    while index:
        parent = (index - 1) // 2
        if not comes_before(ring, entry.position, ring.heap[parent].position):
            break
        ring.heap[index] = ring.heap[parent]
        index = parent
    ring.heap[index] = entry


cdef uint32_t pop(Table* table, Ring* ring) noexcept:
    """Remove the first entry; return its node, NIL if it is dead."""
    cdef Listed top = ring.heap[0]
    ring.heap_size -= 1
    if ring.heap_size:
        ring.heap[0] = ring.heap[ring.heap_size]
        sift_down(ring, ring.heap_size, 0)
    if not alive(table, ring, &top):
        return NIL
    node_at(table, top.node_id).flags &= <uint8_t>(~LISTED & 0xFF)
    ring.num_listed -= 1
    return top.node_id


cdef uint32_t ring_unlist(Table* table, Ring* ring) noexcept:
    cdef uint32_t node_id
    while ring.num_listed:
        node_id = pop(table, ring)
        if node_id != NIL:
            return node_id
    ring.heap_size = 0
    return NIL


cdef uint32_t ring_unlist_before(Table* table, Ring* ring, uint64_t position) noexcept:
    cdef uint32_t node_id
    if ring.num_listed == 0:
        ring.heap_size = 0
    while ring.heap_size and comes_before(ring, ring.heap[0].position, position):
        node_id = pop(table, ring)
        if node_id != NIL:
            return node_id
    return NIL


cdef void ring_start_at(Table* table, Ring* ring, uint64_t position) noexcept:
    if ring.start != position:
        ring.start = position
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
    cdef uint32_t node_id, last = NIL
    cdef Node* node
    ring.oldest = node_ids[0] if node_ids else NIL
    for node_id in node_ids:
        node = node_at(table, node_id)
        node.flags &= <uint8_t>(~(PARKED | LISTED) & 0xFF)
        node.prev = last
        node.next = NIL
        if last != NIL:
            node_at(table, last).next = node_id
        last = node_id
    ring.newest = last
    ring.num_parked = ring.num_listed = ring.heap_size = 0
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
    for index in range(ring.heap_size):
        entries += alive(table, ring, &ring.heap[index])
        if index and comes_before(
            ring, ring.heap[index].position, ring.heap[(index - 1) // 2].position
        ):
            return b"the heap of a ring is ordered"
    if linked + parked != ring.size or parked != ring.num_parked:
        return b"the nodes of a ring are counted"
    if listed != ring.num_listed or entries != listed:
        return b"every listed node has one heap entry that is alive"
    if parked and ring.heap_room < 2 * parked:
        return b"the heap has room for what is parked"
    return NULL
