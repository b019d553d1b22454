"""The built-in pool as an object, for the compiled manager."""

from libc.stdint cimport int64_t, uint8_t

from kvoffload._core.pool cimport Pool


cdef class PoolCore:
    cdef Pool pool
    cdef bint opened
    cdef uint8_t* lent      # one bit an id: given by `allocate_blocks`, not to a manager

    cdef void close(self) noexcept
    cdef int require_open(self) except -1
    cdef bint is_lent(self, int64_t block_id) noexcept
