"""Bins of a histogram over many orders of magnitude."""

from libc.stdint cimport uint32_t

cdef extern from *:
    int __builtin_clz(unsigned int) nogil


cdef inline int log_bin(uint32_t value, int bits) noexcept nogil:
    """Return the bin of a value: exact below ``2**bits``, then so many for each doubling."""
    cdef int shift
    if value < <uint32_t>1 << bits:
        return <int>value
    shift = 31 - __builtin_clz(value) - bits
    return (shift << bits) + <int>(value >> shift)
