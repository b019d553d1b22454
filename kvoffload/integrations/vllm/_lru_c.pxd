"""LRU as vLLM counts uses, by request."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.integrations.vllm._order cimport Order
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef class RankedLRU(CompiledPolicy):
    cdef Order order
    cdef readonly uint64_t generation   # how often it was cleared

    # Make room for `entries` moves and one provisional rank; call `c_ensure` before.
    cdef bint ensure_moves(self, uint64_t entries) noexcept
    # Make room for `n` victims.
    cdef bint ensure_victims(self, uint64_t n) noexcept
    # Move to the newest end.
    cdef void renew(self, uint32_t slot, Node* node) noexcept
    # Raise to a request's rank, never lower.
    cdef void raise_to(
        self, uint32_t slot, Node* node, uint32_t group, int32_t reverse_position
    ) noexcept
    # Give a node that stands nowhere a request's rank.
    cdef void join(
        self, uint32_t slot, Node* node, uint32_t group, int32_t reverse_position
    ) noexcept
    cdef uint32_t open_group(self) noexcept
    cdef void release(self, uint64_t generation, uint32_t group) noexcept
    cdef void cancel(self) noexcept
