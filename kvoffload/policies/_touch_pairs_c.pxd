"""One access per request; see ``_touch_pairs_py`` for the rule and its limits."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Table

cdef enum:
    MOST_OPEN = 256         # requests that are remembered

# The last requests that were touched once so far. Zeroed memory is an empty one.
cdef struct OpenRequests:
    uint64_t keys[MOST_OPEN]    # hash of length, first and last key; 0: none
    uint64_t lasts[MOST_OPEN]   # hash of the last key
    uint8_t offered[MOST_OPEN]  # blocks of it were offered to store
    uint32_t next               # the place of the oldest
    uint32_t num_open
    uint32_t confirmed          # second touches that were certain, less requests without one
    bint any_offered            # since the last touch; `last_offered` is of the last one
    uint64_t last_offered       # hash of its last key
    bint is_loading             # blocks of the request that began last


cdef class TouchPairs:
    cdef Py_ssize_t size        # of the last touch that began a request; 0 for none
    cdef bytes first_key
    cdef bytes last_key

    # Return whether the batch is the second touch of its request.
    cdef bint repeats(self, const Batch* batch) noexcept
    cdef void clear(self) noexcept


# Return the hash that stands for a batch that is not empty, never 0, and that of its last key.
cdef uint64_t request_key(Table* table, const Batch* batch, uint64_t* last) noexcept
# Note the first touch of a request, in the place of the oldest.
cdef void requests_begin(OpenRequests* requests, uint64_t key, uint64_t last) noexcept
# Return whether a touch with that last key follows the offer of the same; forget that.
cdef bint requests_follow_offer(OpenRequests* requests, uint64_t last) noexcept
# Note that blocks of the newest request with that last key are offered to store.
cdef void requests_offer(OpenRequests* requests, uint64_t last) noexcept
# Note that the store of a request has ended: it was touched once only.
cdef void requests_complete(OpenRequests* requests, uint64_t last) noexcept
# Return the place of a request that was offered since its first touch, NOT_OPEN if there is none.
cdef uint32_t requests_find(const OpenRequests* requests, uint64_t key) noexcept
# End the request at that place; return whether it is ended by its second touch. `certain`: the
# touch can be nothing else.
cdef bint requests_end(OpenRequests* requests, uint32_t place, bint certain) noexcept
# Return whether the request that began last was touched once so far.
cdef bint requests_newest_open(const OpenRequests* requests) noexcept

cdef extern from *:
    """
    #define KVO_NOT_OPEN UINT32_MAX
    """
    const uint32_t NOT_OPEN "KVO_NOT_OPEN"
