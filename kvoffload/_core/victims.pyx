"""The search for victims; see ``victims.pxd``."""

from libc.stdint cimport uint8_t
from libc.string cimport memset

from kvoffload._core.memory cimport discard, grow
from kvoffload._core.ring cimport (
    ring_ensure_parking,
    ring_fetch_ahead,
    ring_list,
    ring_park,
    ring_unlist,
)
from kvoffload._core.table cimport (
    CHOSEN,
    NIL,
    PARKED,
    Node,
    hash_ahead,
    kvo_require,
    node_at,
)

cdef enum:
    FIRST_ROOM = 64


cdef void victims_open(Victims* victims) noexcept:
    memset(victims, 0, sizeof(Victims))


cdef void victims_close(Victims* victims) noexcept:
    discard(victims.items)
    discard(victims.aside)
    memset(victims, 0, sizeof(Victims))


cdef bint grow_items(Victim** items, uint64_t* room, uint64_t wanted) noexcept:
    return grow(<void**>items, room, wanted, sizeof(Victim), FIRST_ROOM)


cdef bint victims_ensure(Victims* victims, uint64_t n, uint64_t num_aside) noexcept:
    return grow_items(&victims.items, &victims.room, n) and grow_items(
        &victims.aside, &victims.aside_room, num_aside
    )


cdef inline bint ensure_one(
    Victims* victims, Victim** items, uint64_t* room, uint64_t size
) noexcept:
    if size < room[0] or grow_items(items, room, size + 1):
        return True
    victims.no_memory = True
    return False


cdef inline bint ensure_items(Victims* victims) noexcept:
    return ensure_one(victims, &victims.items, &victims.room, victims.size)


cdef inline bint ensure_aside(Victims* victims) noexcept:
    return ensure_one(victims, &victims.aside, &victims.aside_room, victims.num_aside)


cdef inline void choose(Victims* victims, Ring* ring, uint32_t node_id, Node* node) noexcept:
    """Make a block a victim; there is room."""
    kvo_require(not node.flags & CHOSEN, "a block is chosen once")
    victims.items[victims.size] = Victim(node_id, ring, 0)
    victims.size += 1
    node.flags |= CHOSEN


cdef bint victims_set_aside(Victims* victims, Ring* ring, uint32_t node_id) noexcept:
    if not ensure_aside(victims):
        return False
    victims.aside[victims.num_aside] = Victim(node_id, ring, 0)
    victims.num_aside += 1
    return True


cdef void victims_list_aside(Victims* victims, Table* table, Ring* ring) noexcept:
    cdef uint64_t index, kept = 0
    for index in range(victims.num_aside):
        if victims.aside[index].ring == ring:
            list_again(&victims.aside[index], 1, table)
        else:
            victims.aside[kept] = victims.aside[index]
            kept += 1
    victims.num_aside = kept


cdef bint victims_take(Victims* victims, Table* table, Ring* ring, uint32_t node_id) noexcept:
    cdef Node* node = node_at(table, node_id)
    if not evictable(table, node) or not ensure_items(victims):
        return False
    choose(victims, ring, node_id, node)
    return True


cdef uint32_t find_alone(Table* table, Ring* ring, Cursor* cursor) noexcept:
    cdef Node* node
    cdef uint32_t node_id = cursor.node_id if cursor.started else ring.oldest
    cursor.started = True
    while node_id != NIL:
        node = node_at(table, node_id)
        cursor.node_id = node.next
        if evictable(table, node):
            return node_id
        node_id = node.next
    cursor.node_id = NIL
    return NIL


cdef uint32_t victims_find(Victims* victims, Table* table, Ring* ring, Cursor* cursor) noexcept:
    cdef Node* node
    cdef uint32_t node_id
    if not victims.managed:
        return find_alone(table, ring, cursor)
    while ring.num_listed or ring.oldest != NIL:
        if not ensure_aside(victims):
            return NIL
        if ring.num_listed:
            node_id = ring_unlist(table, ring)
            node = node_at(table, node_id)
        else:
            if not ring_ensure_parking(ring):
                victims.no_memory = True
                return NIL
            node_id = ring.oldest
            node = node_at(table, node_id)
            ring_fetch_ahead(table, node_id, node.next)
            ring_park(table, ring, node)
        if node.block.ref_cnt != 0 or node.flags & CHOSEN:
            continue  # it is listed again when it becomes idle, or is given back
        if node.block.mark == table.epoch:
            victims_set_aside(victims, ring, node_id)  # there is room
            continue
        return node_id
    return NIL


cdef void victims_take_oldest(Victims* victims, Table* table, Ring* ring, uint64_t n) noexcept:
    cdef uint32_t node_id = ring.oldest
    cdef Node* node
    n = min(n, victims.size + ring.size)
    if ring.num_listed or not grow_items(&victims.items, &victims.room, n):
        return
    while victims.size < n and node_id != NIL:
        node = node_at(table, node_id)
        if not evictable(table, node):
            break
        ring_fetch_ahead(table, node_id, node.next)
        choose(victims, ring, node_id, node)
        victims.items[victims.size - 1].hashed = hash_ahead(table, node)
        node_id = node.next


cdef bint victims_next(Victims* victims, Table* table, Ring* ring, Cursor* cursor) noexcept:
    cdef uint32_t node_id
    if not ensure_items(victims):
        return False
    node_id = victims_find(victims, table, ring, cursor)
    if node_id == NIL:
        return False
    choose(victims, ring, node_id, node_at(table, node_id))
    return True


cdef void list_again(Victim* items, uint64_t size, Table* table) noexcept:
    cdef uint64_t index
    cdef Node* node
    for index in range(size):
        node = node_at(table, items[index].node_id)
        if node.flags & PARKED:
            ring_list(table, items[index].ring, items[index].node_id, node)


cdef void victims_settle(Victims* victims, Table* table) noexcept:
    list_again(victims.aside, victims.num_aside, table)
    victims.num_aside = 0


cdef void victims_cancel(Victims* victims, Table* table) noexcept:
    cdef uint64_t index
    for index in range(victims.size):
        node_at(table, victims.items[index].node_id).flags &= <uint8_t>(~CHOSEN & 0xFF)
    list_again(victims.items, victims.size, table)
    victims.size = 0
    victims_settle(victims, table)
