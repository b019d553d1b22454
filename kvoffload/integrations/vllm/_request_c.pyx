"""The accesses of one request, and the order in which vLLM counts them when it finishes.

The keys are sorted into groups by index; inside a group by token position if all its keys have one,
else in the order seen; then all together by position if all have one. Every step is stable.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memset

from kvoffload._core.memory cimport discard, resize
from kvoffload._core.table cimport NIL
from kvoffload.integrations.vllm._ranked_lru_c cimport RankedLRU

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
        cdef uint64_t seen_index, cell
        cdef uint32_t* cells
        cdef SeenKey* seen
        if self.size + more <= self.room:
            return True
        while room < self.size + more:
            room *= 2
        cells = <uint32_t*>resize(NULL, 2 * room * sizeof(uint32_t))
        if cells == NULL:
            return False
        seen = <SeenKey*>resize(self.seen, room * sizeof(SeenKey))
        if seen == NULL:
            discard(cells)
            return False
        self.seen = seen
        self.room = room
        self.mask = 2 * room - 1
        memset(cells, 0, 2 * room * sizeof(uint32_t))
        for seen_index in range(self.size):
            cell = seen[seen_index].hashed & self.mask
            while cells[cell] != 0:
                cell = (cell + 1) & self.mask
            cells[cell] = <uint32_t>seen_index + 1
        discard(self.cells)
        self.cells = cells
        return True


cdef class RequestRank:
    def __cinit__(self, RankedLRU owner not None):
        self.owner = owner
        self.generation = owner.generation


cdef class Contexts:
    def __cinit__(self, object context_class, policy):
        self.context_class = context_class
        self.ranking = policy if isinstance(policy, RankedLRU) else None

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

    cdef object state_of(self, object req_context, object state_class):
        if self.read(req_context):
            return self.recent_states.get(state_class)
        return req_context.get_state(state_class)

    cdef RequestAccess access_of(self, object req_context):
        cdef RequestAccess access = self.state_of(req_context, RequestAccess)
        if access is None or access.owner is not self or access.generation != self.generation:
            return None
        return access

    cdef RequestAccess new_access(self):
        return RequestAccess(self, self.generation)

    cdef RequestRank rank_of(self, object req_context):
        cdef RequestRank rank = self.state_of(req_context, RequestRank)
        if (
            rank is None
            or rank.owner is not self.ranking
            or rank.generation != self.ranking.generation
        ):
            return None
        return rank

    cdef int attach(self, object req_context, object access, object rank) except -1:
        # A context has one state per class: if two managers serve one context, each replaces the
        # other's state, as vLLM's do.
        cdef object before = None
        if access is not None:
            if rank is not None:
                before = self.state_of(req_context, RequestAccess)
            req_context.set_state(access)
        if rank is not None:
            try:
                req_context.set_state(rank)
            except BaseException:
                if access is not None:
                    self.put_back(req_context, RequestAccess, before)
                raise
        return 0

    cdef int put_back(self, object req_context, object state_class, object state) except -1:
        if type(req_context) is self.context_class:
            if state is None:
                req_context._state.pop(state_class, None)
            else:
                req_context._state[state_class] = state
        elif state is not None:
            req_context.set_state(state)
        return 0

    cdef object positions_of(self, object req_context):
        return self.recent_positions if self.read(req_context) else None


# -- the order at the finish -----------------------------------------------------------------------

cdef class KeyOrder:
    def __dealloc__(self):
        discard(self.keys)
        discard(self.seen_indexes)
        discard(self.sort_keys)
        discard(self.positioned)


cdef inline int compare(int64_t left, int64_t right) noexcept nogil:
    return (left > right) - (left < right)


cdef int by_position(const void* left, const void* right) noexcept nogil:
    cdef const SortKey* one = <const SortKey*>left
    cdef const SortKey* other = <const SortKey*>right
    cdef int order = compare(one.position, other.position)
    if order == 0:
        order = compare(one.group, other.group)
    return order if order else compare(one.seen_index, other.seen_index)


cdef int by_group(const void* left, const void* right) noexcept nogil:
    cdef const SortKey* one = <const SortKey*>left
    cdef const SortKey* other = <const SortKey*>right
    cdef int order = compare(one.group, other.group)
    return order if order else compare(one.seen_index, other.seen_index)


cdef int read_sort_keys(
    RequestAccess access,
    object req_context,
    object positions,
    SortKey* sort_keys,
    uint8_t* positioned,
    bint* is_sorted,
) except -1:
    """Fill in the sort keys; return 1 if every key has a position, else 0.

    `is_sorted` says whether they are in the order of `by_position`.
    """
    cdef uint64_t seen_index
    cdef PyObject* found
    cdef object position
    cdef bint complete = True
    cdef Py_ssize_t cursor = 0
    cdef SortKey* sort_key = sort_keys
    cdef SortKey* before = NULL
    is_sorted[0] = True
    for seen_index in range(access.size):
        sort_key = sort_keys + seen_index
        sort_key.seen_index = <uint32_t>seen_index
        sort_key.group = group_of(access.seen[seen_index].key)
        sort_key.position = 0
        if positions is None:
            position = req_context.get_offload_key_position(<object>access.seen[seen_index].key)
        else:
            find_position(positions, access.seen[seen_index].key, &cursor, &found)
            position = None if found == NULL else <object>found
        positioned[seen_index] = position is not None
        if position is None:
            complete = False
        else:
            sort_key.position = position
        if before != NULL and (
            before.position > sort_key.position
            or before.position == sort_key.position and before.group > sort_key.group
        ):
            is_sorted[0] = False
        before = sort_key
    return complete


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
    cdef const SeenKey* seen
    cdef SortKey* sort_keys = <SortKey*>resize(NULL, size * sizeof(SortKey))
    order.sort_keys = sort_keys
    order.positioned = <uint8_t*>resize(NULL, size)
    order.seen_indexes = <uint32_t*>resize(NULL, size * sizeof(uint32_t))
    order.keys = <PyObject**>resize(NULL, size * sizeof(PyObject*))
    if (
        sort_keys == NULL
        or order.positioned == NULL
        or order.seen_indexes == NULL
        or order.keys == NULL
    ):
        raise MemoryError()
    order.by_position = read_sort_keys(
        access, req_context, positions, sort_keys, order.positioned, &is_sorted
    )
    if not order.by_position:
        sort_by_group(sort_keys, size, order.positioned)
    elif not is_sorted:
        qsort(sort_keys, size, sizeof(SortKey), by_position)
    for at in range(size):
        seen = access.seen + sort_keys[at].seen_index
        order.seen_indexes[at] = sort_keys[at].seen_index
        order.keys[at] = seen.key
    return order
