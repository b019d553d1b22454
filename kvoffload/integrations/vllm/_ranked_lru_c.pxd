"""LRU with uses counted per request, as in vLLM."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvoffload._core.table cimport Node, Table
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef struct Rank:
    uint64_t rank               # greater is newer; shared by the nodes of a group
    int32_t reverse_position    # minus the token position; 0 if the rank is the node's own
    uint32_t heap_index         # IN_HEAP: index in the heap

cdef struct Group:
    uint64_t rank
    uint32_t member             # the last linked node, NIL if none; free: the next free group
    bint held                   # a request still refers to it

cdef struct Order:
    Table* table
    Rank* ranks                 # by node_id
    uint64_t ranks_room
    uint64_t first              # rank of log[0]
    uint32_t* log               # node_id, or GROUP | group_id
    uint64_t head               # entries before it were passed
    uint64_t size
    uint64_t room
    uint32_t* heap
    uint64_t heap_size
    uint64_t heap_room
    Group* groups
    uint32_t groups_size
    uint32_t groups_room
    uint32_t free_group         # stack of groups to reuse
    uint32_t aside              # idle nodes passed over as protected, linked through ``next``


cdef class RankedLRU(CompiledPolicy):
    cdef Order order
    cdef readonly uint64_t generation   # number of times it was cleared

    # Make room for `entries` moves and one provisional rank, after `c_ensure`.
    cdef bint ensure_moves(self, uint64_t entries) noexcept
    # Move to the newest end.
    cdef void renew(self, uint32_t node_id, Node* node) noexcept
    # Raise to a request's rank, never lower.
    cdef void raise_to(
        self, uint32_t node_id, Node* node, uint32_t group, int32_t reverse_position
    ) noexcept
    # Give a node that is NOWHERE a request's rank.
    cdef void join(
        self, uint32_t node_id, Node* node, uint32_t group, int32_t reverse_position
    ) noexcept
    cdef uint32_t open_group(self) noexcept
    cdef void close_group(self, uint64_t generation, uint32_t group) noexcept
