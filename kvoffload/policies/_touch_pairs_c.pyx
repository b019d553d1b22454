"""One request, one access; see ``_touch_pairs_py`` for the rule and its limits."""

from cpython.object cimport PyObject
from libc.string cimport memcmp

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(PyObject*) nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject*) nogil


cdef inline bint same(PyObject* left, PyObject* right) noexcept:
    cdef Py_ssize_t length = PyBytes_GET_SIZE(left)
    if left == right:
        return True
    return (
        PyBytes_GET_SIZE(right) == length
        and memcmp(PyBytes_AS_STRING(left), PyBytes_AS_STRING(right), length) == 0
    )


cdef class TouchPairs:
    """Remember the last touch that began a request."""

    cdef bint repeats(self, const Batch* batch) noexcept:
        cdef PyObject* first
        cdef PyObject* last
        if batch.size == 0:
            return False
        first = batch.items[0]
        last = batch.items[batch.size - 1]
        if (
            self.size == batch.size
            and same(<PyObject*>self.first_key, first)
            and same(<PyObject*>self.last_key, last)
        ):
            self.clear()
            return True
        self.size = batch.size
        self.first_key = <bytes>first
        self.last_key = <bytes>last
        return False

    cdef void clear(self) noexcept:
        self.size = 0
        self.first_key = None
        self.last_key = None
