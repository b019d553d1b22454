"""Allocation for the compiled twins; see ``memory.pxd``."""

from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

cdef extern from "memory.h":
    void* kvo_map(size_t bytes)
    void kvo_unmap(void* address, size_t bytes)
    bint kvo_refused()


cdef void* reserve(size_t bytes) noexcept:
    if kvo_refused():
        return NULL
    return kvo_map(bytes if bytes else 1)


cdef void release(void* address, size_t bytes) noexcept:
    if address != NULL:
        kvo_unmap(address, bytes if bytes else 1)


cdef void* resize(void* address, size_t bytes) noexcept:
    if kvo_refused():
        return NULL
    return PyMem_RawRealloc(address, bytes if bytes else 1)


cdef void discard(void* address) noexcept:
    PyMem_RawFree(address)


cdef bint grow(
    void** array, uint64_t* room, uint64_t wanted, size_t entry_bytes, uint64_t least
) noexcept:
    cdef uint64_t larger = max(wanted, 2 * room[0], least)
    cdef void* grown
    if wanted <= room[0]:
        return True
    grown = resize(array[0], larger * entry_bytes)
    if grown == NULL:
        return False
    array[0] = grown
    room[0] = larger
    return True


cdef bint extend(
    void** array, uint64_t* room, uint64_t wanted, size_t entry_bytes, uint64_t used
) noexcept:
    cdef void* larger
    if wanted <= room[0]:
        return True
    larger = reserve(wanted * entry_bytes)
    if larger == NULL:
        return False
    if used:
        memcpy(larger, array[0], used * entry_bytes)
    release(array[0], room[0] * entry_bytes)
    array[0] = larger
    room[0] = wanted
    return True
