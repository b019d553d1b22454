"""Policies whose queues are not ordered by use, compiled: SIEVE and S3-FIFO.

Structure
    Rings of one table, the queues, oldest first, ordered by positions, which rise and are assigned
    at the newest end. A node's ``note`` is its block's count of uses. With a manager, a scan parks
    each block in use that it meets, under its position, until the block is idle again; the next
    scan that gets there puts it back between its neighbours. So scans meet each such block once.
    See ``_queue_py`` for the Python twin, the policies, and the differences from their papers.
    SIEVE's hand is a position: its ring's ``start``.
    S3-FIFO has a third ring, the ghosts, and a link per node, by the node's id: the block before
    it in its chain, by its node and its link id. Ids are never reused, not even after a clear, so a
    link is dead if its block has left or its node now holds another block. A scan also parks each
    block that *waits* for others behind it, until none is left or it is used. If all idle blocks
    wait, the deepest leave: a heap holds the waiting blocks, and adds new ones only when it is
    read or blocks are parked during a load.
Invariants
    A search takes blocks provisionally, logs each block whose place or count it changes, and undoes
    that if it is cancelled. (Parking changes nothing observable.)
    ``next_node_id`` is the first block of SIEVE's list from the hand on.
    The heap holds every parked block of S3-FIFO that is idle and not listed. It may also hold other
    parked blocks: one in use is skipped, a listed one leaves the heap when the scan puts it back.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of blocks in use or with
    others behind them, and O(log waiting) per block that waits; O(n log resident) if all idle
    blocks have others behind them. 8 bytes per node, and 32 for its link.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kvoffload._core.batch cimport Batch
from kvoffload._core.memory cimport discard, extend, grow, release
from kvoffload._core.ring cimport (
    Ring,
    parking_position,
    ring_append,
    ring_ensure_parking,
    ring_fetch_ahead,
    ring_list,
    ring_node_ids,
    ring_park_as,
    ring_put_before,
    ring_remove,
    ring_renew,
    ring_start_at,
    ring_unlist_before,
)
from kvoffload._core.table cimport (
    CHOSEN,
    LISTED,
    NIL,
    PARKED,
    RESIDENT,
    SEGMENT_BITS,
    Node,
    drop_block,
    drop_hashed_key,
    drop_key,
    node_at,
)
from kvoffload._core.victims cimport Victim, evictable, victims_list_aside, victims_set_aside
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint, key_of

from kvoffload._checks import check_cache_capacity
from kvoffload.policies import registry
from kvoffload.policies._views import BlocksView, GhostsView
from kvoffload.policies.base import CachePolicy

cdef enum:
    FIRST_ROOM = 64

# Rings of S3-FIFO, from 0.
cdef enum:
    SMALL = 0
    MAIN = 1
    GHOSTS = 2


cdef class Queues(CompiledPolicy):
    """The positions and the search of a policy whose queues are not ordered by use."""

    def __cinit__(self):
        self.positions = NULL
        self.changes = NULL

    def __dealloc__(self):
        release(self.positions, self.num_positions * sizeof(uint64_t))
        discard(self.changes)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return CompiledPolicy.c_ensure(self, more) and extend(
            <void**>&self.positions,
            &self.num_positions,
            self.table.num_reserved + (<uint64_t>self.table.num_segments << SEGMENT_BITS),
            sizeof(uint64_t),
            self.num_positions,
        )

    # -- queues ------------------------------------------------------------------------------

    cdef int open(self, object cache_capacity, int num_queues, int most_counted) except -1:
        self.set_up(cache_capacity, num_queues, 2 * num_queues - 1)
        self.num_queues = num_queues
        self.most_counted = most_counted
        self.c_clear()
        self.publish()
        return 0

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        node.note = 0
        self.join(0, node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        self.use(batch, True)

    cdef void use(self, Batch* batch, bint counts) noexcept:
        cdef int most = self.most_counted if counts else 0, num_queues = self.num_queues
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.ring > num_queues:
                continue
            if node.block.ref_cnt < 0:
                self.renew(node_id, node)
            elif node.note < most:
                node.note += 1
                if node.flags & PARKED and node.block.ref_cnt == 0:  # it waited, unused
                    ring_list(self.table, &self.rings[node.ring - 1], node_id, node)

    cdef void join(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        self.positions[node_id] = queue.next_position
        queue.next_position += 1
        ring_append(self.table, queue, node_id, node)

    cdef void renew(self, uint32_t node_id, Node* node) noexcept:
        cdef Ring* queue = &self.rings[node.ring - 1]
        if node.flags & PARKED:
            self.returns(node_id)
        self.positions[node_id] = queue.next_position
        queue.next_position += 1
        ring_renew(self.table, queue, node_id, node)

    cdef void returns(self, uint32_t node_id) noexcept:
        pass

    cdef bint waits(self, uint32_t node_id) noexcept:
        return False

    cdef uint32_t scan(self, int queue_index, uint32_t* rest) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        cdef uint32_t node_id = rest[0]
        cdef uint64_t position = BEYOND_ALL if node_id == NIL else self.positions[node_id]
        cdef uint32_t returning = ring_unlist_before(self.table, queue, position)
        cdef Node* node
        if returning != NIL:
            node = node_at(self.table, returning)
            self.returns(returning)
            ring_remove(self.table, queue, node)
            ring_put_before(self.table, queue, returning, node, node_id)
            return returning
        if node_id != NIL:
            rest[0] = node_at(self.table, node_id).next
        return node_id

    cdef uint64_t num_to_scan(self, int queue_index) noexcept:
        cdef Ring* queue = &self.rings[queue_index]
        return queue.size - queue.num_parked + queue.num_listed

    cdef bint park(self, uint32_t node_id, Node* node) noexcept:
        cdef Ring* queue = &self.rings[node.ring - 1]
        if not ring_ensure_parking(queue):
            self.victims.no_memory = True
            return False
        ring_park_as(self.table, queue, node, self.positions[node_id])
        return True

    cdef bint skip(self, uint32_t node_id, Node* node) noexcept:
        if not self.victims.managed or node.block.ref_cnt == 0 and not node.flags & CHOSEN:
            return True
        return self.park(node_id, node)

    cdef uint32_t park_from(self, uint32_t node_id, uint32_t end, uint64_t most) noexcept:
        cdef uint32_t following
        cdef Node* node
        while most and node_id != end and node_id != NIL:
            node = node_at(self.table, node_id)
            following = node.next
            ring_fetch_ahead(self.table, node_id, following)
            if not self.park_ahead(node_id, node):
                break
            node_id = following
            most -= 1
        self.victims.no_memory = False
        return node_id

    cdef bint park_ahead(self, uint32_t node_id, Node* node) noexcept:
        return node.block.ref_cnt != 0 and self.park(node_id, node)

    cdef void c_park(self, uint64_t most) noexcept:
        cdef int queue_index
        for queue_index in range(self.num_queues):
            self.park_from(self.rings[queue_index].oldest, NIL, most)

    cdef list c_node_ids(self, int queue_index):
        cdef uint32_t node_id
        node_ids = ring_node_ids(self.table, &self.rings[queue_index])
        if queue_index < self.num_queues:
            node_ids.sort(
                key=[self.positions[node_id] for node_id in range(self.table.num_used)].__getitem__
            )
        return node_ids

    cdef const char* c_check(self) noexcept:
        cdef Node* node
        cdef uint32_t node_id
        cdef uint64_t position, total = 0
        cdef int queue_index
        for queue_index in range(self.num_queues):
            total += self.rings[queue_index].size
            node_id = self.rings[queue_index].oldest
            while node_id != NIL:
                node = node_at(self.table, node_id)
                if node.next != NIL and self.positions[node.next] <= self.positions[node_id]:
                    return b"a queue is in the order of its positions"
                node_id = node.next
        if total != self.num_resident:
            return b"resident is the union of the queues"
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if not 0 < node.ring <= self.num_queues:
                continue
            position = self.positions[node_id]
            if position >= self.rings[node.ring - 1].next_position:
                return b"positions were given out"
            if node.note > self.most_counted:
                return b"counts are in bounds"
            if node.flags & PARKED:
                if position != parking_position(node):
                    return b"a block is parked under its position"
                # Once the manager is gone, anyone may write to the statuses.
                if not (self.was_owned or node.block.ref_cnt or node.flags & LISTED):
                    if not self.waits(node_id):
                        return b"a parked block is in use, waits for others, or is listed"
        return NULL

    # -- searches ----------------------------------------------------------------------------

    cdef bint c_search(self, uint64_t n) noexcept:
        self.searching = True
        self.num_changes = 0
        if self.sift(n):
            return True
        self.cancel()
        return False

    cdef bint sift(self, uint64_t n) noexcept:
        return False

    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept:
        if CompiledPolicy.take_one(self, node_id, node):
            return True
        if node.flags & PARKED:
            ring_list(self.table, &self.rings[node.ring - 1], node_id, node)
        return False

    cdef bint note_change(self, uint32_t node_id, Node* node) noexcept:
        cdef Change* change
        if self.num_changes == self.changes_room and not grow(
            <void**>&self.changes,
            &self.changes_room,
            self.num_changes + 1,
            sizeof(Change),
            FIRST_ROOM,
        ):
            self.victims.no_memory = True
            return False
        change = &self.changes[self.num_changes]
        self.num_changes += 1
        change.node_id = node_id
        change.position = self.positions[node_id]
        change.ring = node.ring
        change.count = node.note
        return True

    cdef void cancel(self) noexcept:
        cdef uint32_t last = NIL
        cdef Change* change
        cdef Node* node
        CompiledPolicy.cancel(self)
        if not self.searching:
            return
        self.searching = False
        while self.num_changes:
            self.num_changes -= 1
            change = &self.changes[self.num_changes]
            node = node_at(self.table, change.node_id)
            node.note = change.count
            if node.ring != change.ring or self.positions[change.node_id] != change.position:
                self.returns(change.node_id)
                ring_remove(self.table, &self.rings[node.ring - 1], node)
                self.put_back(change, node, last)
                last = change.node_id

    cdef void put_back(self, const Change* change, Node* node, uint32_t last) noexcept:
        """Put a block back to its place; `last` is the one that was put back before, or NIL."""
        cdef Ring* queue = &self.rings[change.ring - 1]
        cdef uint32_t following = NIL, before = queue.newest
        # Blocks are put back from the newest on: the last one is a good start.
        if last != NIL:
            if node_at(self.table, last).ring == queue.id:
                if self.positions[last] > change.position:
                    following = last
                    before = node_at(self.table, following).prev
        while before != NIL and self.positions[before] > change.position:
            following = before
            before = node_at(self.table, before).prev
        self.positions[change.node_id] = change.position
        ring_put_before(self.table, queue, change.node_id, node, following)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, victim.hashed)

    cdef void c_settled(self) noexcept:
        self.searching = False

    cdef void c_clear(self) noexcept:
        self.searching = False


cdef class _Sieve(Queues):
    cdef uint32_t next_node_id      # the next block of the list to look at, NIL at its end
    cdef uint64_t hand_before       # where the hand was before the search at work

    @property
    def blocks(self):
        """Resident blocks and their live statuses, oldest first; read-only."""
        return BlocksView(self, 0)

    @property
    def hand(self):
        """The next block to examine; None if the queue ends at the hand."""
        cdef Ring* queue = &self.rings[0]
        cdef uint32_t node_id, first
        cdef uint64_t position
        cdef Node* node
        self.require_ready()
        first = self.next_node_id
        if queue.num_parked:
            for node_id in range(self.table.num_used):
                node = node_at(self.table, node_id)
                if not node.flags & PARKED or node.ring != queue.id:
                    continue
                position = parking_position(node)
                if position >= queue.start and (
                    first == NIL or position < self.positions[first]
                ):
                    first = node_id
        return None if first == NIL else key_of(node_at(self.table, first))

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        Queues.c_insert(self, node_id, node)
        if self.next_node_id == NIL:
            self.next_node_id = node_id

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        self.step_off(node_id, node)

    cdef void renew(self, uint32_t node_id, Node* node) noexcept:
        self.step_off(node_id, node)
        Queues.renew(self, node_id, node)
        if self.next_node_id == NIL:
            self.next_node_id = node_id

    cdef inline void step_off(self, uint32_t node_id, Node* node) noexcept:
        """Move the hand past a block that is about to move or leave."""
        if self.next_node_id == node_id:
            self.next_node_id = node.next

    cdef bint sift(self, uint64_t n) noexcept:
        """Move the hand until `n` victims are found, or a lap has found and changed nothing."""
        cdef Ring* queue = &self.rings[0]
        cdef uint64_t num_skipped = 0   # protected blocks in a row
        cdef uint32_t node_id
        cdef Node* node
        self.hand_before = queue.start
        if not self.take_released(n):
            return False
        while self.victims.size < n:
            if num_skipped == self.num_to_scan(0):
                return False
            node_id = self.scan(0, &self.next_node_id)
            if node_id == NIL:  # a lap ends
                queue.start = 0
                self.next_node_id = queue.oldest
                continue
            queue.start = self.positions[node_id] + 1
            node = node_at(self.table, node_id)
            if not evictable(self.table, node):
                if not self.skip(node_id, node):
                    return False
                num_skipped += not node.flags & PARKED
                continue
            if node.note:
                if not self.note_change(node_id, node):
                    return False
                node.note = 0
            elif not self.take_one(node_id, node):
                return False
            num_skipped = 0
        if queue.start == queue.next_position:  # the last victim came last
            self.put_hand(0)
        return True

    cdef void put_hand(self, uint64_t position) noexcept:
        """Put the hand before the first block at or after a position."""
        cdef Ring* queue = &self.rings[0]
        cdef uint32_t node_id = queue.newest
        self.next_node_id = NIL
        while node_id != NIL and self.positions[node_id] >= position:
            self.next_node_id = node_id
            node_id = node_at(self.table, node_id).prev
        ring_start_at(self.table, queue, position)

    cdef void cancel(self) noexcept:
        cdef bint searching = self.searching
        Queues.cancel(self)
        if searching:
            self.put_hand(self.hand_before)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        self.step_off(victim.node_id, node_at(self.table, victim.node_id))
        Queues.c_evicted(self, victim)

    cdef void c_park(self, uint64_t most) noexcept:
        # As a scan does: from the hand on, then from the oldest to the hand.
        self.next_node_id = self.park_from(self.next_node_id, NIL, most)
        self.park_from(self.rings[0].oldest, self.next_node_id, most)

    cdef void c_unparked(self) noexcept:
        self.put_hand(self.rings[0].start)

    cdef void c_clear(self) noexcept:
        Queues.c_clear(self)
        self.next_node_id = NIL

    cdef const char* c_check(self) noexcept:
        cdef uint32_t node_id = self.rings[0].oldest
        while node_id != NIL and self.positions[node_id] < self.rings[0].start:
            node_id = node_at(self.table, node_id).next
        if node_id != self.next_node_id:
            return b"the next block is the first from the hand on"
        return Queues.c_check(self)


# The place of a block in its chain.
cdef struct Link:
    uint64_t link_id        # of the block on this node, from 1; 0: no block
    uint64_t before_id      # of the block before, when it was linked
    uint32_t before         # its node, NIL for none
    uint32_t num_behind     # blocks linked to this one
    uint32_t depth          # blocks before this one when it was linked
    uint32_t waiting        # its place among the waiting blocks, from 1, 0 for none


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


cdef inline Link* link_before(Link* links, uint32_t node_id) noexcept nogil:
    """Return the link of the block before, or NULL if it has left or never existed."""
    cdef Link* link = links + node_id
    if link.before == NIL or links[link.before].link_id != link.before_id:
        return NULL
    return links + link.before


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


cdef void fill(Waiting* heap, Link* links, uint64_t size, uint64_t gap, Waiting entry) noexcept:
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


cdef class _S3FIFO(Queues):
    cdef Link* links                # by node_id
    cdef uint64_t links_room
    cdef uint64_t last_link_id      # given out
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

    def __cinit__(self):
        self.links = NULL
        self.waiting = NULL

    def __dealloc__(self):
        release(self.links, self.links_room * sizeof(Link))
        discard(self.waiting)

    @property
    def small(self):
        """New blocks and their live statuses, oldest first; read-only."""
        return BlocksView(self, SMALL)

    @property
    def main(self):
        """Blocks that were used again and their live statuses, oldest first; read-only."""
        return BlocksView(self, MAIN)

    @property
    def ghosts(self):
        """Hashes that left the small queue, oldest first; read-only."""
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
        return Queues.c_ensure(self, more) and extend(
            <void**>&self.links,
            &self.links_room,
            self.num_positions,
            sizeof(Link),
            self.links_room,
        )

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        cdef Link* link = self.links + node_id
        cdef int queue_index = SMALL
        if node.ring:
            ring_remove(self.table, &self.rings[GHOSTS], node)
            queue_index = MAIN
        node.note = 0
        self.last_link_id += 1
        memset(link, 0, sizeof(Link))
        link.link_id = self.last_link_id
        link.before = NIL
        self.join(queue_index, node_id, node)

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        self.leave_chain(node_id)
        self.returns(node_id)
        self.links[node_id].link_id = 0

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        self.use(batch, False)

    cdef void use(self, Batch* batch, bint counts) noexcept:
        self.link(batch)
        Queues.use(self, batch, counts)

    cdef void link(self, Batch* batch) noexcept:
        """Learn the chain of a touched batch."""
        cdef Py_ssize_t index
        cdef uint32_t before, node_id
        cdef Link* link
        for index in range(1, batch.size):
            before = batch.node_ids[index - 1]
            node_id = batch.node_ids[index]
            if before == NIL or node_id == NIL or before == node_id:
                continue
            link = self.links + node_id
            # A ghost has a node but no link id.
            if link.link_id == 0 or self.links[before].link_id == 0:
                continue
            if link.num_behind == 0 and link_before(self.links, node_id) == NULL:
                link.before = before
                link.before_id = self.links[before].link_id
                link.depth = self.links[before].depth + 1
                self.links[before].num_behind += 1

    cdef void mark_protected(self) noexcept:
        # Ghosts, too, which are about to be inserted.
        cdef Py_ssize_t index
        cdef Node* node
        Queues.mark_protected(self)
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
        return Queues.c_make_room(self, batch, n, num_free)

    cdef int64_t c_make_room_of_released(
        self, Batch* batch, int64_t n, int64_t num_free
    ) noexcept:
        self.count_asked(batch, n)
        return Queues.c_make_room_of_released(self, batch, n, num_free)

    cdef inline void count_asked(self, Batch* batch, int64_t n) noexcept:
        cdef int64_t index
        self.num_asked = 0
        for index in range(n):
            self.num_asked += node_at(self.table, batch.chosen[index]).ring == GHOSTS + 1

    cdef bint sift(self, uint64_t n) noexcept:
        cdef int attempt, queue_index, first
        cdef bint found, any_promoted
        cdef uint64_t index
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
                    if not self.skip(node_id, node):
                        return False
                elif self.was_used(node):
                    if not self.move(node_id, node):
                        return False
                    scan.changed = True
                elif self.links[node_id].num_behind == 0:
                    return self.take_one(node_id, node)
                elif self.victims.managed and not self.wait(node_id, node):
                    return False
            scan.position = BEYOND_ALL
            if not scan.changed:
                return False
            scan.changed = False
            victims_list_aside(&self.victims, self.table, &self.rings[queue_index])
            scan.left = self.num_to_scan(queue_index)
            scan.rest = self.rings[queue_index].oldest
            scan.position = 0

    cdef inline bint was_used(self, const Node* node) noexcept:
        """Return whether a scan that meets a block moves it to main."""
        return node.note > (1 if node.ring == SMALL + 1 else 0)

    cdef bint move(self, uint32_t node_id, Node* node) noexcept:
        """Move a block that was used to the newest end of main, and log it."""
        cdef bint is_new = node.ring == SMALL + 1
        if not self.note_change(node_id, node):
            return False
        ring_remove(self.table, &self.rings[node.ring - 1], node)
        self.join(MAIN, node_id, node)
        # Parked blocks that the scan has still to meet are before the moving block.
        if self.scans[MAIN].rest == NIL:
            self.scans[MAIN].rest = node_id
        node.note = 0 if is_new else node.note - 1
        self.small_length -= is_new
        self.any_promoted |= is_new
        return True

    # -- blocks with others behind them ------------------------------------------------------

    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept:
        return Queues.take_one(self, node_id, node) and self.leave_chain(node_id)

    cdef bint leave_chain(self, uint32_t node_id) noexcept:
        """Remove a block from its chain; list the one before it if that waited for this one."""
        cdef Link* before = link_before(self.links, node_id)
        cdef uint32_t waiting = self.links[node_id].before
        cdef Scan* scan
        cdef Node* node
        if before == NULL:
            return True
        before.num_behind -= 1
        node = node_at(self.table, waiting)
        if before.num_behind or node.flags & (PARKED | LISTED | CHOSEN) != PARKED:
            return True
        if node.block.ref_cnt != 0:
            return True
        # A scan of its queue will meet it, this one if it is still to come.
        if self.searching:
            scan = &self.scans[node.ring - 1]
            if self.positions[waiting] < scan.position:
                return victims_set_aside(&self.victims, &self.rings[node.ring - 1], waiting)
            scan.left += 1
        ring_list(self.table, &self.rings[node.ring - 1], waiting, node)
        return True

    cdef bint take_deepest(self, uint64_t n) noexcept:
        """Take the deepest blocks, whatever is behind them: the scans found no other."""
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
            self.returns(entry.node_id)
            if node.block.ref_cnt != 0 or node.flags & CHOSEN:
                continue  # it is listed when it is idle again, or is given back
            if node.block.mark == self.table.epoch:
                num_protected += 1
                self.waiting[end - num_protected] = entry  # there is room behind the heap now
            elif not self.take_one(entry.node_id, node):
                break
        for index in range(end - num_protected, end):
            self.add_waiting(self.waiting[index].node_id, self.waiting[index].queue_index)
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
                if not self.ensure_waiting():
                    self.forget_waiting()
                    return False
                self.add_waiting(node_id, node.ring - 1)
        return True

    cdef void c_park(self, uint64_t most) noexcept:
        Queues.c_park(self, most)
        self.order_waiting()

    cdef bint park_ahead(self, uint32_t node_id, Node* node) noexcept:
        if node.block.ref_cnt != 0:
            return self.park(node_id, node)
        # One before a block in use most likely waits for it, and does not get into use itself.
        if node.next == NIL or node_at(self.table, node.next).block.ref_cnt == 0:
            return False
        if self.was_used(node) or self.links[node_id].num_behind == 0:
            return False
        return self.wait(node_id, node)

    # -- the heap of waiting blocks ----------------------------------------------------------

    cdef bint wait(self, uint32_t node_id, Node* node) noexcept:
        """Park a block that a scan has met with others behind it; False if there is no memory."""
        if not self.ensure_waiting() or not self.park(node_id, node):
            return False
        self.add_waiting(node_id, node.ring - 1)
        return True

    cdef inline void add_waiting(self, uint32_t node_id, int queue_index) noexcept:
        """Add a waiting block, outside the heap; there is room."""
        self.waiting[self.num_waiting].node_id = node_id
        self.waiting[self.num_waiting].queue_index = queue_index
        self.num_waiting += 1
        self.links[node_id].waiting = <uint32_t>self.num_waiting

    cdef bint ensure_waiting(self) noexcept:
        """Make room for one more waiting block; False if there is no memory."""
        if self.num_waiting < self.waiting_room or grow(
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
            entry.depth = self.links[entry.node_id].depth
            self.num_ordered += 1
            fill(self.waiting, self.links, self.num_ordered, self.num_ordered - 1, entry)

    cdef void returns(self, uint32_t node_id) noexcept:
        """Remove a block, if present, from the waiting ones."""
        cdef Waiting* heap = self.waiting
        cdef uint64_t gap = self.links[node_id].waiting
        if gap == 0:
            return
        gap -= 1
        self.links[node_id].waiting = 0
        self.num_waiting -= 1
        if gap < self.num_ordered:
            self.num_ordered -= 1
            if gap < self.num_ordered:
                fill(heap, self.links, self.num_ordered, gap, heap[self.num_ordered])
            gap = self.num_ordered
        if gap < self.num_waiting:
            put(heap, self.links, gap, &heap[self.num_waiting])

    cdef void forget_waiting(self) noexcept:
        """Empty the heap."""
        cdef uint64_t index
        for index in range(self.num_waiting):
            self.links[self.waiting[index].node_id].waiting = 0
        self.num_waiting = self.num_ordered = 0

    cdef bint waits(self, uint32_t node_id) noexcept:
        return self.links[node_id].num_behind != 0 and self.links[node_id].waiting

    # -- the end of a search -----------------------------------------------------------------

    cdef void cancel(self) noexcept:
        cdef Link* before
        cdef uint64_t index
        for index in range(self.victims.size):
            before = link_before(self.links, self.victims.items[index].node_id)
            if before != NULL:
                before.num_behind += 1
        self.num_asked = 0
        Queues.cancel(self)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        cdef bint is_new = node.ring == SMALL + 1
        cdef uint32_t node_id
        self.returns(victim.node_id)
        self.links[victim.node_id].link_id = 0
        self.take_off(victim.node_id, node)
        node.note = 0
        if not is_new:
            drop_hashed_key(self.table, victim.node_id, node, victim.hashed)
            return
        node_id = drop_block(self.table, victim.node_id, node)
        self.links[node_id].link_id = 0
        ring_append(self.table, &self.rings[GHOSTS], node_id, node_at(self.table, node_id))

    cdef void c_settled(self) noexcept:
        cdef uint32_t node_id = self.rings[GHOSTS].oldest, following
        cdef Node* node
        if self.searching:  # reached even without a victim
            self.most_ghosts = <uint64_t>(self.capacity - self._small_size) + self.num_asked
        self.num_asked = 0
        Queues.c_settled(self)
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

    cdef void c_unparked(self) noexcept:
        self.forget_waiting()

    cdef void c_clear(self) noexcept:
        Queues.c_clear(self)
        self.forget_waiting()

    cdef const char* c_check(self) noexcept:
        cdef const char* broken = Queues.c_check(self)
        if self.rings[GHOSTS].size > self.most_ghosts:
            return b"ghosts are within main"
        if broken == NULL:
            broken = self.check_waiting()
        return self.check_chains() if broken == NULL else broken

    cdef const char* check_waiting(self) noexcept:
        """Verify the heap of waiting blocks; return what is broken."""
        cdef uint64_t index
        cdef Waiting* entry
        cdef Link* link
        cdef Node* node
        for index in range(self.num_waiting):
            entry = &self.waiting[index]
            link = &self.links[entry.node_id]
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
        return NULL

    cdef const char* check_chains(self) noexcept:
        """Verify the links; return what is broken."""
        cdef uint32_t node_id
        cdef uint64_t linked = 0, behind = 0
        cdef Link* link
        cdef Link* before
        for node_id in range(self.table.num_used):
            if not node_at(self.table, node_id).flags & RESIDENT:
                continue
            link = self.links + node_id
            behind += link.num_behind
            before = link_before(self.links, node_id)
            if before != NULL:
                linked += 1
                if not node_at(self.table, link.before).flags & RESIDENT:
                    return b"links join resident blocks"
                if before.num_behind == 0 or before.depth >= link.depth:
                    return b"depth rises behind"
            if link.link_id == 0 or link.link_id > self.last_link_id:
                return b"every resident block is in the chains"
        if linked != behind:
            return b"the blocks behind are counted"
        return NULL


# Not one __init__ for all: a Python function shows its signature, a slot of a C type does not.


class SieveCachePolicy(_Sieve, CachePolicy):
    """A policy that evicts the oldest block not used since the hand last passed it.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.

    References
    ----------
    Zhang, Yang, Yue, Vigfusson & Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
    Algorithm for Web Caches", NSDI 2024.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        (<_Sieve?>self).open(cache_capacity, 1, 1)


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
        cdef _S3FIFO policy = <_S3FIFO?>self
        cdef int64_t capacity = check_cache_capacity(cache_capacity)
        cdef double share = registry.entry("s3fifo").option("small").check(small)
        cdef int64_t size = int(share * capacity)
        policy.open(capacity, 2, 3)  # nothing after it can fail
        policy._small_size = size
