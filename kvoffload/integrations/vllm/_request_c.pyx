"""The accesses of one request, and the order in which vLLM counts them when it finishes.

The keys are sorted into groups by index; inside a group by token position if all its keys have one,
else in the order seen; then all together by position if all have one. Every step is stable.
"""

from cpython.dict cimport PyDict_Next, PyDict_Size
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memset

from kvoffload._core.memory cimport discard, grow, resize

cdef enum:
    SMALLEST = 16


cdef class RequestAccess:
    def __cinit__(self, object owner not None, uint64_t generation):
        self.owner = owner
        self.generation = generation
        self.asked_from = NOT_ASKED
        self.asked_until = -NOT_ASKED

    def __dealloc__(self):
        cdef uint64_t seen_index
        for seen_index in range(self.size):
            Py_DECREF(<object>self.seen[seen_index].key)
        discard(self.seen)
        discard(self.cells)

    cdef bint ensure(self, uint64_t more) noexcept:
        """Make room for `more` keys; False, with nothing changed, if there is no memory."""
        cdef uint64_t room = max(self.room, <uint64_t>SMALLEST)
        cdef uint64_t seen_index
        cdef uint32_t* cells
        if self.size + more <= self.room:
            return True
        while room < self.size + more:
            room *= 2
        cells = <uint32_t*>resize(NULL, 2 * room * sizeof(uint32_t))
        if cells == NULL or not grow(<void**>&self.seen, &self.room, room, sizeof(SeenKey), 0):
            discard(cells)
            return False
        discard(self.cells)
        self.cells = cells
        self.mask = 2 * room - 1
        memset(cells, 0, 2 * room * sizeof(uint32_t))
        for seen_index in range(self.size):
            cells[self.cell_of(self.seen[seen_index].key, self.seen[seen_index].hashed)] = (
                <uint32_t>seen_index + 1
            )
        return True


cdef class RequestState:
    pass


cdef class Contexts:
    def __cinit__(self, object context_class):
        self.context_class = context_class

    cdef bint read(self, object req_context) except -1:
        cdef object states, positions
        if req_context is self.recent and self.recent_states is not None:
            return True
        if type(req_context) is not self.context_class:
            return False
        states = req_context._state
        positions = req_context._offload_key_positions
        if type(states) is not dict:
            return False
        self.recent, self.recent_states, self.recent_positions = req_context, states, positions
        return True

    cdef void drop_recent(self) noexcept:
        self.recent = self.recent_states = self.recent_positions = None

    cdef RequestState state_of(self, object req_context):
        if self.read(req_context):
            return self.recent_states.get(RequestState)
        return req_context.get_state(RequestState)

    cdef RequestAccess access_of(self, object req_context):
        return self.access_in(self.state_of(req_context))

    cdef RequestAccess access_in(self, RequestState state):
        cdef RequestAccess access = None if state is None else state.access
        if access is None or access.owner is not self or access.generation != self.generation:
            return None
        return access

    cdef RequestAccess new_access(self):
        return RequestAccess(self, self.generation)

    cdef RequestState attach(self, object req_context, RequestAccess access, RequestState state):
        if state is None:
            state = self.state_of(req_context)
        if state is None:
            state = RequestState()
            req_context.set_state(state)
        if access is not None:
            state.access = access
        return state

    cdef object positions_of(self, object req_context):
        return self.recent_positions if self.read(req_context) else None


# -- the order at the finish -----------------------------------------------------------------------


cdef int64_t last_position(object positions, PyObject** least) except -1:
    cdef PyObject* first
    cdef PyObject* last
    cdef Py_ssize_t cursor = 0, after
    least[0] = NULL
    if positions is None or not PyDict_Next(positions, &cursor, least, &first):
        return NOT_ASKED
    # The connector records the positions of each group in order, group after group, then those
    # inside chunks. Only of one group without the latter, the last is a multiple of the first by
    # the number of entries, and the greatest.
    after = PyDict_Size(positions) - 1
    if (
        PyDict_Next(positions, &after, NULL, &last)
        and <object>last == PyDict_Size(positions) * <object>first
    ):
        return <object>last
    least[0] = NULL
    return max(positions.values())


cdef class KeyOrder:
    def __dealloc__(self):
        discard(self.keys)  # with the other arrays


cdef bint read_keys(
    KeyOrder order, RequestAccess access, object req_context, object positions
) except -1:
    """Fill in the sort keys; return whether they are in the order of positions."""
    cdef uint64_t seen_index
    cdef bint is_sorted = True
    cdef Py_ssize_t cursor = 0
    cdef SortKey* before = NULL
    cdef SortKey* sort_key
    order.by_position = True
    for seen_index in range(access.size):
        sort_key = order.sort_keys + seen_index
        sort_key.seen_index = <uint32_t>seen_index
        sort_key.group = group_of(access.seen[seen_index].key)
        position = find_position(req_context, positions, access.seen[seen_index].key, &cursor)
        order.positioned[seen_index] = position is not None
        if position is None:
            order.by_position = False
            sort_key.position = 0
        else:
            sort_key.position = position
        if before != NULL and (
            before.position > sort_key.position
            or before.position == sort_key.position and before.group > sort_key.group
        ):
            is_sorted = False
        before = sort_key
    return is_sorted


cdef inline int compare(int64_t left, int64_t right) noexcept nogil:
    return (left > right) - (left < right)


cdef int by_group(const void* left, const void* right) noexcept nogil:
    cdef const SortKey* one = <const SortKey*>left
    cdef const SortKey* other = <const SortKey*>right
    cdef int order = compare(one.group, other.group)
    return order if order else compare(one.seen_index, other.seen_index)


cdef int by_position(const void* left, const void* right) noexcept nogil:
    cdef int order = compare((<const SortKey*>left).position, (<const SortKey*>right).position)
    return order if order else by_group(left, right)


cdef void sort_by_group(
    SortKey* sort_keys, uint64_t size, const uint8_t* positioned
) noexcept nogil:
    cdef uint64_t start = 0, stop
    cdef bint complete
    qsort(sort_keys, size, sizeof(SortKey), by_group)
    while start < size:
        stop = start
        complete = True
        while stop < size and sort_keys[stop].group == sort_keys[start].group:
            complete = complete and positioned[sort_keys[stop].seen_index]
            stop += 1
        if complete:
            qsort(sort_keys + start, stop - start, sizeof(SortKey), by_position)
        start = stop


cdef KeyOrder order_keys(RequestAccess access, object req_context, object positions):
    cdef KeyOrder order = KeyOrder()
    cdef uint64_t size = access.size, at
    cdef bint is_sorted
    order.keys = <PyObject**>resize(NULL, size * (sizeof(PyObject*) + sizeof(SortKey) + 1))
    if order.keys == NULL:
        raise MemoryError()
    order.sort_keys = <SortKey*>(order.keys + size)
    order.positioned = <uint8_t*>(order.sort_keys + size)
    is_sorted = read_keys(order, access, req_context, positions)
    if not order.by_position:
        sort_by_group(order.sort_keys, size, order.positioned)
    elif not is_sorted:
        qsort(order.sort_keys, size, sizeof(SortKey), by_position)
    for at in range(size):
        order.keys[at] = access.seen[order.sort_keys[at].seen_index].key
    return order
