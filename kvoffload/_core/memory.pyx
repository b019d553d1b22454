"""Allocation for the compiled twins, with a switch that makes it fail for the tests."""

from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport int64_t

cdef extern from "memory.h":
    void* kvo_map(size_t bytes)
    void kvo_unmap(void* address, size_t bytes)

# Allocations that still succeed; negative: all of them.
cdef int64_t allocations_left = -1


cdef inline bint must_fail() noexcept:
    global allocations_left
    if allocations_left < 0:
        return False
    if allocations_left == 0:
        return True
    allocations_left -= 1
    return False


cdef void* reserve(size_t bytes) noexcept:
    if must_fail():
        return NULL
    return kvo_map(bytes if bytes else 1)


cdef void release(void* address, size_t bytes) noexcept:
    if address != NULL:
        kvo_unmap(address, bytes if bytes else 1)


cdef void* resize(void* address, size_t bytes) noexcept:
    if must_fail():
        return NULL
    return PyMem_RawRealloc(address, bytes if bytes else 1)


cdef void discard(void* address) noexcept:
    PyMem_RawFree(address)


def fail_after(allocations):
    """Make every C allocation after that many fail, until called with None. For tests."""
    global allocations_left
    allocations_left = -1 if allocations is None else allocations
