"""S3-FIFO, compiled (Yang, Zhang, Qiu, Yue & Rashmi, SOSP'23).

Structure
    Three rings of one table: small, main and the ghosts. A block's count is its node's ``note``.
    See ``_queue_policy_c`` for the search, ``_s3fifo_py`` for the Python twin and the differences
    from the paper. A scan also parks each block that *waits* for others behind it, until none is
    left or it is used. If all idle blocks wait, the deepest leave: a heap holds the waiting blocks,
    and adds new ones only when it is read.
Invariants
    The heap holds every parked block that is idle and not listed. It may also hold other parked
    blocks: one in use is skipped, a listed one leaves the heap when the scan puts it back.
    A search removes its victims from their chains, and logs each block that it moves, with its
    former position and count.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of blocks in use or with
    others behind them, and O(log waiting) per block that waits; O(n log resident) if all idle
    blocks have others behind them.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.memory cimport discard, grow
from kvoffload._core.ring cimport ring_append, ring_list, ring_remove
from kvoffload._core.table cimport (
    CHOSEN,
    LISTED,
    NIL,
    PARKED,
    Node,
    drop_block,
    drop_hashed_key,
    drop_key,
    node_at,
)
from kvoffload._core.victims cimport Victim, evictable, victims_list_aside, victims_set_aside
from kvoffload.policies._chains_c cimport (
    Chains,
    Link,
    chains_before,
    chains_check,
    chains_close,
    chains_ensure,
    chains_insert,
    chains_leave,
    chains_link,
    chains_open,
    chains_return,
)
from kvoffload.policies._queue_policy_c cimport BEYOND_ALL, QueuePolicy
from kvoffload.policies._twin_c cimport Hint

from kvoffload._checks import check_cache_capacity
from kvoffload.policies import registry
from kvoffload.policies._views import BlocksView, GhostsView
from kvoffload.policies.base import CachePolicy

cdef enum:
    SMALL = 0
    MAIN = 1
    GHOSTS = 2
    MOST_COUNTED = 3
    FIRST_ROOM = 64


# A block that a search moved to the newest end of main.
cdef struct Move:
    uint64_t position       # its former position
    uint32_t node_id
    uint8_t ring            # on which queue, from 0
    uint8_t count           # its count before


# The position of a search on a ring; it begins again if something has changed since it began.
cdef struct Scan:
    uint64_t left           # nodes still to look at
    uint32_t rest           # the next of them on the list
    uint64_t position       # of the last examined block; beyond all at the scan's end
    bint changed


# A block that waits for those behind it.
cdef struct Waiting:
    uint32_t node_id
    int queue_index         # its queue's, from 0
    uint64_t position       # in its queue, once it is in the heap
    uint32_t depth          # in its chain, likewise


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


cdef class _S3FIFO(QueuePolicy):
    cdef Chains chains
    cdef Waiting* waiting           # heap, deepest first, then in queue order; then the rest
    cdef uint64_t num_waiting
    cdef uint64_t num_ordered       # how many are in the heap
    cdef uint64_t waiting_room
    cdef int64_t _small_size        # blocks that small is meant to hold
    cdef uint64_t num_asked         # ghosts of the batch that the search at work makes room for
    cdef uint64_t most_ghosts       # after the last eviction
    cdef int64_t small_length       # small's, with the blocks that replace the victims so far
    cdef bint any_promoted          # by the scan at work
    cdef Scan scans[2]
    cdef Move* moves
    cdef uint64_t num_moves
    cdef uint64_t moves_room

    def __cinit__(self):
        chains_open(&self.chains)
        self.waiting = NULL
        self.moves = NULL

    def __dealloc__(self):
        chains_close(&self.chains)
        discard(self.waiting)
        discard(self.moves)

    def __init__(self, cache_capacity, *, small=0.1):
        cdef int64_t capacity = check_cache_capacity(cache_capacity)
        share = registry.entry("s3fifo").option("small").check(small)
        self.set_up(capacity, 2, 3)
        self.num_queues = 2
        self._small_size = int(share * capacity)
        self.c_clear()
        self.publish()

    @property
    def small(self):
        """New blocks and their live statuses, oldest first; read-only."""
        self.require_ready()
        self.undo()
        return BlocksView(self, SMALL)

    @property
    def main(self):
        """Blocks that were used again and their live statuses, oldest first; read-only."""
        self.require_ready()
        self.undo()
        return BlocksView(self, MAIN)

    @property
    def ghosts(self):
        """Hashes that left the small queue, oldest first; read-only."""
        self.require_ready()
        return GhostsView(self, GHOSTS)

    @property
    def small_size(self):
        """Number of blocks that the small queue is meant to hold."""
        self.require_ready()
        return self._small_size

    def finished(self, hashes, hints=None):
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self.finish_alone(hashes)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return QueuePolicy.c_ensure(self, more) and chains_ensure(
            &self.chains, self.num_positions
        )

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        cdef int queue_index = SMALL
        self.undo()
        if node.ring:
            ring_remove(self.table, &self.rings[GHOSTS], node)
            queue_index = MAIN
        node.note = 0
        chains_insert(&self.chains, node_id)
        self.join(queue_index, node_id, node)

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        self.undo()
        self.leave_chain(node_id)
        self.leave(node_id)

    cdef void c_touch(self, Batch* batch) noexcept:
        self.use(batch, True)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        self.use(batch, False)

    cdef void use(self, Batch* batch, bint counts) noexcept:
        """Link the batch's chain, count a use of its ready blocks and renew the pending ones."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        self.undo()
        chains_link(&self.chains, batch)
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.ring == GHOSTS + 1:
                continue
            if node.block.ref_cnt < 0:
                self.renew(node.ring - 1, node_id, node)
            elif counts and node.note < MOST_COUNTED:
                node.note += 1
                if node.flags & PARKED and node.block.ref_cnt == 0:  # it waited, unused
                    ring_list(self.table, &self.rings[node.ring - 1], node_id, node)

    cdef void mark_protected(self) noexcept:
        # Ghosts, too, which are about to be inserted.
        cdef Py_ssize_t index
        cdef Node* node
        QueuePolicy.mark_protected(self)
        self.num_asked = 0
        for index in range(self.batch.size):
            if self.batch.node_ids[index] == NIL:
                continue
            node = node_at(self.table, self.batch.node_ids[index])
            if node.ring == GHOSTS + 1 and node.block.mark != self.table.epoch:
                node.block.mark = self.table.epoch
                self.num_asked += 1

    cdef int64_t c_make_room(self, Batch* batch, int64_t n, int64_t num_free) noexcept:
        self.count_asked(batch, n)
        return QueuePolicy.c_make_room(self, batch, n, num_free)

    cdef int64_t c_make_room_of_released(
        self, Batch* batch, int64_t n, int64_t num_free
    ) noexcept:
        self.count_asked(batch, n)
        return QueuePolicy.c_make_room_of_released(self, batch, n, num_free)

    cdef inline void count_asked(self, Batch* batch, int64_t n) noexcept:
        cdef int64_t index
        self.num_asked = 0
        for index in range(n):
            self.num_asked += node_at(self.table, batch.chosen[index]).ring == GHOSTS + 1

    cdef bint c_sift(self, uint64_t n) noexcept:
        cdef int attempt, queue_index, first
        cdef bint found, any_promoted
        cdef uint64_t index
        self.num_moves = 0
        self.small_length = <int64_t>self.rings[SMALL].size
        for queue_index in range(2):
            self.scans[queue_index].left = 0
            self.scans[queue_index].position = BEYOND_ALL
            self.scans[queue_index].changed = True
        if not self.take_released(n):
            return False
        for index in range(self.victims.size):
            self.small_length += self.victims.items[index].ring == &self.rings[MAIN]
        while self.victims.size < n:
            first = MAIN if self.small_length < self._small_size else SMALL
            found = any_promoted = False
            for attempt in range(2):
                queue_index = first if attempt == 0 else 1 - first
                self.any_promoted = False
                found = self.next_victim(queue_index)
                if self.victims.no_memory:
                    return False
                if self.any_promoted:
                    any_promoted = True
                    self.scans[MAIN].changed = True
                if found:
                    break
            if found:
                self.scans[SMALL].changed = self.scans[MAIN].changed = True
                self.small_length += queue_index == MAIN
            elif not any_promoted:
                return self.take_deepest(n)
        return True

    cdef bint next_victim(self, int queue_index) noexcept:
        """Scan on to a victim; False without a victim or memory."""
        cdef Scan* scan = &self.scans[queue_index]
        cdef uint32_t node_id
        cdef Node* node
        while True:
            while scan.left:
                node_id = self.scan(queue_index, &scan.rest)
                node = node_at(self.table, node_id)
                scan.position = self.positions[node_id]
                scan.left -= 1
                if not evictable(self.table, node):
                    if not self.skip(queue_index, node_id, node):
                        return False
                    continue
                if node.note > (1 if queue_index == SMALL else 0):
                    if not self.move(queue_index, node_id, node):
                        return False
                    scan.changed = True
                elif self.chains.links[node_id].num_behind == 0:
                    return self.choose(queue_index, node_id, node)
                elif self.victims.managed and not self.wait(queue_index, node_id, node):
                    return False
            scan.position = BEYOND_ALL
            if not scan.changed:
                return False
            scan.changed = False
            victims_list_aside(&self.victims, self.table, &self.rings[queue_index])
            scan.left = self.num_to_scan(queue_index)
            scan.rest = self.rings[queue_index].oldest
            scan.position = 0

    cdef bint move(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        """Move a block that was used to the newest end of main, and log it."""
        cdef Move* made
        if self.num_moves == self.moves_room and not grow(
            <void**>&self.moves, &self.moves_room, self.num_moves + 1, sizeof(Move), FIRST_ROOM
        ):
            self.victims.no_memory = True
            return False
        made = &self.moves[self.num_moves]
        self.num_moves += 1
        made.node_id = node_id
        made.position = self.positions[node_id]
        made.ring = <uint8_t>queue_index
        made.count = node.note
        ring_remove(self.table, &self.rings[queue_index], node)
        self.join(MAIN, node_id, node)
        # Parked blocks that the scan has still to meet are before the moving block.
        if self.scans[MAIN].rest == NIL:
            self.scans[MAIN].rest = node_id
        if queue_index == SMALL:
            node.note = 0
            self.small_length -= 1
            self.any_promoted = True
        else:
            node.note -= 1
        return True

    # -- blocks with others behind them --------------------------------------------------------

    cdef bint choose(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        return QueuePolicy.choose(self, queue_index, node_id, node) and self.leave_chain(node_id)

    cdef bint leave_chain(self, uint32_t node_id) noexcept:
        """Remove a block from its chain; list the one before it if that waited for this one."""
        cdef Link* before = chains_before(&self.chains, self.chains.links + node_id)
        cdef uint32_t waiting = self.chains.links[node_id].before
        cdef Node* node
        chains_leave(&self.chains, node_id)
        if before == NULL or before.num_behind:
            return True
        node = node_at(self.table, waiting)
        if node.flags & (PARKED | LISTED | CHOSEN) != PARKED or node.block.ref_cnt != 0:
            return True
        return self.became_tail(waiting, node)

    cdef bint became_tail(self, uint32_t node_id, Node* node) noexcept:
        """Put a block where a scan of its queue will meet it, this scan if it is still to come."""
        cdef int queue_index = node.ring - 1
        cdef Scan* scan = &self.scans[queue_index]
        if self.searching:
            if self.positions[node_id] < scan.position:
                return victims_set_aside(&self.victims, &self.rings[queue_index], node_id)
            scan.left += 1
        ring_list(self.table, &self.rings[queue_index], node_id, node)
        return True

    cdef bint take_deepest(self, uint64_t n) noexcept:
        """Choose the deepest blocks, whatever is behind them: the scans found no other."""
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
            self.add_waiting(self.waiting[index].queue_index, self.waiting[index].node_id)
        if not self.victims.managed:
            self.forget_waiting()
        return self.victims.size == n

    cdef bint gather(self) noexcept:
        """List all that may leave as waiting, in a policy used alone; False without memory."""
        cdef uint32_t node_id
        cdef Node* node
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if 0 < node.ring <= self.num_queues and evictable(self.table, node):
                if self.num_waiting == self.waiting_room and not self.grow_waiting():
                    self.forget_waiting()
                    return False
                self.add_waiting(node.ring - 1, node_id)
        return True

    # -- the heap of waiting blocks ----------------------------------------------------------

    cdef bint wait(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        """Park a block that a scan has met with others behind it; False if there is no memory."""
        if self.num_waiting == self.waiting_room and not self.grow_waiting():
            return False
        if not self.park(queue_index, node_id, node):
            return False
        self.add_waiting(queue_index, node_id)
        return True

    cdef inline void add_waiting(self, int queue_index, uint32_t node_id) noexcept:
        """Add a waiting block, outside the heap; there is room."""
        self.waiting[self.num_waiting].node_id = node_id
        self.waiting[self.num_waiting].queue_index = queue_index
        self.num_waiting += 1
        self.chains.links[node_id].waiting = <uint32_t>self.num_waiting

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
            entry.position = self.positions[entry.node_id]
            entry.depth = self.chains.links[entry.node_id].depth
            self.num_ordered += 1
            sift(self.waiting, self.chains.links, self.num_ordered, self.num_ordered - 1, entry)

    cdef void wait_no_longer(self, uint32_t node_id) noexcept:
        """Remove a block, if present, from the waiting ones."""
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

    cdef void c_returning(self, uint32_t node_id) noexcept:
        if self.chains.links[node_id].waiting:
            self.wait_no_longer(node_id)

    cdef bint c_waits(self, uint32_t node_id) noexcept:
        return self.chains.links[node_id].num_behind != 0 and self.chains.links[node_id].waiting

    # -- the end of a search -----------------------------------------------------------------

    cdef void c_undo(self) noexcept:
        cdef uint64_t index
        cdef Move* made
        cdef Node* node
        for index in range(self.num_chosen):
            chains_return(&self.chains, self.victims.items[index].node_id)
        self.num_asked = 0
        while self.num_moves:
            self.num_moves -= 1
            made = &self.moves[self.num_moves]
            node = node_at(self.table, made.node_id)
            self.c_returning(made.node_id)
            ring_remove(self.table, &self.rings[MAIN], node)
            self.put_back(made.ring, made.node_id, node, made.position)
            node.note = made.count

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        cdef bint is_new = node.ring == SMALL + 1
        cdef uint32_t node_id
        self.leave(victim.node_id)
        self.take_off(victim.node_id, node)
        node.note = 0
        if not is_new:
            drop_hashed_key(self.table, victim.node_id, node, victim.hashed)
            return
        node_id = drop_block(self.table, victim.node_id, node)
        self.chains.links[node_id].link_id = 0
        ring_append(self.table, &self.rings[GHOSTS], node_id, node_at(self.table, node_id))

    cdef void c_settled(self) noexcept:
        cdef uint32_t node_id = self.rings[GHOSTS].oldest, following
        cdef Node* node
        # Reached even without a victim; a search cancelled before is then undone.
        self.undo()
        if self.num_chosen:
            self.most_ghosts = <uint64_t>(self.capacity - self._small_size) + self.num_asked
        self.num_chosen = self.num_asked = 0
        while self.rings[GHOSTS].size > self.most_ghosts and node_id != NIL:
            node = node_at(self.table, node_id)
            following = node.next
            # The ghosts that are asked for are about to leave: neither counted nor forgotten.
            if node.block.mark != self.table.epoch:
                ring_remove(self.table, &self.rings[GHOSTS], node)
                drop_key(self.table, node_id, node)
            node_id = following

    cdef uint64_t c_num_ghosts(self) noexcept:
        return self.rings[GHOSTS].size

    cdef void leave(self, uint32_t node_id) noexcept:
        """Remove a block from the links."""
        self.searching = False
        self.c_returning(node_id)
        self.chains.links[node_id].link_id = 0

    cdef void c_unparked(self) noexcept:
        self.forget_waiting()

    cdef void c_clear(self) noexcept:
        QueuePolicy.c_clear(self)
        self.forget_waiting()

    cdef const char* c_check(self) noexcept:
        cdef const char* broken
        cdef uint32_t node_id
        cdef Node* node
        self.undo()
        if self.rings[SMALL].size + self.rings[MAIN].size != self.num_resident:
            return b"resident is small and main"
        if self.rings[GHOSTS].size > self.most_ghosts:
            return b"ghosts are within main"
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.ring and node.note > MOST_COUNTED:
                return b"counts are 0 ... 3"
        broken = self.check_queues()
        return self.check_waiting() if broken == NULL else broken

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
                self.positions[entry.node_id] != entry.position or link.depth != entry.depth
            ):
                return b"what waits has kept its position and depth"
            if index and leaves_before(entry, &self.waiting[(index - 1) // 2]):
                return b"the heap of waiting blocks is ordered"
        return chains_check(&self.chains, self.table)


class S3FIFOCachePolicy(_S3FIFO, CachePolicy):
    """A policy that evicts new blocks not used soon, then the oldest unused ones.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    small : float
        Share of the capacity for new blocks, ``0.0 ... 1.0``.

    References
    ----------
    Yang, Zhang, Qiu, Yue & Rashmi, "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity, *, small=0.1):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _S3FIFO.__init__(self, cache_capacity, small=small)
