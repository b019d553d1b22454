"""LRU with uses counted per request, as in vLLM: the policy, and the rules that drive it.

A request takes one provisional rank, which its chunks share, newest position first; when it
finishes, the chunks that it used get new ranks, tail first. The order is (rank, reverse position,
key). If no request takes a rank, as before vLLM 0.33, this is plain LRU.

Structure
    The ring of plain LRU, for nodes with a rank of their own, and a second ring for those that
    share one with their request. A node's ``ranks`` entry has the number of requests that had taken
    a rank in its upper half. The lower half is the reverse position, or its maximum for nodes of
    the first ring, whose order is that of the ring.
    The list of the second ring has no order: its nodes wait, until a search reaches
    ``waiting_from``, to be parked with their ranks as positions. Then those that are idle are found
    by rank, and of equal ones the one with the least key.
Invariants
    Every node of the second ring that was parked, and every one of the first, stands where a scan
    that started over would meet it: the next victim is the older of the two that are found next.
Cost
    O(1) for everything, O(log parked) for nodes that return from parking, or whose rank a search
    has reached; times the number of keys with the same rank and position, one per KV group. 8 bytes
    per node. Numbers of requests may wrap around, since ranks are compared by their distance from
    the newest: a node's may be up to 2**31 requests ago.
"""

cimport cython
from libc.stdint cimport INT32_MAX, UINT32_MAX, UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from kvoffload._core.batch cimport Batch
from kvoffload._core.memory cimport discard, grow
from kvoffload._core.ring cimport (
    Ring,
    ring_append,
    ring_ensure_parking,
    ring_list,
    ring_park_as,
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
    hash_ahead,
    key_bytes,
    node_at,
)
from kvoffload._core.victims cimport evictable, victims_find, victims_next, victims_set_aside
from kvoffload.integrations.vllm._request_c cimport RequestState
from kvoffload.integrations.vllm._rules_c cimport NEW, POSITIONED, Access, RequestRules
from kvoffload.policies._lists_c cimport Lists
from kvoffload.policies._twin_c cimport Hint, key_of

cdef enum:
    OWN = 0
    SHARED = 1
    LAP_BITS = 62       # of ranks, after which the order of the second ring begins at another one
    FIRST_ROOM = 64


cdef inline uint64_t rank_at(uint64_t opened, int64_t reverse_position) noexcept nogil:
    """Return a request's rank at a position, from its rank at the greatest one."""
    return opened + <uint64_t>(INT32_MAX + reverse_position)


@cython.final
cdef class RankedLRU(Lists):
    cdef uint64_t* ranks                # by node_id
    cdef uint64_t room                  # of the array
    cdef uint64_t newest                # the rank of a node that is used now
    cdef uint64_t waiting_from          # no node of the second ring's list is older
    cdef readonly uint64_t generation   # number of times it was cleared

    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 1, 2)
        self.c_clear()
        self.publish()

    def __dealloc__(self):
        discard(self.ranks)

    def _keys(self):
        """Return the resident keys, oldest first."""
        cdef list found = []
        cdef uint32_t node_id
        cdef uint64_t number
        cdef int ring_index
        self.require_ready()
        for ring_index in (OWN, SHARED):
            for number, node_id in enumerate(self.c_node_ids(ring_index)):
                found.append((
                    <uint64_t>(self.ranks[node_id] - self.newest - 1),
                    0 if ring_index == SHARED else number,
                    key_of(node_at(self.table, node_id)),
                ))
        return [key for _, _, key in sorted(found)]

    # -- moves -------------------------------------------------------------------------------

    cdef inline bint is_older(self, uint64_t rank, uint64_t other) noexcept:
        """Return whether a rank comes before another."""
        return self.newest - rank > self.newest - other

    cdef uint64_t open_rank(self) noexcept:
        """Take the next rank for a request: that of its greatest position."""
        self.newest += <uint64_t>UINT32_MAX + 1
        return self.newest - UINT32_MAX

    cdef void renew(self, uint32_t node_id, Node* node) noexcept:
        """Move a node to the newest end."""
        ring_remove(self.table, &self.rings[node.ring - 1], node)
        self.c_insert(node_id, node)

    cdef void raise_to(self, uint32_t node_id, Node* node, uint64_t rank) noexcept:
        """Raise a node to a request's rank, never lower."""
        if self.is_older(self.ranks[node_id], rank):
            ring_remove(self.table, &self.rings[node.ring - 1], node)
            self.join(node_id, node, rank)

    cdef void join(self, uint32_t node_id, Node* node, uint64_t rank) noexcept:
        """Give a node that is on no ring a request's rank."""
        if self.rings[SHARED].oldest == NIL or self.is_older(rank, self.waiting_from):
            self.waiting_from = rank
        self.ranks[node_id] = rank
        ring_append(self.table, &self.rings[SHARED], node_id, node)

    # -- the steps of a policy ---------------------------------------------------------------

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return Lists.c_ensure(self, more) and grow(
            <void**>&self.ranks, &self.room, self.table.num_ready, sizeof(uint64_t), FIRST_ROOM
        )

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Py_ssize_t index
        for index in range(batch.size - 1, -1, -1):
            if batch.node_ids[index] != NIL:
                self.renew(batch.node_ids[index], node_at(self.table, batch.node_ids[index]))

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        self.ranks[node_id] = self.newest
        ring_append(self.table, &self.rings[OWN], node_id, node)

    cdef bint choose(self, uint64_t n) noexcept:
        cdef uint32_t own, shared = NIL
        cdef Ring* ring = &self.rings[SHARED]
        self.victims.managed = True  # even if its manager is gone: it shows no statuses
        while self.victims.size < n and not self.victims.no_memory:
            own = NIL
            if victims_next(&self.victims, self.table, &self.rings[OWN], NULL):
                own = self.victims.items[self.victims.size - 1].node_id
            if shared == NIL and (ring.num_listed or ring.oldest != NIL and (
                own == NIL or self.is_older(self.waiting_from, self.ranks[own])
            )):
                shared = self.find_shared()
            if shared != NIL and (own == NIL or self.is_older(self.ranks[shared], self.ranks[own])):
                if own != NIL:
                    self.give_back(own)
                if not self.take_one(shared, node_at(self.table, shared)):
                    break
                shared = NIL
            elif own != NIL:
                self.victims.items[self.victims.size - 1].hashed = hash_ahead(
                    self.table, node_at(self.table, own)
                )
            else:
                break
        if shared != NIL:
            self.became_idle(shared, node_at(self.table, shared))
        return self.victims.size == n and not self.victims.no_memory

    cdef void give_back(self, uint32_t node_id) noexcept:
        """Give the last victim back, for one that is older."""
        cdef Node* node = node_at(self.table, node_id)
        self.victims.size -= 1
        node.flags &= <uint8_t>(~CHOSEN & 0xFF)
        self.became_idle(node_id, node)

    cdef uint32_t find_shared(self) noexcept:
        """Return the next victim of the second ring, or NIL; it is parked."""
        cdef Ring* ring = &self.rings[SHARED]
        cdef uint32_t found, other
        cdef uint64_t num_aside
        if not self.park_waiting():
            return NIL
        found = victims_find(&self.victims, self.table, ring, NULL)
        num_aside = self.victims.num_aside
        while found != NIL:
            other = ring_unlist_before(self.table, ring, self.ranks[found] + 1)
            if other == NIL:
                break
            if self.has_lesser_key(other, found) and evictable(
                self.table, node_at(self.table, other)
            ):
                found, other = other, found
            if not victims_set_aside(&self.victims, ring, other):
                ring_list(self.table, ring, other, node_at(self.table, other))
                break
        while self.victims.num_aside > num_aside:
            self.victims.num_aside -= 1
            other = self.victims.aside[self.victims.num_aside].node_id
            ring_list(self.table, ring, other, node_at(self.table, other))
        return found

    cdef bint park_waiting(self) noexcept:
        """Park the nodes of the second ring's list; False if there is no memory."""
        cdef Ring* ring = &self.rings[SHARED]
        cdef uint32_t node_id
        cdef Node* node
        ring_start_at(self.table, ring, ((self.newest >> LAP_BITS) + 1) << LAP_BITS)
        while ring.oldest != NIL:
            if not ring_ensure_parking(ring):
                self.victims.no_memory = True
                return False
            node_id = ring.oldest
            node = node_at(self.table, node_id)
            ring_park_as(self.table, ring, node, self.ranks[node_id])
            if node.block.ref_cnt == 0:
                ring_list(self.table, ring, node_id, node)
        return True

    cdef bint has_lesser_key(self, uint32_t node_id, uint32_t other) noexcept:
        cdef uint64_t length, other_length
        cdef const uint8_t* key = key_bytes(node_at(self.table, node_id), &length)
        cdef const uint8_t* other_key = key_bytes(node_at(self.table, other), &other_length)
        cdef int difference = memcmp(key, other_key, min(length, other_length))
        return difference < 0 if difference else length < other_length

    cdef void c_clear(self) noexcept:
        self.generation += 1
        self.newest = self.waiting_from = UINT32_MAX
        self.rings[SHARED].next_position = UINT64_MAX  # every rank may be a position

    cdef const char* c_check(self) noexcept:
        cdef uint32_t node_id, before = NIL
        cdef Node* node
        if self.rings[OWN].size + self.rings[SHARED].size != self.num_resident:
            return b"resident is the union of the two rings"
        node_id = self.rings[OWN].oldest
        while node_id != NIL:
            if before != NIL and self.is_older(self.ranks[node_id], self.ranks[before]):
                return b"the first ring is in the order of ranks"
            before = node_id
            node_id = node_at(self.table, node_id).next
        node_id = self.rings[SHARED].oldest
        while node_id != NIL:
            if self.is_older(self.ranks[node_id], self.waiting_from):
                return b"no waiting node is older than the least rank of all"
            node_id = node_at(self.table, node_id).next
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.flags & (PARKED | LISTED) == PARKED and node.block.ref_cnt == 0:
                return b"every parked node that is idle is listed"
        return NULL


@cython.final
cdef class LRURules(RequestRules):
    cdef RankedLRU lru

    def __cinit__(self, RankedLRU policy not None, bint ranked=False):
        self.lru = policy

    cdef uint64_t rank_of(self, RequestState state) noexcept:
        """Return the rank of a request at the greatest position; it takes one if it has none."""
        if state.ranking is not self.lru or state.generation != self.lru.generation:
            state.ranking = self.lru
            state.generation = self.lru.generation
            state.opened = self.lru.open_rank()
        return state.opened

    cdef void accessed(self, Batch* batch, const Access* accesses, RequestState state) noexcept:
        cdef Py_ssize_t index
        cdef Node* node
        cdef uint64_t rank
        if not self.ranked:
            return
        for index in range(batch.size):
            if not accesses[index].flags & NEW:
                continue
            rank = self.rank_of(state)
            if batch.node_ids[index] == NIL or not accesses[index].flags & POSITIONED:
                continue
            node = node_at(self.policy.table, batch.node_ids[index])
            if node.flags & RESIDENT:
                self.lru.raise_to(
                    batch.node_ids[index],
                    node,
                    rank_at(rank, accesses[index].reverse_position),
                )

    cdef void insert(
        self, uint32_t node_id, Node* node, const Access* access, RequestState state
    ) noexcept:
        if not access.flags & POSITIONED:
            self.lru.c_insert(node_id, node)
            return
        self.lru.join(node_id, node, rank_at(self.rank_of(state), access.reverse_position))

    cdef void finished(self, Batch* batch, const Access* accesses, const Hint* hint) noexcept:
        self.lru.c_touch(batch)
