"""SIEVE, compiled (Zhang, Yang, Yue, Vigfusson & Rashmi, NSDI'24).

Structure
    One ring, oldest first, and a hand; a node's ``note`` is 1 if the block was visited. Nothing is
    parked: the hand passes over what cannot leave, once a lap. See ``_sieve_py`` for the Python
    twin and for where both differ from the paper.
Invariants
    A search changes marks, counts and the hand, and logs what it changed. A search that was
    cancelled is undone at the next call.
Cost
    As in the Python twin.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport qsort

from kvoffload._core.batch cimport Batch
from kvoffload._core.memory cimport discard, resize
from kvoffload._core.ring cimport ring_append, ring_renew
from kvoffload._core.table cimport NIL, Node, drop_hashed_key, hash_ahead, node_at, table_ensure
from kvoffload._core.victims cimport Victim
from kvoffload.policies._chains_c cimport (
    Chains,
    chains_check,
    chains_clear,
    chains_close,
    chains_ensure,
    chains_insert,
    chains_leave,
    chains_link,
    chains_open,
    chains_return,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, key_of

from kvoffload.policies._views import BlocksView
from kvoffload.policies.base import CachePolicy

cdef enum:
    FIRST_ROOM = 64


# A block that may leave although others are behind it.
cdef struct Deep:
    uint32_t depth
    uint32_t place          # in the order of the hand
    uint32_t slot


cdef int deeper(const void* left, const void* right) noexcept nogil:
    """Order the deepest first, then as the hand comes by."""
    cdef const Deep* one = <const Deep*>left
    cdef const Deep* other = <const Deep*>right
    if one.depth != other.depth:
        return -1 if one.depth > other.depth else 1
    return -1 if one.place < other.place else 1


cdef class _Sieve(CompiledPolicy):
    cdef Chains chains
    cdef uint32_t next_slot         # the hand: the next block to look at, NIL at a lap's end
    cdef uint32_t hand_before       # where it was before the search at work
    cdef uint32_t search            # number of the search at work or last
    cdef bint searching             # a search was not settled
    cdef uint64_t num_chosen        # its victims
    cdef uint32_t* unmarked         # blocks that it took the mark from
    cdef uint64_t num_unmarked
    cdef uint64_t unmarked_room

    def __cinit__(self):
        chains_open(&self.chains)
        self.unmarked = NULL

    def __dealloc__(self):
        chains_close(&self.chains)
        discard(self.unmarked)

    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 1, 1)
        self.c_clear()

    @property
    def blocks(self):
        """Resident blocks and their live statuses, oldest first; read-only."""
        self.require_ready()
        return BlocksView(self, 0)

    @property
    def hand(self):
        """The next block to look at; None where a lap has ended."""
        self.require_ready()
        self.undo()
        return None if self.next_slot == NIL else key_of(node_at(self.table, self.next_slot))

    cdef bint c_ensure(self, uint64_t more) noexcept:
        more += <uint64_t>len(self.storage.exports)
        return table_ensure(self.table, more) and chains_ensure(
            &self.chains, self.table.num_used + more
        )

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Py_ssize_t place
        cdef uint32_t slot
        cdef Node* node
        self.undo()
        chains_link(&self.chains, batch)
        for place in range(batch.size - 1, -1, -1):
            slot = batch.slots[place]
            if slot == NIL:
                continue
            node = node_at(self.table, slot)
            if node.block.ref_cnt >= 0:
                node.note = 1
            else:
                self.step_off(slot, node)
                ring_renew(self.table, &self.rings[0], slot, node)
                if self.next_slot == NIL:
                    self.next_slot = slot

    cdef inline void step_off(self, uint32_t slot, Node* node) noexcept:
        """Move the hand on from a block that is about to move or leave."""
        if self.next_slot == slot:
            self.next_slot = node.next

    cdef void c_insert(self, uint32_t slot, Node* node) noexcept:
        self.undo()
        node.note = 0
        chains_insert(&self.chains, slot)
        ring_append(self.table, &self.rings[0], slot, node)
        if self.next_slot == NIL:
            self.next_slot = slot

    cdef void c_removed(self, uint32_t slot, Node* node) noexcept:
        self.undo()
        chains_leave(&self.chains, slot)
        self.forget(slot, node)

    cdef void forget(self, uint32_t slot, Node* node) noexcept:
        self.chains.links[slot].number = 0
        self.step_off(slot, node)

    cdef inline bint may_leave(self, uint32_t slot, const Node* node) noexcept:
        return (
            node.block.ref_cnt == 0
            and node.block.mark != self.table.epoch
            and self.chains.links[slot].search != self.search
        )

    cdef bint c_search(self, uint64_t n) noexcept:
        self.undo()
        # This policy parks nothing, whoever drives it.
        self.victims.managed = False
        self.begin_search()
        if not self.enough(n):
            self.searching = False
            return False
        if self.sift(n) and (self.victims.size == n or self.take_deepest(n)):
            self.num_chosen = n
            return True
        self.num_chosen = self.victims.size
        self.victims.size = 0
        self.undo()
        return False

    cdef void begin_search(self) noexcept:
        cdef uint32_t slot
        self.search += 1
        if self.search == 0:
            for slot in range(self.table.num_used):
                self.chains.links[slot].search = 0
            self.search = 1
        self.searching = True
        self.hand_before = self.next_slot
        self.num_chosen = 0
        self.num_unmarked = 0

    cdef bint enough(self, uint64_t n) noexcept:
        """Tell whether `n` blocks may leave."""
        cdef uint64_t found = 0
        cdef uint32_t slot = self.rings[0].oldest
        cdef Node* node
        while slot != NIL and found < n:
            node = node_at(self.table, slot)
            found += self.may_leave(slot, node)
            slot = node.next
        return found >= n

    cdef bint sift(self, uint64_t n) noexcept:
        """Let the hand go until `n` victims are found, or a lap has changed nothing.

        Return False if there is no memory.
        """
        cdef uint64_t passed_unchanged = 0
        cdef uint32_t slot
        cdef Node* node
        while (
            self.victims.size < n
            and passed_unchanged < self.rings[0].size - self.victims.size
        ):
            slot = self.next_slot if self.next_slot != NIL else self.rings[0].oldest
            node = node_at(self.table, slot)
            self.next_slot = node.next
            if self.chains.links[slot].search == self.search:
                continue
            passed_unchanged += 1
            if not self.may_leave(slot, node):
                continue
            if node.note:
                if not self.unmark(slot, node):
                    return False
                passed_unchanged = 0
            elif self.chains.links[slot].num_behind == 0:
                if not self.choose(slot, node):
                    return False
                passed_unchanged = 0
        return True

    cdef bint unmark(self, uint32_t slot, Node* node) noexcept:
        """Take the mark of a visited block, and log it."""
        cdef uint64_t room
        cdef uint32_t* larger
        if self.num_unmarked == self.unmarked_room:
            room = max(2 * self.unmarked_room, <uint64_t>FIRST_ROOM)
            larger = <uint32_t*>resize(self.unmarked, room * sizeof(uint32_t))
            if larger == NULL:
                self.victims.no_memory = True
                return False
            self.unmarked = larger
            self.unmarked_room = room
        self.unmarked[self.num_unmarked] = slot
        self.num_unmarked += 1
        node.note = 0
        return True

    cdef bint choose(self, uint32_t slot, Node* node) noexcept:
        """Make a block a victim."""
        cdef Victim* victim
        cdef uint64_t room
        if self.victims.size == self.victims.room:
            room = max(2 * self.victims.room, <uint64_t>FIRST_ROOM)
            victim = <Victim*>resize(self.victims.items, room * sizeof(Victim))
            if victim == NULL:
                self.victims.no_memory = True
                return False
            self.victims.items = victim
            self.victims.room = room
        victim = &self.victims.items[self.victims.size]
        victim.slot = slot
        victim.ring = &self.rings[0]
        victim.hashed = hash_ahead(self.table, node)
        self.victims.size += 1
        self.chains.links[slot].search = self.search
        chains_leave(&self.chains, slot)
        return True

    cdef bint take_deepest(self, uint64_t n) noexcept:
        """Choose the deepest blocks, whatever is behind them; False if there is no memory."""
        cdef uint64_t found = 0, place
        cdef uint32_t slot = self.next_slot
        cdef uint64_t left = self.rings[0].size
        cdef bint chosen = True
        cdef Deep* deep = <Deep*>resize(NULL, left * sizeof(Deep))
        if deep == NULL:
            self.victims.no_memory = True
            return False
        for place in range(left):
            if slot == NIL:
                slot = self.rings[0].oldest
            if self.may_leave(slot, node_at(self.table, slot)):
                deep[found].depth = self.chains.links[slot].depth
                deep[found].place = <uint32_t>place
                deep[found].slot = slot
                found += 1
            slot = node_at(self.table, slot).next
        qsort(deep, found, sizeof(Deep), deeper)
        place = 0
        while chosen and self.victims.size < n:
            chosen = self.choose(deep[place].slot, node_at(self.table, deep[place].slot))
            place += 1
        discard(deep)
        return chosen

    cdef void undo(self) noexcept:
        """Take back what a search changed that was not settled."""
        cdef uint64_t place
        if not self.searching:
            return
        self.searching = False
        for place in range(self.num_unmarked):
            node_at(self.table, self.unmarked[place]).note = 1
        for place in range(self.num_chosen):
            chains_return(&self.chains, self.victims.items[place].slot)
            self.chains.links[self.victims.items[place].slot].search = 0
        self.next_slot = self.hand_before

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.slot)
        self.searching = False
        self.forget(victim.slot, node)
        self.take_off(node)
        drop_hashed_key(self.table, victim.slot, node, victim.hashed)

    cdef void c_settled(self) noexcept:
        # Reached without a victim, too: then a search that was cancelled before is undone.
        self.undo()

    cdef void c_clear(self) noexcept:
        self.searching = False
        self.next_slot = NIL
        chains_clear(&self.chains)

    cdef const char* c_check(self) noexcept:
        cdef const char* broken
        self.undo()
        broken = chains_check(&self.chains, self.table)
        if broken != NULL:
            return broken
        if self.rings[0].size != self.num_resident:
            return b"the queue holds what is resident"
        if self.next_slot != NIL and node_at(self.table, self.next_slot).ring != 1:
            return b"the hand is at a block of the queue"
        return NULL


class SieveCachePolicy(_Sieve, CachePolicy):
    """Evict the oldest block that was not used since the hand last passed it.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. SIEVE keeps it for the reader only.

    References
    ----------
    Zhang, Yang, Yue, Vigfusson & Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
    Algorithm for Web Caches", NSDI 2024.
    """

    def __init__(self, cache_capacity):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _Sieve.__init__(self, cache_capacity)
