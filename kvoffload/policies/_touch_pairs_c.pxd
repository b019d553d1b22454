"""One request, one access; see ``_touch_pairs_py`` for the rule and its limits."""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Table

cdef enum:
    MOST_OPEN = 256         # requests that are remembered

# The last requests that were touched once so far. Zeroed memory is an empty one.
cdef struct OpenRequests:
    uint64_t keys[MOST_OPEN]    # hash of length, first and last key; 0: none
    uint32_t next               # the place of the oldest
    uint32_t num_open
    uint32_t confirmed          # second touches that were certain, less requests without one


cdef class TouchPairs:
    cdef Py_ssize_t size        # of the last touch that began a request; 0 for none
    cdef bytes first_key
    cdef bytes last_key

    # Tell whether the batch is the second touch of its request.
    cdef bint repeats(self, const Batch* batch) noexcept
    cdef void clear(self) noexcept


# Return the hash that stands for a batch that is not empty; never 0.
cdef uint64_t request_key(Table* table, const Batch* batch) noexcept
# Return the place of an open request, NOT_OPEN if there is none.
cdef uint32_t requests_find(const OpenRequests* requests, uint64_t key) noexcept
# Take an open request for ended, by a touch that could be nothing else (`certain`) or could.
cdef void requests_end(OpenRequests* requests, uint32_t place, bint certain) noexcept
# Note the first touch of a request; `place` is that of an open one that it replaces, or NOT_OPEN.
cdef void requests_begin(OpenRequests* requests, uint64_t key, uint32_t place) noexcept

cdef extern from *:
    """
    #define KVO_NOT_OPEN UINT32_MAX
    """
    const uint32_t NOT_OPEN "KVO_NOT_OPEN"
