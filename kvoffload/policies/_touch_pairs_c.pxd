"""One request, one access; see ``_touch_pairs_py`` for the rule and its limits."""

from kvoffload._core.batch cimport Batch


cdef class TouchPairs:
    cdef Py_ssize_t size        # of the last touch that began a request; 0 for none
    cdef bytes first_key
    cdef bytes last_key

    # Tell whether the batch is the second touch of its request.
    cdef bint repeats(self, const Batch* batch) noexcept
    cdef void clear(self) noexcept
