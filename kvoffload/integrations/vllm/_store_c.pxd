"""Stores: what is offered, what of it is admitted, who leaves for it."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.integrations.vllm._base_c cimport ManagerBase
from kvoffload.integrations.vllm._request cimport RequestAccess


cdef class StoringManager(ManagerBase):
    cdef object store(
        self, list batch, object req_context, RequestAccess access, object positions
    )
    cdef Py_ssize_t partition(self, Py_ssize_t* num_skipped) except -1
    cdef list missing_keys(self, Py_ssize_t num_missing)
    cdef void protect(self) noexcept
    cdef uint64_t num_evictable(self) noexcept
    cdef void place(
        self, RequestAccess access, int64_t num_admitted, int64_t num_missing, int32_t* chunk_ids
    ) noexcept
    cdef void forget(self, int64_t start, int64_t stop) noexcept
    cdef list pending_keys(self, list batch)
    cdef void complete(self, uint32_t slot, Node* node, bint stored) noexcept
    cdef bint offered_enough(self, object key) except -1
    cdef int count_offers(self, list batch) except -1
