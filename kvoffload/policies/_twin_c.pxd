"""The base of compiled policies: the C interface that the compiled manager calls."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ring cimport Ring
from kvoffload._core.table cimport Node, Storage, Table
from kvoffload._core.victims cimport Victim, Victims
from kvoffload.policies._released_c cimport Released

cdef enum:
    MOST_RINGS = 20
    MOST_SOURCES = 16       # of hints, as in ``types``


# The hints of a client on its session.
cdef struct Hint:
    double expect_s         # seconds until the next request that begins alike; 0: not said
    int source              # the number that the policy's `c_source` returns for the name
    bint ends


cdef class CollectorOff:
    cdef int collecting


cdef class CompiledPolicy:
    cdef Storage storage
    cdef void* owner                # the manager that the policy belongs to, NULL if it is free
    cdef bint was_owned             # it is free again, and unchanged since
    cdef Table* table               # storage's; NULL until `publish`
    cdef Victims victims            # the search for victims at work
    cdef Released released          # blocks that leave before all others
    cdef Batch batch                # of calls on the policy itself
    cdef Ring rings[MOST_RINGS]     # rings[i] has id i + 1
    cdef int num_rings
    cdef uint64_t num_resident
    cdef int64_t capacity           # in blocks

    # Reserve room for `nodes_a_block` keys a block and open `num_rings` rings.
    cdef int set_up(self, object cache_capacity, int nodes_a_block, int num_rings) except -1
    # End a construction that has not failed: from here on the methods work.
    cdef void publish(self) noexcept
    cdef int require_ready(self) except -1
    # Raise if a manager owns the policy, or it is not ready. Runs no Python code.
    cdef int require_free(self, str call) except -1
    # Join a manager; leave it again.
    cdef void join_manager(self, void* manager) noexcept
    cdef void leave_manager(self, void* manager) noexcept
    cdef int stand_alone(self) except -1
    cdef list open_batch(self, object hashes, str name, str call)
    cdef int finish_alone(self, object hashes) except -1
    cdef void clear_now(self) noexcept
    cdef bint c_ensure(self, uint64_t more) noexcept

    # -- uses and releases, as managers make them ------------------------------------------
    # Withdraw the releases of used blocks; nodes are found.
    cdef void take_back(self, Batch* batch) noexcept
    cdef void touch_batch(self, Batch* batch) noexcept
    cdef void begin_request(self, Batch* batch, const Hint* hint) noexcept
    cdef void extend_request(self, Batch* batch) noexcept
    cdef void finish_request(self, Batch* batch, const Hint* hint) noexcept
    # Make room to release `n` blocks, also if they are not known yet; False if there is no memory.
    cdef bint ensure_release(self, Py_ssize_t n) noexcept
    # Take released blocks that may leave as the first victims, at most `n` in all; False without
    # memory.
    cdef bint take_released(self, uint64_t n) noexcept
    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept
    cdef const char* check_released(self) noexcept
    cdef const char* find_broken(self) noexcept
    # Count the released blocks that may leave, up to `most`.
    cdef uint64_t count_released(self, uint64_t most) noexcept

    # -- methods that a policy defines ----------------------------------------------------
    # Touch the batch, last key first; nodes are found, NIL where unknown.
    cdef void c_touch(self, Batch* batch) noexcept
    # Put a node that has received a block on its ring. It may still be a ghost, on a ghost ring.
    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept
    # Search for exactly `n` victims; False, with the search cancelled, if there are fewer.
    cdef bint c_search(self, uint64_t n) noexcept
    # Handle a resident block that is about to be dropped, not evicted; it is still on its ring.
    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept
    # Called when all victims of a search are gone.
    cdef void c_settled(self) noexcept
    cdef uint64_t c_num_ghosts(self) noexcept
    cdef void c_clear(self) noexcept
    # Called when all blocks are on the lists of their rings again and none is parked.
    cdef void c_unparked(self) noexcept
    cdef const char* c_check(self) noexcept

    # -- methods that a policy may redefine -----------------------------------------------
    # Remove a victim from its ring; it is dropped, or becomes a ghost.
    cdef void c_evicted(self, const Victim* victim) noexcept
    # Touch the blocks that extend a request; this begins no request.
    cdef void c_extended(self, Batch* batch) noexcept
    # Touch the blocks of a finishing request: they become recent; this counts as no further use.
    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept
    # Touch the blocks of a beginning request; `hint` is NULL without hints.
    cdef void c_begun(self, Batch* batch, const Hint* hint) noexcept
    # Return `hint`, filled from `hints`, or NULL without hints; this may run Python code.
    # `is_second`: the call at work has filled another one, which it uses first.
    cdef const Hint* hint_of(self, object hints, Hint* hint, bint is_second=*) except? NULL
    # Return the number by which the policy knows a source of hints, or will once it is used.
    cdef int c_source(self, str source) except -1
    # Release the batch's blocks but for nodes with a flag of `kept`, last first; room was made.
    cdef void c_release(self, Batch* batch, uint8_t kept) noexcept
    # Answer as `c_make_room`, taking only free slots and those of released blocks.
    cdef int64_t c_make_room_of_released(
        self, Batch* batch, int64_t n, int64_t num_free
    ) noexcept
    # For a search while more than a quarter is pinned: park up to `most` blocks in use at the old
    # end of each ring.
    cdef void c_park(self, uint64_t most) noexcept
    # The nodes of a ring, from 0, least recent first.
    cdef list c_node_ids(self, int ring_index)
    # Answer how many of the `n` chosen keys of the batch to store, with the victims in
    # `victims`; -1, with the search cancelled, to refuse.
    cdef int64_t c_make_room(self, Batch* batch, int64_t n, int64_t num_free) noexcept
    # End a search that will not be settled, and give its victims back.
    cdef void cancel(self) noexcept

    # -- shared steps ---------------------------------------------------------------------
    cdef void take_off(self, uint32_t node_id, Node* node) noexcept
    cdef void became_idle(self, uint32_t node_id, Node* node) noexcept
    cdef void commit(self) noexcept
    cdef int require_ring(self, int ring_index) except -1
    cdef void mark_protected(self) noexcept
    cdef list let_go(self)


cdef bytes key_of(Node* node)
# Return the node of a key, or NIL.
cdef uint32_t find_key(CompiledPolicy policy, bytes block_hash) noexcept
