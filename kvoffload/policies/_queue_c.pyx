"""Policies whose queues are not ordered by use, compiled: SIEVE and S3-FIFO.

See ``_queue_py`` for the Python twin, the policies, and the differences from their papers.

Structure
    Rings of one table, the queues, ordered by positions, which are assigned at the newest end and
    rise. A node's ``note`` is its block's count of uses. With a manager, a scan parks each block in
    use that it meets, until the block is idle again, and each block of S3-FIFO that *waits* for
    others behind it, until none is left or it is used; the next scan that gets there puts it back
    between its neighbours. So scans meet each such block once. If all idle blocks wait, the deepest
    leave: a heap holds every parked block that is idle and not listed, and others, which are
    skipped. It is ordered only when it is read, or when blocks are parked during a load.
    SIEVE's hand is a position: the ``start`` of its ring's heap. S3-FIFO's third ring: the ghosts.
    A search logs each block whose place or count it changes, and undoes that if it is cancelled.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of blocks in use or with
    others behind them, and O(log waiting) per block that waits; O(n log resident) if all idle
    blocks have others behind them. 8 bytes per node, and 32 for its link.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kvoffload._core.batch cimport Batch
from kvoffload._core.heap cimport (
    SMALLEST_HEAP,
    Entry,
    Heap,
    heap_grow,
    heap_is_ordered,
    heap_pop,
    heap_push,
)
from kvoffload._core.memory cimport discard, grow, release
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
    ring_start_at,
    ring_unlist_before,
)
from kvoffload._core.table cimport (
    CHOSEN,
    LISTED,
    NIL,
    PARKED,
    RESIDENT,
    Node,
    drop_block,
    drop_key,
    extend_by_node,
    node_at,
)
from kvoffload._core.victims cimport Victim, evictable, victims_list_aside, victims_set_aside
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint, key_of

from kvoffload.policies._queue import S3FIFO, Sieve
from kvoffload.policies.base import CachePolicy

cdef enum:
    FIRST_ROOM = 64

# Rings of S3-FIFO, from 0.
cdef enum:
    SMALL = 0
    MAIN = 1
    GHOSTS = 2

cdef uint64_t BEYOND_ALL = <uint64_t>-1     # a position that is never assigned


# A block before a search changed its place or count.
cdef struct Change:
    uint64_t position
    uint32_t node_id
    uint8_t ring            # its queue's id
    uint8_t count


cdef class Queues(CompiledPolicy):
    """The positions and the search of a policy whose queues are not ordered by use."""

    cdef uint64_t* positions        # by node_id: of the block in its queue, greater is newer
    cdef uint64_t num_positions     # nodes that the array has room for
    cdef int num_queues             # a subclass sets it and `most_counted` at once
    cdef int most_counted
    cdef bint searching             # a search is neither settled nor cancelled
    cdef Change* changes            # that it has made
    cdef uint64_t num_changes
    cdef uint64_t changes_room

    def __dealloc__(self):
        release(self.positions, self.num_positions * sizeof(uint64_t))
        discard(self.changes)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return CompiledPolicy.c_ensure(self, more) and extend_by_node(
            self.table, <void**>&self.positions, &self.num_positions, sizeof(uint64_t)
        )

    # -- queues ------------------------------------------------------------------------------

    def _open(self, cache_capacity):
        """Construct the policy; with two queues, ghosts are on the third ring."""
        self.set_up(cache_capacity, self.num_queues, 2 * self.num_queues - 1)
        self.c_clear()
        self.publish()

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        node.note = 0
        self.join(0, node_id, node)

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        self.leaves(node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        self.use(batch, True)

    cdef void use(self, Batch* batch, bint counts) noexcept:
        """Count a use of ready blocks, or renew the unused ones; renew the pending ones."""
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
            if node.block.ref_cnt < 0 or not (counts or node.note):
                self.renew(node.ring - 1, node_id, node)
            elif node.note < most:
                node.note += 1
                if node.flags & PARKED and node.block.ref_cnt == 0:  # it waited, unused
                    ring_list(self.table, &self.rings[node.ring - 1], node_id, node)

    cdef void join(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        """Put a block that is on no ring at the newest end of a queue."""
        cdef Ring* queue = &self.rings[queue_index]
        self.positions[node_id] = queue.next_position
        queue.next_position += 1
        ring_append(self.table, queue, node_id, node)

    cdef void renew(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        """Move a block to the newest end of a queue."""
        self.leaves(node_id, node)
        ring_remove(self.table, &self.rings[node.ring - 1], node)
        self.join(queue_index, node_id, node)

    cdef void leaves(self, uint32_t node_id, Node* node) noexcept:
        """Handle a block that is about to leave its place."""

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
        cdef Ring* queue
        cdef uint32_t node_id
        cdef uint64_t next_position, total = 0
        cdef int queue_index
        for queue_index in range(self.num_queues):
            queue = &self.rings[queue_index]
            total += queue.size
            next_position = queue.next_position
            node_id = queue.newest
            while node_id != NIL:
                if self.positions[node_id] >= next_position:
                    return b"a queue is in the order of its positions"
                next_position = self.positions[node_id]
                node_id = node_at(self.table, node_id).prev
        if total != self.num_resident:
            return b"resident is the union of the queues"
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if not 0 < node.ring <= self.num_queues:
                continue
            if node.note > self.most_counted:
                return b"counts are in bounds"
            if not node.flags & PARKED:
                continue
            if self.positions[node_id] != parking_position(node):
                return b"a block is parked under its position"
            # Once the manager is gone, anyone may write to the statuses.
            if not (self.was_owned or node.block.ref_cnt or node.flags & LISTED):
                if not self.waits(node_id, node):
                    return b"a parked block is in use, waits for others, or is listed"
        return NULL

    cdef bint waits(self, uint32_t node_id, Node* node) noexcept:
        """Return whether a parked block may be idle without being listed."""
        return False

    # -- scans and parking -------------------------------------------------------------------

    cdef uint32_t scan(self, int queue_index, uint32_t* rest) noexcept:
        """Advance the scan of a queue by one, NIL at its end; `rest` is the list's next block."""
        cdef Ring* queue = &self.rings[queue_index]
        cdef uint32_t node_id = rest[0]
        cdef uint64_t position = BEYOND_ALL if node_id == NIL else self.positions[node_id]
        cdef uint32_t returning = ring_unlist_before(self.table, queue, position)
        cdef Node* node
        if returning != NIL:
            node = node_at(self.table, returning)
            ring_remove(self.table, queue, node)
            ring_put_before(self.table, queue, returning, node, node_id)
            return returning
        if node_id != NIL:
            rest[0] = node_at(self.table, node_id).next
        return node_id

    cdef bint park(self, uint32_t node_id, Node* node) noexcept:
        """Park a block that the scan has met and cannot take; False if there is no memory."""
        cdef Ring* queue = &self.rings[node.ring - 1]
        if not self.victims.managed:
            return True
        if not ring_ensure_parking(queue):
            self.victims.no_memory = True
            return False
        ring_park_as(self.table, queue, node, self.positions[node_id])
        return True

    cdef bint skip(self, uint32_t node_id, Node* node) noexcept:
        """Pass over a block that may not leave: park it, unless it is only protected."""
        cdef bint is_in_use = node.block.ref_cnt != 0 or node.flags & CHOSEN
        return not is_in_use or self.park(node_id, node)

    cdef void c_park(self, uint64_t most) noexcept:
        cdef int queue_index
        for queue_index in range(self.num_queues):
            self.park_from(self.rings[queue_index].oldest, NIL, most)

    cdef uint32_t park_from(self, uint32_t node_id, uint32_t end, uint64_t most) noexcept:
        """Park up to `most` blocks of a list before `end`; return the next one."""
        cdef uint32_t following
        cdef Node* node
        while most and node_id != end:
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
        """Park a block that a scan would park; False if it would not, or without memory."""
        return node.block.ref_cnt != 0 and self.park(node_id, node)

    # -- searches ----------------------------------------------------------------------------

    cdef bint c_search(self, uint64_t n) noexcept:
        self.searching = True
        if self.sift(n):
            return True
        self.cancel()
        return False

    cdef bint sift(self, uint64_t n) noexcept:
        """Take `n` victims by `take_one`; False if there are fewer, or no memory."""
        return False

    cdef bint note_change(self, uint32_t node_id, Node* node) noexcept:
        """Log the place and count of a block that the search changes; False without memory."""
        cdef uint64_t wanted = self.num_changes + 1
        if not grow(<void**>&self.changes, &self.changes_room, wanted, sizeof(Change), FIRST_ROOM):
            self.victims.no_memory = True
            return False
        self.changes[self.num_changes] = Change(
            position=self.positions[node_id], node_id=node_id, ring=node.ring, count=node.note
        )
        self.num_changes += 1
        return True

    cdef void cancel(self) noexcept:
        cdef uint32_t last = NIL
        cdef Change* change
        cdef Ring* queue
        cdef Node* node
        CompiledPolicy.cancel(self)
        self.searching = False
        while self.num_changes:
            self.num_changes -= 1
            change = &self.changes[self.num_changes]
            node = node_at(self.table, change.node_id)
            node.note = change.count
            if node.ring == change.ring and self.positions[change.node_id] == change.position:
                continue
            self.leaves(change.node_id, node)
            ring_remove(self.table, &self.rings[node.ring - 1], node)
            # Blocks are put back from the newest on: the last one is a good start.
            queue = &self.rings[change.ring - 1]
            last = self.first_from(queue, change.position, last)
            self.positions[change.node_id] = change.position
            ring_put_before(self.table, queue, change.node_id, node, last)
            last = change.node_id

    cdef uint32_t first_from(self, Ring* queue, uint64_t position, uint32_t near) noexcept:
        """Return the first block of a list from a position on, by way of `near` if that is one."""
        cdef uint32_t first = NIL, before = queue.newest
        if near != NIL and node_at(self.table, near).ring == queue.id:
            if self.positions[near] >= position:
                before = near
        while before != NIL and self.positions[before] >= position:
            first = before
            before = node_at(self.table, before).prev
        return first

    cdef void c_evicted(self, const Victim* victim) noexcept:
        self.leaves(victim.node_id, node_at(self.table, victim.node_id))
        CompiledPolicy.c_evicted(self, victim)

    cdef void c_settled(self) noexcept:
        self.searching = False
        self.num_changes = 0


cdef class _Sieve(Queues):
    cdef uint32_t next_node_id      # the next block of the list to look at, NIL at its end
    cdef uint64_t hand_before       # where the hand was before the search at work

    def __cinit__(self):
        self.num_queues = self.most_counted = 1

    def _at_hand(self):
        """Return the next block to examine, or None."""
        cdef uint32_t node_id, first
        cdef uint64_t end
        self.require_ready()
        first = self.next_node_id
        end = BEYOND_ALL if first == NIL else self.positions[first]
        for node_id in range(self.table.num_used if self.rings[0].num_parked else 0):
            if self.rings[0].listed.start <= self.positions[node_id] < end:
                if node_at(self.table, node_id).ring:
                    first = node_id
                    end = self.positions[node_id]
        return None if first == NIL else key_of(node_at(self.table, first))

    cdef void join(self, int queue_index, uint32_t node_id, Node* node) noexcept:
        Queues.join(self, queue_index, node_id, node)
        if self.next_node_id == NIL:
            self.next_node_id = node_id

    cdef void leaves(self, uint32_t node_id, Node* node) noexcept:
        if self.next_node_id == node_id:
            self.next_node_id = node.next

    cdef void c_park(self, uint64_t most) noexcept:
        # As a scan does: from the hand on, then from the oldest to the hand.
        self.next_node_id = self.park_from(self.next_node_id, NIL, most)
        self.park_from(self.rings[0].oldest, self.next_node_id, most)

    cdef void put_hand(self, uint64_t position) noexcept:
        """Put the hand before the first block from a position on."""
        self.next_node_id = self.first_from(&self.rings[0], position, NIL)
        ring_start_at(self.table, &self.rings[0], position)

    cdef bint sift(self, uint64_t n) noexcept:
        """Move the hand until `n` victims are found, or a lap has found and changed nothing."""
        cdef Ring* queue = &self.rings[0]
        cdef uint64_t* hand = &queue.listed.start
        cdef bint has_changed = True
        cdef uint32_t node_id
        cdef Node* node
        self.hand_before = hand[0]
        if not self.take_released(n):
            return False
        while self.victims.size < n:
            node_id = self.scan(0, &self.next_node_id)
            if node_id == NIL:  # a lap ends
                if not has_changed:
                    return False
                has_changed = False
                hand[0] = 0
                self.next_node_id = queue.oldest
                continue
            hand[0] = self.positions[node_id] + 1
            node = node_at(self.table, node_id)
            if not evictable(self.table, node):
                if not self.skip(node_id, node):
                    return False
                continue
            has_changed = True
            if node.note:
                if not self.note_change(node_id, node):
                    return False
                node.note = 0
            elif not self.take_one(node_id, node):
                return False
        if hand[0] == queue.next_position:  # the last victim came last
            self.put_hand(0)
        return True

    cdef void cancel(self) noexcept:
        cdef bint searching = self.searching
        Queues.cancel(self)
        if searching:
            self.put_hand(self.hand_before)

    cdef void c_unparked(self) noexcept:
        self.put_hand(self.rings[0].listed.start)

    cdef void c_clear(self) noexcept:
        self.next_node_id = NIL

    cdef const char* c_check(self) noexcept:
        if self.next_node_id != self.first_from(&self.rings[0], self.rings[0].listed.start, NIL):
            return b"the next block is the first from the hand on"
        return Queues.c_check(self)


# The place of a block in its chain. Ids are never reused, not even after a clear: the block before
# has left, or its node holds another one, if the node's id is not `before_id`.
cdef struct Link:
    uint64_t link_id        # of the block on this node, from 1; 0: no block
    uint64_t before_id      # of the block before, when it was linked
    uint32_t before         # its node, NIL for none
    uint32_t num_behind     # blocks linked to this one
    uint32_t depth          # blocks before this one when it was linked
    uint32_t rank           # of the heap's entry for the block at its position, 0 for none


# The position of a search on a ring; it begins again if something has changed since it began.
cdef struct Scan:
    uint64_t position       # of the last examined block; beyond all at the scan's end
    uint64_t end            # position of the first block that joined after it began
    uint32_t rest           # the next block of the list
    bint changed


cdef inline Link* link_before(Link* links, uint32_t node_id) noexcept nogil:
    """Return the link of the block before, or NULL if it has left or never existed."""
    cdef Link* link = links + node_id
    if link.before == NIL or links[link.before].link_id != link.before_id:
        return NULL
    return links + link.before


cdef inline bint is_alive(
    const Link* links, const uint64_t* positions, const Entry* entry
) noexcept nogil:
    """Return whether the heap holds a block by an entry; an entry is dead once its block moves."""
    return links[entry.node_id].rank == entry.rank and positions[entry.node_id] == entry.position


cdef class _S3FIFO(Queues):
    cdef Link* links                # by node_id
    cdef uint64_t links_room
    cdef uint64_t last_link_id      # given out
    cdef Heap waiting               # the deepest first, then in queue order
    cdef uint64_t num_unordered     # entries behind it that came since it was last read
    cdef readonly int64_t _small_size   # blocks that small is meant to hold
    cdef uint64_t num_asked         # ghosts of the batch that the search at work makes room for
    cdef uint64_t most_ghosts       # after the last eviction
    cdef int64_t small_length       # small's, with the blocks that replace the victims so far
    cdef Scan scans[2]

    def __cinit__(self):
        self.num_queues = 2
        self.most_counted = 3

    def __dealloc__(self):
        release(self.links, self.links_room * sizeof(Link))
        discard(self.waiting.entries)

    def _open(self, cache_capacity, int64_t small_size):
        Queues._open(self, cache_capacity)  # nothing after it can fail
        self._small_size = small_size

    def finished(self, hashes, hints=None):
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self.finish_alone(hashes)

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return Queues.c_ensure(self, more) and extend_by_node(
            self.table, <void**>&self.links, &self.links_room, sizeof(Link)
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
        self.links[node_id].link_id = 0
        Queues.c_removed(self, node_id, node)

    cdef void leaves(self, uint32_t node_id, Node* node) noexcept:
        self.links[node_id].rank = 0

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

    cdef int64_t c_make_room_of_released(self, Batch* batch, int64_t n, int64_t num_free) noexcept:
        self.count_asked(batch, n)
        return Queues.c_make_room_of_released(self, batch, n, num_free)

    cdef inline void count_asked(self, Batch* batch, int64_t n) noexcept:
        cdef int64_t index
        self.num_asked = 0
        for index in range(n):
            self.num_asked += node_at(self.table, batch.chosen[index]).ring == GHOSTS + 1

    cdef bint sift(self, uint64_t n) noexcept:
        cdef int queue_index
        cdef int64_t length
        cdef bint found
        self.small_length = <int64_t>self.rings[SMALL].size
        for queue_index in range(2):
            self.scans[queue_index].position = BEYOND_ALL
            self.scans[queue_index].changed = True
        if not self.take_released(n):
            return False
        while self.victims.size < n:
            length = self.small_length
            queue_index = MAIN if length < self._small_size else SMALL
            found = self.next_victim(queue_index) or self.next_victim(1 - queue_index)
            if self.victims.no_memory:
                return False
            if not found and self.small_length == length:  # none has moved from small
                return self.take_deepest(n)
        return True

    cdef bint next_victim(self, int queue_index) noexcept:
        """Scan on to a victim; False without a victim or memory."""
        cdef Ring* queue = &self.rings[queue_index]
        cdef Scan* scan = &self.scans[queue_index]
        cdef uint32_t node_id
        cdef Node* node
        while True:
            if scan.position == BEYOND_ALL:
                if not scan.changed:
                    return False
                scan.changed = False
                victims_list_aside(&self.victims, self.table, queue)
                scan.position = 0
                scan.end = queue.next_position
                scan.rest = queue.oldest
            node_id = self.scan(queue_index, &scan.rest)
            if node_id == NIL or self.positions[node_id] >= scan.end:
                scan.position = BEYOND_ALL
                continue
            scan.position = self.positions[node_id]
            node = node_at(self.table, node_id)
            if not evictable(self.table, node):
                if not self.skip(node_id, node):
                    return False
            elif self.was_used(node):
                if not self.move(node_id, node):
                    return False
            elif self.links[node_id].num_behind == 0:
                return self.take_one(node_id, node)
            elif not self.wait(node_id, node):
                return False

    cdef inline bint was_used(self, const Node* node) noexcept:
        """Return whether a scan that meets a block moves it to main."""
        return node.note > (1 if node.ring == SMALL + 1 else 0)

    cdef bint move(self, uint32_t node_id, Node* node) noexcept:
        """Move a block that was used to the newest end of main, and log it."""
        cdef bint is_new = node.ring == SMALL + 1
        if not self.note_change(node_id, node):
            return False
        self.scans[node.ring - 1].changed = self.scans[MAIN].changed = True
        self.renew(MAIN, node_id, node)
        # Parked blocks that the scan has still to meet are before the moving block.
        if self.scans[MAIN].rest == NIL:
            self.scans[MAIN].rest = node_id
        node.note = 0 if is_new else node.note - 1
        self.small_length -= is_new
        return True

    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept:
        self.scans[SMALL].changed = self.scans[MAIN].changed = True
        self.small_length += node.ring == MAIN + 1
        return Queues.take_one(self, node_id, node) and self.leave_chain(node_id)

    # -- blocks with others behind them ------------------------------------------------------

    cdef bint leave_chain(self, uint32_t node_id) noexcept:
        """Remove a block from its chain; list the one before it if that waited for this one."""
        cdef Link* before = link_before(self.links, node_id)
        cdef uint32_t waiting = self.links[node_id].before
        cdef Ring* queue
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
        queue = &self.rings[node.ring - 1]
        if self.searching and self.positions[waiting] < self.scans[node.ring - 1].position:
            return victims_set_aside(&self.victims, queue, waiting)
        ring_list(self.table, queue, waiting, node)
        return True

    cdef inline uint32_t rank_of(self, uint32_t node_id, const Node* node) noexcept:
        """Return a block's rank in the heap, above 0: the deepest first, small before main."""
        return NIL - 2 * self.links[node_id].depth - (node.ring == SMALL + 1)

    cdef bint waits(self, uint32_t node_id, Node* node) noexcept:
        cdef Link* link = self.links + node_id
        return link.num_behind != 0 and link.rank == self.rank_of(node_id, node)

    cdef bint wait(self, uint32_t node_id, Node* node) noexcept:
        """Park a block with others behind it, held by the heap; False if there is no memory."""
        cdef uint32_t rank = self.rank_of(node_id, node)
        if self.links[node_id].rank != rank:
            if self.waiting.size + self.num_unordered == self.waiting.room:
                if not self.make_room_to_wait():
                    self.victims.no_memory = True
                    return False
            self.waiting.entries[self.waiting.size + self.num_unordered] = Entry(
                position=self.positions[node_id], rank=rank, node_id=node_id
            )
            self.num_unordered += 1
            self.links[node_id].rank = rank
        return self.park(node_id, node)

    cdef bint make_room_to_wait(self) noexcept:
        """Drop the dead entries of the heap; double its room if they are less than half."""
        cdef Entry* entries = self.waiting.entries
        cdef uint64_t kept = 0, index
        for index in range(self.waiting.size + self.num_unordered):
            if is_alive(self.links, self.positions, &entries[index]):
                entries[kept] = entries[index]
                kept += 1
        self.waiting.size = 0
        self.num_unordered = kept
        return 2 * kept < self.waiting.room or heap_grow(
            &self.waiting, kept, max(<uint64_t>SMALLEST_HEAP, 2 * self.waiting.room)
        )

    cdef void order_waiting(self) noexcept:
        """Add to the heap the entries that came since it was last read."""
        while self.num_unordered:
            self.num_unordered -= 1
            heap_push(&self.waiting, self.waiting.entries[self.waiting.size])

    cdef bint take_deepest(self, uint64_t n) noexcept:
        """Take the deepest blocks, whatever is behind them: the scans found no other."""
        cdef Entry entry
        cdef Node* node
        self.order_waiting()
        while self.waiting.size and self.victims.size < n:
            entry = heap_pop(&self.waiting)
            if not is_alive(self.links, self.positions, &entry):
                continue
            self.links[entry.node_id].rank = 0
            node = node_at(self.table, entry.node_id)
            if node.block.ref_cnt != 0 or node.flags & CHOSEN:
                continue  # it is listed when it is idle again, or is given back
            if not self.take_one(entry.node_id, node):  # it is protected, or there is no memory
                if node.flags & PARKED:
                    ring_list(self.table, &self.rings[node.ring - 1], entry.node_id, node)
                if self.victims.no_memory:
                    return False
        return self.victims.size == n

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
        cdef uint32_t node_id = victim.node_id
        cdef Node* node = node_at(self.table, node_id)
        self.links[node_id].link_id = 0
        if node.ring == MAIN + 1:
            Queues.c_evicted(self, victim)
            return
        self.leaves(node_id, node)
        self.take_off(node_id, node)
        node.note = 0
        node_id = drop_block(self.table, node_id, node)
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

    cdef void c_clear(self) noexcept:
        self.waiting.size = self.num_unordered = 0

    cdef const char* c_check(self) noexcept:
        cdef uint64_t index, linked = 0, behind = 0, held = 0, alive = 0
        cdef uint32_t node_id
        cdef Link* link
        cdef Link* before
        for node_id in range(self.table.num_used):
            if not node_at(self.table, node_id).flags & RESIDENT:
                continue
            link = self.links + node_id
            held += link.rank != 0
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
        if not heap_is_ordered(&self.waiting):
            return b"the heap of waiting blocks is ordered"
        for index in range(self.waiting.size + self.num_unordered):
            alive += is_alive(self.links, self.positions, &self.waiting.entries[index])
        if alive != held:
            return b"a block that is held has one entry of the heap"
        if self.rings[GHOSTS].size > self.most_ghosts:
            return b"ghosts are within main"
        return Queues.c_check(self)


class SieveCachePolicy(Sieve, _Sieve, CachePolicy):
    __doc__ = Sieve.__doc__
    __slots__ = ("__weakref__",)


class S3FIFOCachePolicy(S3FIFO, _S3FIFO, CachePolicy):
    __doc__ = S3FIFO.__doc__
    __slots__ = ("__weakref__",)
