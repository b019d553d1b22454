"""The order in which vLLM counts what a finished request has used."""

from cpython.object cimport PyObject
from libc.stdint cimport uint32_t

from kvoffload.integrations.vllm._request cimport RequestAccess


cdef class KeyOrder:
    cdef PyObject** keys        # head to tail, borrowed from the request's accesses
    cdef uint32_t* numbers      # in RequestAccess.seen, one a key

cdef KeyOrder order_keys(RequestAccess access, object req_context, object positions)
