"""Records of the hit-density policy: the last use and class of blocks, resident or not.

Structure
    An array beside the nodes holds each node's time of last use; its ring determines its class. Two
    clocks hold the ghosts; counts record how all ages ended. The *note* of a record is the flags of
    a ghost, or a node's `note`: UNCOUNTED, SHARED. A block that belongs to a turn is on no ring of
    the policy, but one of the turns'; `ring` of its node is NUM_RINGS greater.
Invariants
    Every node is resident: a key without a block has no node between calls, only a ghost.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.ghosts cimport Ghosts
from kvoffload._core.table cimport Node
from kvoffload.policies._densities_c cimport NUM_CLASSES, Densities
from kvoffload.policies._hinted_c cimport Hinted
from kvoffload.policies._turns_c cimport AGAIN, NUM_RINGS
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef inline int ring_of(const Node* node) noexcept nogil:
    """Return the ring of a block's class, or AGAIN."""
    return <int>(<uint32_t>(node.ring - 1) % NUM_RINGS)


cdef inline int class_of(const Node* node) noexcept nogil:
    cdef int ring = ring_of(node)
    return ring if ring < NUM_CLASSES else 0


cdef class Records(CompiledPolicy):
    cdef uint32_t request           # number of the request at work
    cdef uint32_t* last             # by node_id: request of the last use
    cdef uint64_t num_last          # nodes that the array has room for
    cdef Ghosts memory
    cdef Densities learned
    cdef Hinted* prepared           # room for the state that hints create; NULL before any
    cdef Hinted* hinted             # the same once a hint was given, else NULL

    # Reserve room for ghosts of blocks never used again and of others.
    cdef int open_records(self, uint32_t never_reused, uint32_t reused) except -1
    cdef void clear_records(self) noexcept
    # Make a ghost, in place of the next one to forget.
    cdef void remember(
        self, uint64_t hashed, int reuse_class, uint32_t last, uint8_t note, uint32_t part
    ) noexcept
    # Count a record that is dropped; the end of its age stays unknown.
    cdef void forget(self, int reuse_class, uint32_t last, uint8_t note, uint32_t part) noexcept
    # Return the part of a ghost, 0 for none.
    cdef uint32_t part_of_ghost(self, uint32_t position) noexcept
    cdef void forget_hints(self) noexcept
    cdef bint ensure_last(self) noexcept
    cdef bint ages_are_counted(self, Densities* densities, bint of_turns) noexcept
    cdef void count_ages(self, Densities* densities, bint of_turns, int64_t change) noexcept
    cdef const char* check_turns(self) noexcept
