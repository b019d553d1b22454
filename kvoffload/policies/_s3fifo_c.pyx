"""S3-FIFO, compiled (Yang, Zhang, Qiu, Yue & Rashmi, SOSP'23).

Structure
    Three rings of one table: small, main and the ghosts. A block's count is its node's ``note``.
    See ``_queue_policy_c`` for the search, ``_s3fifo_py`` for the Python twin and the differences
    from the paper.
Invariants
    A search logs each block that it moves, with its former position and count.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of blocks in use or with
    others behind them; O(n log resident) if all idle blocks have others behind them.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.memory cimport discard, grow
from kvoffload._core.ring cimport ring_append, ring_list, ring_remove
from kvoffload._core.table cimport NIL, PARKED, Node, drop_block, drop_hashed_key, drop_key, node_at
from kvoffload._core.victims cimport Victim, victims_list_aside, victims_set_aside
from kvoffload.policies._chains_c cimport chains_insert, chains_link
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


cdef class _S3FIFO(QueuePolicy):
    cdef int64_t _small_size        # blocks that small is meant to hold
    cdef int64_t small_length       # small's, with the blocks that replace the victims so far
    cdef bint any_promoted          # by the scan at work
    cdef Scan scans[2]
    cdef Move* moves
    cdef uint64_t num_moves
    cdef uint64_t moves_room

    def __cinit__(self):
        self.moves = NULL

    def __dealloc__(self):
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
                scan.position = self.chains.links[node_id].position
                scan.left -= 1
                if not self.may_leave(node):
                    if self.is_worth_parking(node) and not self.park(queue_index, node_id, node):
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

    cdef bint c_became_tail(self, uint32_t node_id, Node* node) noexcept:
        """Put a block where a scan of its queue will meet it, this scan if it is still to come."""
        cdef int queue_index = node.ring - 1
        cdef Scan* scan = &self.scans[queue_index]
        if self.searching:
            if self.chains.links[node_id].position < scan.position:
                return victims_set_aside(&self.victims, &self.rings[queue_index], node_id)
            scan.left += 1
        ring_list(self.table, &self.rings[queue_index], node_id, node)
        return True

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
        made.position = self.chains.links[node_id].position
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

    cdef void c_undo(self) noexcept:
        cdef Move* made
        cdef Node* node
        while self.num_moves:
            self.num_moves -= 1
            made = &self.moves[self.num_moves]
            node = node_at(self.table, made.node_id)
            if self.chains.links[made.node_id].waiting:
                self.wait_no_longer(made.node_id)
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
        cdef uint32_t node_id
        cdef Node* node
        # Reached even without a victim; a search cancelled before is then undone.
        self.undo()
        while self.rings[GHOSTS].size > <uint64_t>(self.capacity - self._small_size):
            node_id = self.rings[GHOSTS].oldest
            node = node_at(self.table, node_id)
            ring_remove(self.table, &self.rings[GHOSTS], node)
            # A ghost of the batch at work is about to be inserted: its key stays.
            if node.block.mark != self.table.epoch:
                drop_key(self.table, node_id, node)

    cdef uint64_t c_num_ghosts(self) noexcept:
        return self.rings[GHOSTS].size

    cdef void c_clear(self) noexcept:
        QueuePolicy.c_clear(self)

    cdef const char* c_check(self) noexcept:
        cdef uint32_t node_id
        cdef Node* node
        self.undo()
        if self.rings[SMALL].size + self.rings[MAIN].size != self.num_resident:
            return b"resident is small and main"
        if self.rings[GHOSTS].size > <uint64_t>(self.capacity - self._small_size):
            return b"ghosts are within main"
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.ring and node.note > MOST_COUNTED:
                return b"counts are 0 ... 3"
        return self.check_queues()


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
