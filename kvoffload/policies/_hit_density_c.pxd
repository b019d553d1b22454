"""Hit density, compiled; see ``_hit_density_c.pyx``."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ghosts cimport Ghosts, Walk
from kvoffload._core.ring cimport Ring
from kvoffload._core.table cimport Node
from kvoffload._core.victims cimport Cursor, Victim
from kvoffload.policies._duel_c cimport Duel
from kvoffload.policies._learned cimport BINS, CLASSES, SAID, Learned
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

cdef enum:
    CLASS_BITS = 4
    CLASS_MASK = 15
    # A node's `ring` and the lower bits of its `note` are its label.
    RING_NOTE = 63
    IS_RELEASED = 64        # in `note`: it is not counted, until its next use
    IS_WALKED = 128         # in `note`: it is in the walk
    MOST_SOURCES = 16

# What is known of a block.
cdef struct Record:
    uint32_t last           # number of the request that used it last
    uint32_t label          # what was said, and the class in the lower CLASS_BITS
    uint32_t owner          # the block's node, or the position of its ghost
    bint is_ghost
    bint is_released
    bint is_walked

# The rings of the blocks of which the same was said.
cdef struct Group:
    Ring rings[CLASSES]
    double rows[CLASSES][BINS]      # densities by bin of age
    uint64_t computed[CLASSES]      # number of the computation that a row is of

# The oldest block of a ring that may leave.
cdef struct Candidate:
    Ring* ring
    Cursor cursor
    uint32_t node_id
    uint32_t label          # of equals, the lowest leaves first
    uint32_t last
    double density


cdef class _HitDensity(CompiledPolicy):
    cdef double ghosts_per_block
    cdef Learned learned
    cdef Duel duel                  # None without a guard
    cdef int rule
    cdef bint counts                # a small cache of the duel reads what another cache learns
    cdef bint declines              # blocks sparser than those that they would replace
    cdef uint32_t* last             # by node: request of the last use
    cdef uint64_t num_last          # nodes that the array has room for
    cdef Ghosts memory
    cdef Walk walk                  # the records that the hand meets
    cdef int walk_shift             # one block in 2**walk_shift is in the walk
    cdef uint64_t secret[8]         # words that key the samples
    cdef Group* groups[SAID]        # by what was said; NULL before that
    cdef uint16_t open_groups[SAID]
    cdef int num_groups
    cdef Candidate* candidates
    cdef uint64_t candidate_room    # one for each ring
    cdef int num_candidates
    cdef list source_names          # of hints, by number; room for all
    cdef int num_sources
    cdef str new_source             # the last argument of `c_source`
    cdef uint64_t source_counts[MOST_SOURCES + 1][2]  # hints and returns

    cdef int build(self, int64_t capacity, double ghosts, Learned learned) except -1
    cdef void close_all(self) noexcept
    cdef tuple room_now(self, int64_t num_free)
