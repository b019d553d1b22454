"""Token positions of a request's keys, read off its context in the order in which they stand there.

A request shows its keys mostly in the order in which the connector has noted their positions, and
with the same objects: the entry after the last one found is tried before the dictionary is asked.
"""

from cpython.dict cimport PyDict_GetItemWithError, PyDict_Next
from cpython.exc cimport PyErr_Occurred
from cpython.object cimport PyObject


cdef inline int find_position(
    object positions, PyObject* key, Py_ssize_t* cursor, PyObject** position
) except -1:
    """Look a key up; `position` is borrowed, NULL if it has none. `cursor` starts at 0."""
    cdef PyObject* found_key
    cdef Py_ssize_t following = cursor[0]
    if PyDict_Next(positions, &following, &found_key, position) and found_key == key:
        cursor[0] = following
        return 0
    position[0] = PyDict_GetItemWithError(positions, <object>key)
    if position[0] == NULL and PyErr_Occurred() != NULL:
        raise
    return 0
