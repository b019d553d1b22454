"""Hit density, compiled; see ``_hit_density_c.pyx``."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ghosts cimport Ghosts
from kvoffload._core.ring cimport Ring
from kvoffload._core.table cimport Node
from kvoffload._core.victims cimport Cursor, Victim
from kvoffload.policies._duel_c cimport Duel
from kvoffload.policies._learned cimport BINS, CLASSES, SAID, Learned
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

cdef enum:
    IS_GHOST = 1            # the owner is a ghost, not a node
    IS_RELEASED = 2         # it is not counted, until its next use
    IS_SAMPLED = 4          # the duel's miniatures serve it
    MOST_SOURCES = 16

# The label of a block and its last use.
cdef struct Record:
    uint32_t last           # number of the request
    uint32_t owner          # the block's node, or the position of its ghost
    uint16_t said           # source * STEPS + step; 0: nobody said anything
    uint8_t reuse_class
    uint8_t flags           # IS_GHOST, ...

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
    uint32_t label          # said * CLASSES + class; of equals, the lowest leaves first
    uint32_t last
    double density


cdef class _HitDensity(CompiledPolicy):
    cdef double ghosts_per_block
    cdef Learned learned
    cdef Duel duel                  # None without a guard
    cdef int rule
    cdef bint counts                # a small cache of the duel reads what another cache learns
    cdef bint declines              # blocks sparser than those that they would replace
    cdef Record* records            # (num_records,), in the order of the walk
    cdef uint64_t num_records
    cdef uint64_t record_room
    cdef uint32_t* record_of        # by node
    cdef uint64_t num_record_of     # nodes that the array has room for
    cdef uint64_t hand              # of the walk
    cdef Ghosts memory
    cdef Group* groups[SAID]        # by what was said; NULL before that
    cdef uint16_t open_groups[SAID]
    cdef int num_groups
    cdef Candidate* candidates
    cdef uint64_t candidate_room    # one for each ring
    cdef int num_candidates
    cdef list source_names          # of hints, by number
    cdef str new_source             # the last argument of `c_source`
    cdef uint64_t source_counts[MOST_SOURCES + 1][2]  # hints and returns

    cdef void close_all(self) noexcept
    cdef bint ensure_records(self) noexcept
    cdef bint ensure_said(self, uint32_t said) noexcept
    cdef bint open_group(self, uint32_t said) noexcept
    cdef uint32_t heed(self, const Hint* hint) noexcept
    cdef void hash_unknown(self, Batch* batch) noexcept
    cdef uint32_t find_record(self, const Batch* batch, Py_ssize_t index) noexcept
    cdef bint is_used(self, const Batch* batch) noexcept
    cdef void note_sampled(self, Batch* batch) noexcept
    cdef void sample_time(self, Py_ssize_t length) noexcept
    cdef void use(self, Batch* batch, uint32_t said) noexcept
    cdef void renew(self, const Batch* batch) noexcept
    cdef bint relabel(self, const Batch* batch, uint32_t said) noexcept
    cdef uint32_t new_record(
        self, uint32_t said, int reuse_class, uint32_t owner, uint8_t flags
    ) noexcept
    cdef void forget(self, uint32_t record_id) noexcept
    cdef void forget_oldest(self, int list_index) noexcept
    cdef void add_ghost(self, uint32_t record_id, uint64_t hashed) noexcept
    cdef void to_most_recent(self, uint32_t record_id) noexcept
    cdef void move(self, uint32_t record_id, uint32_t said, int reuse_class) noexcept
    cdef void put_on_ring(self, const Record* record) noexcept
    cdef Ring* ring_of(self, const Record* record) noexcept
    cdef const double* row_of(self, uint32_t said, int reuse_class) noexcept
    cdef tuple room_now(self, int64_t num_free)
    cdef void open_candidates(self) noexcept
    cdef bint advance(self, Candidate* candidate) noexcept
    cdef Candidate* next_to_leave(self) noexcept
    cdef void take(self, Candidate* candidate) noexcept
    cdef void close_candidates(self) noexcept
