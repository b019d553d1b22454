"""Hit density, compiled, for the classes derived from it; see ``_hit_density_c.pyx``."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Node
from kvoffload._core.victims cimport Cursor, Victim
from kvoffload.policies._densities_c cimport Densities
from kvoffload.policies._guard_c cimport Guard
from kvoffload.policies._records_c cimport Records
from kvoffload.policies._turns_c cimport NUM_RINGS
from kvoffload.policies._twin_c cimport Hint

cdef enum:
    NONE = -1

# The facts by which candidates for eviction are compared.
cdef struct Offer:
    int index               # of a ring or, NUM_RINGS greater, of a tail
    uint32_t place          # ties go to the lowest
    uint32_t age
    double density

# The oldest block of a ring that may leave.
cdef struct Candidate:
    bint present
    uint32_t node_id
    uint32_t age            # in requests
    double density


cdef class _HitDensity(Records):
    cdef double ghosts_a_block
    cdef Candidate candidates[NUM_RINGS]
    cdef Cursor cursors[NUM_RINGS]
    cdef Batch* offered             # the batch of a store that is being settled
    cdef int64_t num_admitted       # of its keys
    cdef int64_t num_offered
    cdef bint declines              # blocks sparser than those that they would replace
    cdef Guard protector
    cdef int64_t t1_size            # by ARC's rule: of ring 0, with the blocks that replace victims
    cdef double t1_target
    cdef bint has_hints             # of returns or ends: without, all are counted, with no turn
    cdef list source_names          # of hints, by number, None if not yet named
    cdef str new_source             # the last unknown argument of `c_source`
    cdef int num_sources            # that have names
    cdef bint says                  # hints at work: they say when the session returns, ...
    cdef double said                # ... in seconds, as it is counted, ...
    cdef int source                 # ... by this source

    cdef list node_ids_of_turns(self, int ring_index)
    cdef bint prepare_hints(self, int source) noexcept
    cdef void heed(self, const Hint* hint) noexcept
    cdef uint32_t new_turn(self, double now) noexcept
    cdef uint32_t turn_with(self, Batch* batch) noexcept
    cdef void note_own(self, Batch* batch) noexcept
    cdef bint last_in_batch(self, Batch* batch, Py_ssize_t index, uint32_t* last) noexcept
    cdef uint32_t part_in_batch(self, Batch* batch, Py_ssize_t index) noexcept
    cdef bint find_deepest(self, Batch* batch, uint32_t* last, uint32_t* part) noexcept
    cdef void join(self, Batch* batch, uint32_t turn) noexcept
    cdef void join_block(self, uint32_t node_id, Node* node, uint32_t turn) noexcept
    cdef void join_ghost(self, uint32_t position, uint32_t turn) noexcept
    cdef void start_ghost(self, uint32_t position) noexcept
    cdef void belong(self, uint32_t node_id, Node* node, uint32_t turn) noexcept
    cdef void belong_ghost(self, uint32_t position, uint32_t turn, int reuse_class) noexcept
    cdef void change_ring(self, uint32_t node_id, Node* node, int ring) noexcept
    cdef void serve(self, Batch* batch, bint is_timed, double now, bint ends) noexcept
    cdef uint32_t count_return(self, Batch* batch, bint is_timed) noexcept
    cdef void end_request(self, uint64_t length) noexcept
    cdef Py_ssize_t use(
        self, Batch* batch, bint finishes, uint32_t turn, uint32_t latest_age
    ) noexcept
    cdef void renew_ghost(self, uint32_t position) noexcept
    cdef bint repeats_request(self, Batch* batch) noexcept
    cdef Py_ssize_t num_stored(self, Batch* batch) noexcept
    cdef void renew(self, Batch* batch) noexcept
    cdef void renew_with_hints(self, Batch* batch) noexcept
    cdef void use_at_once(self, Batch* batch) noexcept
    cdef tuple room_now(self, int64_t num_free)
    cdef void take_in(self, uint32_t node_id, Node* node, uint32_t position) noexcept
    cdef void release_ghost(self, uint32_t position) noexcept
    cdef void offer(self, Batch* batch, int64_t admitted, int64_t n) noexcept
    cdef uint32_t ghost_offered(self, Batch* batch, int64_t index) noexcept
    cdef void open_candidates(self) noexcept
    cdef void open_tails(self) noexcept
    cdef int next_to_leave(self) noexcept
    cdef void advance(self, int ring_index) noexcept
    cdef const Densities* rule_densities(self) noexcept
    cdef double stored_density(self, uint32_t ghost_position) noexcept
    cdef double density_of(self, int index) noexcept
    cdef int next_with_turns(self) noexcept
    cdef int next_by_return(self) noexcept
    cdef void offer_of(self, int index, Offer* offer) noexcept
    cdef int sparsest(self) noexcept
    cdef void take(self, int index) noexcept
    cdef void close_candidates(self) noexcept
