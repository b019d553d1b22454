"""Elements of a caller's list or tuple."""

from cpython.object cimport PyObject, PyTypeObject

from kvoffload._core.table cimport kvo_prefetch

cdef extern from "Python.h":
    ctypedef struct PyListObject:
        PyObject** ob_item
    ctypedef struct PyTupleObject:
        PyObject* ob_item[1]
    PyTypeObject PyBytes_Type
    PyTypeObject* Py_TYPE(PyObject*) nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject*) nogil


cdef inline PyObject** list_items(list batch) noexcept:
    """Return the elements of a list, borrowed."""
    return (<PyListObject*>batch).ob_item


cdef inline PyObject** tuple_items(tuple batch) noexcept:
    """Return the elements of a tuple, borrowed."""
    return (<PyTupleObject*>batch).ob_item


cdef inline Py_ssize_t first_bad(PyObject** items, Py_ssize_t start, Py_ssize_t stop) noexcept:
    """Return the first index whose element is not ``bytes`` or is empty, `stop` for none."""
    cdef Py_ssize_t index
    for index in range(start, stop):
        if Py_TYPE(items[index]) != &PyBytes_Type or PyBytes_GET_SIZE(items[index]) == 0:
            return index
        # A digest extends into the object's second cache line.
        kvo_prefetch(<const char*>items[index] + 64)
    return stop


cdef inline bint check_items(list batch) noexcept:
    """Return whether all elements are exactly ``bytes`` and not empty."""
    return first_bad(list_items(batch), 0, len(batch)) == len(batch)
