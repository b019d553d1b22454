"""The base of compiled policies that keep their blocks on lists, least recent first."""

from libc.stdint cimport uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Node
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef class Lists(CompiledPolicy):
    # A subclass sets these before the constructor runs.
    cdef int num_lists          # of blocks; as many of ghosts follow, if there are any
    cdef int ghosts_a_block     # room for ghosts, per block; 0: an evicted block is forgotten
    cdef bint prefix_joins      # a pending block was seen again if a later one of its chain was
    cdef int turn               # the list that yielded the last victim of a search

    # Touch the blocks and ghosts of a policy with two lists.
    cdef void use(self, Batch* batch) noexcept
    # Adapt to the return of a ghost.
    cdef void adapt(self, Node* ghost) noexcept
    # Return the list that yields victims first; the others follow in turn.
    cdef int first_list(self) noexcept
    # Choose victims, besides those chosen already, until there are `n`; False if there are fewer.
    cdef bint choose(self, uint64_t n) noexcept
