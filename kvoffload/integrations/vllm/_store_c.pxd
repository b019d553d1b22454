"""Stores: what is offered, what of it is admitted, who leaves for it."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.integrations.vllm._base_c cimport ManagerBase
from kvoffload.integrations.vllm._request cimport RequestAccess, RequestRank


cdef class Offer:
    cdef list known         # keys that were counted before, in the order offered
    cdef list numbers       # how often each was offered by now
    cdef list tracked       # keys that are counted from now on
    cdef list dropped       # keys that make room for them, oldest first


cdef class StoringManager(ManagerBase):
    cdef uint64_t longest_key       # bytes of the longest key that was ever stored

    cdef object store(self, list batch, object req_context)
    cdef Py_ssize_t partition(self, Py_ssize_t* num_skipped) except -1
    cdef list missing_keys(self, Py_ssize_t num_missing)
    cdef void protect(self) noexcept
    cdef uint64_t num_evictable(self) noexcept
    cdef bint any_positioned(self, Py_ssize_t num_missing) noexcept
    cdef int write_keys(self, list evicted, list removed) except -1
    cdef void free_victims(self) noexcept
    cdef void place(
        self,
        RequestAccess access,
        RequestRank rank,
        int64_t num_admitted,
        int64_t num_missing,
        int32_t* chunk_ids,
    ) noexcept
    cdef void forget(self, int64_t start, int64_t stop) noexcept
    cdef object completion_event(self, list keys, bint stored)
    cdef list pending_keys(self, list batch)
    cdef void complete(self, uint32_t slot, Node* node, bint stored) noexcept
    cdef bint offered_enough(self, object key) except -1
    cdef Offer open_offer(self, list batch)
    cdef int cancel_offer(self, Offer offer) except -1
    cdef int count_offer(self, Offer offer) except -1
