"""Rings: recency orders of nodes, in which blocks that cannot leave cost nothing.

Structure
    A doubly-linked list through ``prev`` (towards the oldest) and ``next`` (towards the newest),
    and beside it the *parked* nodes: those that a victim scan passed over, because they were
    pinned, pending or protected, or because the eviction that chose them failed. A parked node is
    off the list; its links hold a 64-bit position. Parked nodes that are idle again are
    *listed* in a heap on that position.
Invariants
    Positions rise in recency order, and every parked node is older than every node of the list. So
    a scan that started over would find the listed nodes by position, then the list. (A policy whose
    scans leave idle nodes behind assigns positions to its nodes itself, and puts listed nodes back
    between their neighbours.) A heap entry is alive if its node is LISTED on this ring under the
    entry's position; dead ones are dropped when they surface. The heap has room for two entries per
    parked node.
Cost
    O(1) for everything, amortised O(log parked) for a block that returns from parking.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kvoffload._core.heap cimport Heap
from kvoffload._core.table cimport (
    LISTED,
    NIL,
    PARKED,
    RESIDENT,
    Node,
    Table,
    kvo_prefetch,
    kvo_require,
    node_at,
)

cdef enum:
    AHEAD = 16              # nodes of a list that a scan prefetches

cdef struct Ring:
    uint32_t oldest         # least recent node of the list, NIL if empty
    uint32_t newest         # most recent node of the list, NIL if empty
    uint8_t id              # what the ring's nodes have in `ring`, from 1
    uint8_t note            # and in `note`, as far as the mask goes: for more than 255 rings
    uint8_t note_mask
    uint64_t size           # nodes on the list and parked
    uint64_t num_parked
    uint64_t num_listed     # parked nodes that are in the heap
    uint64_t next_position  # of the next node to be parked
    Heap listed             # listed nodes by their position when they were listed, rank 0

cdef void ring_open(Ring* ring, uint8_t ring_id) noexcept
cdef void ring_close(Ring* ring) noexcept
# Forget all nodes; the caller clears the table.
cdef void ring_clear(Ring* ring) noexcept
# Give the heap room for two entries per parked node; False if there is no memory.
cdef bint ring_grow_heap(Ring* ring) noexcept
# Park the nodes before the first idle one of the list, `most` at most; fewer without memory.
cdef void ring_park_in_use(Table* table, Ring* ring, uint64_t most) noexcept
# List a parked node that has become idle. Never allocates.
cdef void ring_list(Table* table, Ring* ring, uint32_t node_id, Node* node) noexcept
# Remove and return the first listed node, or NIL; it stays parked.
cdef uint32_t ring_unlist(Table* table, Ring* ring) noexcept
# The same if it comes before `position`; dead entries before it are dropped.
cdef uint32_t ring_unlist_before(Table* table, Ring* ring, uint64_t position) noexcept
# Do what `ring_renew_chain` does from the most recent node, which is not parked.
cdef Py_ssize_t ring_turn(
    Table* table, Ring* ring, const uint32_t* node_ids, Py_ssize_t index
) noexcept nogil
# Begin the heap's order at another position.
cdef void ring_start_at(Table* table, Ring* ring, uint64_t position) noexcept
# Return the node ids, least recent first: the parked by position, then the list.
cdef list ring_node_ids(Table* table, Ring* ring)
# Put all nodes of the ring on the list, in the order of `node_ids`; none stays parked.
cdef int ring_unpark(Table* table, Ring* ring, list node_ids) except -1
# Verify the invariants; return the broken one, or NULL.
cdef const char* ring_check(Table* table, Ring* ring) noexcept


cdef inline bint is_on_ring(const Ring* ring, const Node* node) noexcept nogil:
    return node.ring == ring.id and node.note & ring.note_mask == ring.note


cdef inline uint64_t parking_position(const Node* node) noexcept nogil:
    return <uint64_t>node.next << 32 | node.prev


cdef inline void ring_fetch_ahead(
    Table* table, uint32_t node_id, uint32_t following
) noexcept nogil:
    """Prefetch the node that follows one of the list, and one that a scan reaches later.

    Blocks stored together are mostly a constant distance apart; a wrong guess costs a prefetch.
    """
    cdef uint32_t guess
    if following == NIL:
        return
    guess = node_id + AHEAD * (following - node_id)
    if guess < table.num_used:
        kvo_prefetch(node_at(table, guess))
    kvo_prefetch(node_at(table, following))


cdef inline void ring_put_before(
    Table* table, Ring* ring, uint32_t node_id, Node* node, uint32_t following
) noexcept nogil:
    """Put a node that is on no ring before a node of the list, or at the end for NIL."""
    cdef uint32_t* back = &ring.newest if following == NIL else &node_at(table, following).prev
    kvo_require(node.ring == 0 and not node.flags & PARKED, "the node is on no ring")
    kvo_require(
        following == NIL
        or node_at(table, following).ring == ring.id
        and not node_at(table, following).flags & PARKED,
        "the following node is on the list",
    )
    node.ring = ring.id
    node.next = following
    node.prev = back[0]
    if node.prev == NIL:
        ring.oldest = node_id
    else:
        node_at(table, node.prev).next = node_id
    back[0] = node_id
    ring.size += 1


cdef inline void ring_append(Table* table, Ring* ring, uint32_t node_id, Node* node) noexcept nogil:
    """Put a node that is on no ring at the most recent end."""
    ring_put_before(table, ring, node_id, node, NIL)


cdef inline void ring_detach(Table* table, Ring* ring, Node* node) noexcept nogil:
    """Take a node off the list, but keep it in the ring's count."""
    if node.prev == NIL:
        ring.oldest = node.next
    else:
        node_at(table, node.prev).next = node.next
    if node.next == NIL:
        ring.newest = node.prev
    else:
        node_at(table, node.next).prev = node.prev


cdef inline void ring_remove(Table* table, Ring* ring, Node* node) noexcept nogil:
    """Take a node off the ring, parked or not."""
    kvo_require(node.ring == ring.id, "the node is on this ring")
    if node.flags & PARKED:
        ring.num_parked -= 1
        if node.flags & LISTED:
            ring.num_listed -= 1
        node.flags &= <uint8_t>(~(PARKED | LISTED) & 0xFF)
    else:
        ring_detach(table, ring, node)
    node.ring = 0
    ring.size -= 1


cdef inline void ring_renew(Table* table, Ring* ring, uint32_t node_id, Node* node) noexcept nogil:
    """Move a node of the ring to its most recent end."""
    if ring.newest == node_id and not node.flags & PARKED:
        return
    ring_remove(table, ring, node)
    ring_append(table, ring, node_id, node)


cdef inline Py_ssize_t ring_renew_chain(
    Table* table, Ring* ring, const uint32_t* node_ids, Py_ssize_t index
) noexcept nogil:
    """Move nodes to the most recent end, the one at `index` first; return the last one's index.

    The first is on the ring. Those before it in the batch move with it, all at once, as far as they
    follow it on the list already, as the blocks of a prompt do that were last used together; or, if
    it is the most recent, as far as they precede it, as those of a prompt do that were just stored.
    """
    cdef uint32_t first_id = node_ids[index]
    cdef Node* first = node_at(table, first_id)
    cdef Node* last = first
    kvo_require(first.ring == ring.id, "the node is on this ring")
    if first.flags & PARKED:
        ring_renew(table, ring, first_id, first)
        return index
    if first.next == NIL:
        return ring_turn(table, ring, node_ids, index)
    while index and last.next != NIL and last.next == node_ids[index - 1]:
        index -= 1
        last = node_at(table, last.next)
    if last.next == NIL:
        return index
    node_at(table, last.next).prev = first.prev
    if first.prev == NIL:
        ring.oldest = last.next
    else:
        node_at(table, first.prev).next = last.next
    first.prev = ring.newest
    node_at(table, ring.newest).next = first_id
    last.next = NIL
    ring.newest = node_ids[index]
    return index


cdef inline bint ring_ensure_parking(Ring* ring) noexcept:
    """Ensure that one more node can be parked; False if there is no memory."""
    return ring.listed.room >= 2 * (ring.num_parked + 1) or ring_grow_heap(ring)


cdef inline void ring_park_as(
    Table* table, Ring* ring, Node* node, uint64_t position
) noexcept nogil:
    """Park a node of the list at a position of its own; `ring_ensure_parking` was called."""
    kvo_require(not node.flags & PARKED, "a node is parked once")
    kvo_require(ring.listed.room >= 2 * (ring.num_parked + 1), "the heap has room for it")
    ring_detach(table, ring, node)
    node.prev = <uint32_t>position
    node.next = <uint32_t>(position >> 32)
    node.flags |= PARKED
    ring.num_parked += 1


cdef inline void ring_park(Table* table, Ring* ring, Node* node) noexcept nogil:
    """Park a node of the list that a scan passes over; `ring_ensure_parking` was called."""
    ring_park_as(table, ring, node, ring.next_position)
    ring.next_position += 1
