"""SIEVE, compiled (Zhang, Yang, Yue, Vigfusson & Rashmi, NSDI'24).

Structure
    One ring, oldest first, and a hand, which is a position in it (see ``_queue_policy_c``): the
    ring's ``start``. A node's ``note`` is 1 if the block was visited. See ``_sieve_py`` for the
    Python twin and the differences from the paper.
Invariants
    ``next_node_id`` is the first block of the list from the hand on. A search logs the hand's
    position and the blocks whose mark it clears.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of blocks in use. A mark
    is cleared once per use.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.memory cimport discard, grow
from kvoffload._core.ring cimport Ring, parking_position, ring_start_at
from kvoffload._core.table cimport NIL, PARKED, Node, drop_hashed_key, node_at
from kvoffload._core.victims cimport Victim, evictable
from kvoffload.policies._queue_policy_c cimport QueuePolicy
from kvoffload.policies._twin_c cimport key_of

from kvoffload.policies._views import BlocksView
from kvoffload.policies.base import CachePolicy

cdef enum:
    FIRST_ROOM = 64


cdef class _Sieve(QueuePolicy):
    cdef uint32_t next_node_id      # the next block of the list to look at, NIL at its end
    cdef uint64_t hand_before       # where the hand was before the search at work
    cdef uint32_t* unmarked         # blocks whose mark the search cleared
    cdef uint64_t num_unmarked
    cdef uint64_t unmarked_room

    def __cinit__(self):
        self.unmarked = NULL

    def __dealloc__(self):
        discard(self.unmarked)

    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 1, 1)
        self.num_queues = 1
        self.c_clear()
        self.publish()

    @property
    def blocks(self):
        """Resident blocks and their live statuses, oldest first; read-only."""
        self.require_ready()
        return BlocksView(self, 0)

    @property
    def hand(self):
        """The next block to examine; None if the queue ends at the hand."""
        cdef Ring* queue = &self.rings[0]
        cdef uint32_t node_id, first
        cdef uint64_t position
        cdef Node* node
        self.require_ready()
        self.undo()
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
        self.undo()
        node.note = 0
        self.join(0, node_id, node)
        if self.next_node_id == NIL:
            self.next_node_id = node_id

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        self.undo()
        self.step_off(node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        self.undo()
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.block.ref_cnt >= 0:
                node.note = 1
            else:
                self.step_off(node_id, node)
                self.renew(0, node_id, node)
                if self.next_node_id == NIL:
                    self.next_node_id = node_id

    cdef inline void step_off(self, uint32_t node_id, Node* node) noexcept:
        """Move the hand past a block that is about to move or leave."""
        if self.next_node_id == node_id:
            self.next_node_id = node.next

    cdef bint c_sift(self, uint64_t n) noexcept:
        """Move the hand until `n` victims are found, or a lap has found and changed nothing."""
        cdef Ring* queue = &self.rings[0]
        cdef uint64_t num_skipped = 0   # protected blocks in a row
        cdef uint32_t node_id
        cdef Node* node
        self.hand_before = queue.start
        self.num_unmarked = 0
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
                if not self.skip(0, node_id, node):
                    return False
                num_skipped += not node.flags & PARKED
                continue
            if not (self.unmark(node_id) if node.note else self.choose(0, node_id, node)):
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

    cdef bint unmark(self, uint32_t node_id) noexcept:
        """Clear the mark of a visited block, and log it."""
        if self.num_unmarked == self.unmarked_room and not grow(
            <void**>&self.unmarked,
            &self.unmarked_room,
            self.num_unmarked + 1,
            sizeof(uint32_t),
            FIRST_ROOM,
        ):
            self.victims.no_memory = True
            return False
        self.unmarked[self.num_unmarked] = node_id
        self.num_unmarked += 1
        node_at(self.table, node_id).note = 0
        return True

    cdef void c_undo(self) noexcept:
        cdef uint64_t index
        for index in range(self.num_unmarked):
            node_at(self.table, self.unmarked[index]).note = 1
        self.put_hand(self.hand_before)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        self.searching = False
        self.step_off(victim.node_id, node)
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, victim.hashed)

    cdef void c_settled(self) noexcept:
        # Reached even without a victim; a search cancelled before is then undone.
        self.undo()

    cdef void c_unparked(self) noexcept:
        self.put_hand(self.rings[0].start)

    cdef void c_clear(self) noexcept:
        QueuePolicy.c_clear(self)
        self.next_node_id = NIL

    cdef const char* c_check(self) noexcept:
        cdef uint32_t node_id
        self.undo()
        if self.rings[0].size != self.num_resident:
            return b"the queue holds what is resident"
        node_id = self.rings[0].oldest
        while node_id != NIL and self.positions[node_id] < self.rings[0].start:
            node_id = node_at(self.table, node_id).next
        if node_id != self.next_node_id:
            return b"the next block is the first from the hand on"
        return self.check_queues()


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
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _Sieve.__init__(self, cache_capacity)
