"""Types of Belady's choice, with which `_belady.py` is compiled."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t

@cython.locals(
    in_cache=uint8_t[::1], uses=int64_t[::1], room=Py_ssize_t, num_uses=Py_ssize_t, end=int64_t,
    num_cached=int64_t, hits=int64_t, stored=int64_t, position=int64_t, block=uint32_t,
    following=int64_t,
)
cpdef tuple belady(
    const uint32_t[::1] blocks, const int64_t[::1] next_asked, Py_ssize_t unique_blocks,
    int64_t capacity
)
@cython.locals(parent=Py_ssize_t)
# Not int: Cython forgets how to show such a result to a tracer.
cdef Py_ssize_t _put(int64_t[::1] uses, Py_ssize_t gap, int64_t use) except -1
@cython.locals(child=Py_ssize_t)
cdef Py_ssize_t _sink(int64_t[::1] uses, Py_ssize_t size, Py_ssize_t gap, int64_t use) except -1
@cython.locals(kept=Py_ssize_t, index=Py_ssize_t)
cdef Py_ssize_t _drop_passed(int64_t[::1] uses, Py_ssize_t size, int64_t position) except -1
