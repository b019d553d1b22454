"""A miniature, compiled: see ``_miniature_py``."""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

cdef enum:
    NUM_COUNTS = 5  # of a row that was served

# A block that is being stored, and the position of the request that stores it.
cdef struct Storing:
    double position
    uint32_t node_id


cdef class Miniature:
    cdef readonly CompiledPolicy policy
    cdef Py_ssize_t most            # blocks of a request for which everything is reserved
    cdef readonly uint64_t asked    # blocks, since the construction, as are the next four
    cdef readonly uint64_t hits
    cdef readonly uint64_t stored
    cdef readonly uint64_t evicted
    cdef readonly uint64_t not_admitted
    cdef readonly uint64_t refused  # stores
    cdef bint no_memory             # the last store lacked it
    cdef Batch batch                # of the request at work
    cdef Py_ssize_t first           # of its blocks, the half-open slice that it asks for
    cdef Py_ssize_t stop
    cdef PyObject** items           # (room,) borrowed keys
    cdef uint64_t room
    cdef const uint32_t* numbers    # (batch.size,) its blocks' ids; NULL: all 0
    cdef uint32_t* left             # (left_room,), of them `num_left`: the ids of its victims
    cdef uint64_t left_room
    cdef uint64_t num_left
    cdef Storing* storing           # (storing_room,), those from `oldest` on, oldest first
    cdef uint64_t storing_room
    cdef uint64_t oldest
    cdef uint64_t num_storing

    # Make room for requests of that size; False if there is no memory.
    cdef bint ensure(self, Py_ssize_t size) noexcept
    # Take the keys of a batch at these indexes, and ask for all; they stay the caller's.
    cdef void take(self, const Batch* asked, const uint32_t* indexes, Py_ssize_t size) noexcept
    # Serve the request that was taken; return the number of leading blocks that were ready. `last`
    # is its hint at the end. Stores that began before the position `before` have ended. It
    # finds its own blocks ready when it finishes if its store ends `early`.
    cdef Py_ssize_t c_serve(
        self, const Hint* hint, const Hint* last, bint ends, double position, double before,
        bint early=*,
    ) noexcept
    cdef void mark_own(self, int32_t ref_cnt) noexcept
    # Serve a row of a trace, whose numbers are set; return False if there is no memory. If it
    # `is_told` anything, note its session; release the blocks if that ends: there is room.
    cdef bint serve_row(
        self, const Hint* hint, const Hint* last, bint is_told, double position, double before
    ) noexcept
    cdef Py_ssize_t ask(self) noexcept
    cdef void end_own(self, const Batch* own) noexcept
    # Store the missing blocks of a batch, until the position, as far as the policy admits them, which
    # are the chosen ones; return -1 if it is refused, or if there is no memory. With NaN the caller
    # ends the store.
    cdef Py_ssize_t store(self, Batch* batch, double position, bint ends) noexcept
    cdef void note_storing(self, uint32_t node_id, double position) noexcept
    # Apply a hint that came at the end of the request that was taken.
    cdef void c_finish(self, const Hint* hint) noexcept
    # Release the blocks that were taken; the policy has made room.
    cdef void c_release(self) noexcept
    cdef list open(self, object hashes)
    cpdef void end_stores(self, double before) noexcept
    cpdef void clear(self) noexcept
    # Note the counts so far; see `serve_rows`.
    cdef void note_counts(self, int64_t* count) noexcept


# Return the address of the elements of a contiguous one-dimensional array.
cdef void* data_of(str name, object array, int kind) except? NULL
