"""Records of the hit-density policy: the last use and class of blocks, resident or not.

Structure
    The time of last use of each node in an array beside the nodes, its class told by its ring;
    the ghosts in two clocks; the counts of how all ages ended.
Invariants
    Every node is resident: a key without a block has no node between calls, only a ghost.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.ghosts cimport Ghosts
from kvoffload._core.table cimport Node
from kvoffload.policies._densities_c cimport NUM_CLASSES, Densities
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef enum:
    AGAIN = NUM_CLASSES     # ring of the blocks of class 0 that ARC's rule has in T2
    NUM_RINGS = NUM_CLASSES + 1


cdef inline int class_of(const Node* node) noexcept nogil:
    return node.ring - 1 if node.ring <= NUM_CLASSES else 0


cdef class Records(CompiledPolicy):
    cdef uint32_t request           # number of the request at work
    cdef uint32_t* last             # by node_id: request of the last use
    cdef uint64_t num_last          # nodes that the array has room for
    cdef Ghosts memory
    cdef Densities learned

    # Reserve room for ghosts of blocks never used again and of others.
    cdef int open_records(self, uint32_t never_reused, uint32_t reused) except -1
    cdef void clear_records(self) noexcept
    # Make a ghost, in the place of the next one to be forgotten.
    cdef void remember(self, uint64_t hashed, int reuse_class, uint32_t last) noexcept
    # Count a record that is dropped: how its age would have ended stays unknown.
    cdef void forget(self, int reuse_class, uint32_t last) noexcept
    cdef bint ensure_last(self) noexcept
    cdef void count_ages(self, int64_t change) noexcept
