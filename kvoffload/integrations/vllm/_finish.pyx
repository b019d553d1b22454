"""The order in which vLLM counts what a finished request has used.

Groups by index; inside a group by token position if all its keys have one, else as seen; then all
together by position if all have one. Every step is stable.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport qsort

from kvoffload._core.memory cimport discard, resize
from kvoffload.integrations.vllm._positions cimport find_position

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(PyObject*) nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject*) nogil

# vLLM's keys end in the group's index, big endian.
cdef enum:
    GROUP_BYTES = 4

cdef struct Place:
    int64_t position
    uint32_t group
    uint32_t number             # in the order seen


cdef class KeyOrder:
    def __dealloc__(self):
        discard(self.keys)
        discard(self.numbers)


cdef inline uint32_t group_of(PyObject* key) noexcept nogil:
    cdef Py_ssize_t length = PyBytes_GET_SIZE(key)
    cdef const uint8_t* last = <const uint8_t*>PyBytes_AS_STRING(key)
    cdef uint32_t group = 0
    cdef Py_ssize_t at
    for at in range(max(0, length - GROUP_BYTES), length):
        group = group << 8 | last[at]
    return group


cdef inline int compare(int64_t left, int64_t right) noexcept nogil:
    return (left > right) - (left < right)


cdef int by_position(const void* left, const void* right) noexcept nogil:
    cdef const Place* one = <const Place*>left
    cdef const Place* other = <const Place*>right
    cdef int order = compare(one.position, other.position)
    if order == 0:
        order = compare(one.group, other.group)
    return order if order else compare(one.number, other.number)


cdef int by_group(const void* left, const void* right) noexcept nogil:
    cdef const Place* one = <const Place*>left
    cdef const Place* other = <const Place*>right
    cdef int order = compare(one.group, other.group)
    return order if order else compare(one.number, other.number)


cdef bint is_sorted(
    const Place* places, uint64_t size, int (*order)(const void*, const void*) noexcept nogil
) noexcept nogil:
    cdef uint64_t at
    for at in range(1, size):
        if order(&places[at - 1], &places[at]) > 0:
            return False
    return True


cdef int read_places(
    RequestAccess access, object req_context, object positions, Place* places, uint8_t* positioned
) except -1:
    """Fill in the places; return 1 if every key has a position, else 0."""
    cdef uint64_t number
    cdef PyObject* found
    cdef object position
    cdef bint complete = True
    cdef Py_ssize_t cursor = 0
    for number in range(access.size):
        places[number].number = <uint32_t>number
        places[number].group = group_of(access.seen[number].key)
        places[number].position = 0
        if positions is None:
            position = req_context.get_offload_key_position(<object>access.seen[number].key)
        else:
            find_position(positions, access.seen[number].key, &cursor, &found)
            position = None if found == NULL else <object>found
        positioned[number] = position is not None
        if position is None:
            complete = False
        else:
            places[number].position = position
    return complete


cdef void sort_by_group(Place* places, uint64_t size, const uint8_t* positioned) noexcept nogil:
    cdef uint64_t start = 0, stop
    cdef bint complete
    qsort(places, size, sizeof(Place), by_group)
    while start < size:
        stop = start
        complete = True
        while stop < size and places[stop].group == places[start].group:
            complete = complete and positioned[places[stop].number]
            stop += 1
        if complete:
            qsort(places + start, stop - start, sizeof(Place), by_position)
        start = stop


cdef KeyOrder order_keys(RequestAccess access, object req_context, object positions):
    """Return the keys that a request has shown, head to tail."""
    cdef KeyOrder order = KeyOrder()
    cdef uint64_t size = access.size, at
    cdef Place* places = <Place*>resize(NULL, size * sizeof(Place))
    cdef uint8_t* positioned = <uint8_t*>resize(NULL, size)
    try:
        order.numbers = <uint32_t*>resize(NULL, size * sizeof(uint32_t))
        order.keys = <PyObject**>resize(NULL, size * sizeof(PyObject*))
        if places == NULL or positioned == NULL or order.numbers == NULL or order.keys == NULL:
            raise MemoryError()
        if not read_places(access, req_context, positions, places, positioned):
            sort_by_group(places, size, positioned)
        elif not is_sorted(places, size, by_position):
            qsort(places, size, sizeof(Place), by_position)
        for at in range(size):
            order.numbers[at] = places[at].number
            order.keys[at] = access.seen[places[at].number].key
    finally:
        discard(places)
        discard(positioned)
    return order
