"""Elements of a caller's list."""

from cpython.object cimport PyObject, PyTypeObject

from kvoffload._core.table cimport kvo_prefetch

cdef extern from "Python.h":
    ctypedef struct PyListObject:
        PyObject** ob_item
    PyTypeObject PyBytes_Type
    PyTypeObject* Py_TYPE(PyObject*) nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject*) nogil


cdef inline PyObject** list_items(list batch) noexcept:
    """Return the elements of a list, borrowed."""
    return (<PyListObject*>batch).ob_item


cdef inline bint check_items(list batch) noexcept:
    """Tell whether all elements are exactly ``bytes`` and not empty."""
    cdef PyObject** items = list_items(batch)
    cdef Py_ssize_t place
    for place in range(len(batch)):
        if Py_TYPE(items[place]) != &PyBytes_Type or PyBytes_GET_SIZE(items[place]) == 0:
            return False
        # The key of a digest reaches into the object's second cache line.
        kvo_prefetch(<const char*>items[place] + 64)
    return True
