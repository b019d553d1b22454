"""A miniature, compiled: see ``_miniature_py``."""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t

from kvoffload._core.batch cimport Batch
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

# A block that is being stored, and the request that stores it.
cdef struct Storing:
    uint32_t node_id
    uint32_t request


cdef class Miniature:
    cdef readonly CompiledPolicy policy
    cdef Batch batch
    cdef PyObject** items           # (most,) borrowed keys of the request at work
    cdef Py_ssize_t most            # blocks of a request that are examined
    cdef Storing* storing           # (capacity,) a ring buffer, oldest first
    cdef uint32_t oldest
    cdef uint32_t num_storing

    # Take the keys of a batch at these indexes; they stay the caller's.
    cdef void take(self, const Batch* asked, const uint32_t* indexes, Py_ssize_t size) noexcept
    # Serve the request that was taken; return the number of leading blocks that were ready.
    cdef Py_ssize_t serve(
        self, const Hint* hint, bint ends, uint32_t request, uint32_t lag
    ) noexcept
    cdef void store(self, uint32_t request, bint ends) noexcept
    cdef void finish(self, const Hint* hint) noexcept
    cdef void release(self) noexcept
    cdef bint ensure_release(self) noexcept
    cdef void clear(self) noexcept


# Give the missing keys of a batch nodes, and choose them once each; -1 without memory.
cdef Py_ssize_t choose_missing(
    CompiledPolicy policy, Batch* batch, const uint8_t* left_out
) noexcept
