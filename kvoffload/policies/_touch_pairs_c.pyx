"""One access per request; see ``_touch_pairs_py`` for the rule and its limits."""

from cpython.object cimport PyObject
from libc.string cimport memcmp

from kvoffload._core.batch cimport item_key, item_length
from kvoffload._core.table cimport hash_key

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
    """The last touch that began a request."""

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


cdef uint64_t request_key(Table* table, const Batch* batch, uint64_t* last) noexcept:
    cdef Py_ssize_t end = batch.size - 1
    cdef uint64_t key = hash_key(table, item_key(batch, 0), item_length(batch, 0))
    last[0] = hash_key(table, item_key(batch, end), item_length(batch, end))
    key = (key ^ <uint64_t>batch.size) * <uint64_t>0x9E3779B97F4A7C15
    key ^= key >> 32
    key += last[0]
    return key if key else 1


cdef void requests_begin(OpenRequests* requests, uint64_t key, uint64_t last) noexcept:
    if requests.keys[requests.next] == 0:
        requests.num_open += 1
    elif requests.confirmed:  # it was touched once only, or long ago
        requests.confirmed -= 1
    requests.keys[requests.next] = key
    requests.lasts[requests.next] = last
    requests.offered[requests.next] = False
    requests.next = (requests.next + 1) % MOST_OPEN
    requests.is_loading = False


cdef bint requests_follow_offer(OpenRequests* requests, uint64_t last) noexcept:
    cdef bint follows = requests.any_offered and requests.last_offered == last
    requests.any_offered = False
    return follows


cdef uint32_t find_last(const OpenRequests* requests, uint64_t last, bint offered) noexcept:
    """Return the place of the newest request with that last key, offered or not, or NOT_OPEN."""
    cdef uint32_t place = requests.next, left = requests.num_open
    while left:
        place = (place - 1) % MOST_OPEN
        if requests.keys[place] == 0:
            continue
        if requests.lasts[place] == last and requests.offered[place] == offered:
            return place
        left -= 1
    return NOT_OPEN


cdef void requests_offer(OpenRequests* requests, uint64_t last) noexcept:
    cdef uint32_t place = find_last(requests, last, False)
    requests.any_offered = True
    requests.last_offered = last
    if place != NOT_OPEN:
        requests.offered[place] = True


cdef void requests_complete(OpenRequests* requests, uint64_t last) noexcept:
    cdef uint32_t place = find_last(requests, last, True)
    if requests.last_offered == last:
        requests.any_offered = False
    if place != NOT_OPEN:
        requests.keys[place] = 0
        requests.num_open -= 1


cdef uint32_t requests_find(const OpenRequests* requests, uint64_t key) noexcept:
    cdef uint32_t place = requests.next, left = requests.num_open
    while left:
        place = (place - 1) % MOST_OPEN
        if requests.keys[place] == key and requests.offered[place]:
            return place
        left -= requests.keys[place] != 0
    return NOT_OPEN


cdef bint requests_end(OpenRequests* requests, uint32_t place, bint certain) noexcept:
    requests.keys[place] = 0
    requests.num_open -= 1
    if not certain and not requests.confirmed:
        return False
    if certain and requests.confirmed < MOST_OPEN:
        requests.confirmed += 1
    return True


cdef bint requests_newest_open(const OpenRequests* requests) noexcept:
    return requests.keys[(requests.next - 1) % MOST_OPEN] != 0
