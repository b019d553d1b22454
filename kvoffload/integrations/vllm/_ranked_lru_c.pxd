"""LRU with uses counted per request, as in vLLM."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.policies._lists_c cimport Lists


cdef class RankedLRU(Lists):
    cdef uint64_t* ranks                # by node_id
    cdef uint64_t room                  # of the array
    cdef uint64_t newest                # the rank of a node that is used now
    cdef uint64_t waiting_from          # no node of the second ring's list is older
    cdef readonly uint64_t generation   # number of times it was cleared

    # Take the next rank for a request: that of its greatest position.
    cdef uint64_t open_rank(self) noexcept
    # Move to the newest end.
    cdef void renew(self, uint32_t node_id, Node* node) noexcept
    # Raise to a request's rank, never lower.
    cdef void raise_to(self, uint32_t node_id, Node* node, uint64_t rank) noexcept
    # Give a node that is on no ring a request's rank.
    cdef void join(self, uint32_t node_id, Node* node, uint64_t rank) noexcept
    cdef void give_back(self, uint32_t node_id) noexcept
    cdef bint park_waiting(self) noexcept
    cdef uint32_t find_shared(self) noexcept
    cdef bint has_lesser_key(self, uint32_t node_id, uint32_t other) noexcept


cdef inline bint is_older(RankedLRU lru, uint64_t rank, uint64_t other) noexcept:
    """Return whether a rank comes before another."""
    return lru.newest - rank > lru.newest - other


cdef inline uint64_t rank_at(uint64_t opened, int32_t reverse_position) noexcept nogil:
    """Return a request's rank at a position, from its rank at the greatest one."""
    return opened + <uint64_t>(<int64_t>INT32_MAX + reverse_position)
