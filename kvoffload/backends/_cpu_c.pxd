"""The built-in pool as an object, for the compiled manager."""

from kvoffload._core.pool cimport Pool


cdef class PoolCore:
    cdef Pool pool
    cdef bint opened
