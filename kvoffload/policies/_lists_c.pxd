"""The base of compiled policies that keep their blocks on lists, least recent first."""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Node
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef class Lists(CompiledPolicy):
    cdef int num_lists          # of blocks; as many of ghosts may follow
    cdef bint prefix_joins      # a pending block was seen again if a later one of its chain was
    cdef uint64_t num_early     # victims of the search at work that leave before their turn

    # Construct the policy, with room for `ghosts_a_block` per block.
    cdef int open(self, object cache_capacity, int num_lists, int ghosts_a_block=*) except -1
    # Touch the blocks and ghosts of a policy with two lists.
    cdef void use(self, Batch* batch) noexcept
    # Adapt to the return of a ghost.
    cdef void adapt(self, Node* ghost) noexcept
    # Return the list that yields victims first; the others follow in turn.
    cdef int first_list(self) noexcept
