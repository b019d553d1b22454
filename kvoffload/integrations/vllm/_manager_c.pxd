"""What drives a policy by the requests of vLLM: the part that managers and adapters share."""

from libc.stdint cimport int64_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Node
from kvoffload.integrations.vllm._request_c cimport RequestAccess, RequestRank
from kvoffload.integrations.vllm._rules_c cimport Access, RequestRules
from kvoffload.managers._lifecycle_c cimport resident
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef class PolicyDriver:
    cdef CompiledPolicy policy      # None until the construction has succeeded
    cdef RequestRules rules
    cdef Batch batch                # of the call at work
    cdef Access* accesses           # beside its slots
    cdef Py_ssize_t accesses_room
    cdef uint64_t generation        # how often the cache was reset
    cdef list chain                 # keys of the request at work, None if they are not to be shown
    cdef object context_class       # vLLM's

    cdef object not_initialised(self)
    cdef void follow(self, RequestRules rules) noexcept
    cdef list open_batch(self, object keys)
    cdef object state_of(self, object req_context, object state_class)
    cdef RequestAccess access_of(self, object req_context)
    cdef RequestRank rank_of(self, object req_context)
    cdef int attach(self, object req_context, object access, object rank) except -1
    cdef int put_back(self, object req_context, object state_class, object state) except -1
    cdef object positions_of(self, object req_context)
    cdef int ensure_scratch(self, Py_ssize_t size) except -1
    cdef int read_position(
        self, object req_context, object positions, Py_ssize_t place, Py_ssize_t* cursor
    ) except -1
    cdef int64_t observe(
        self, str call, object req_context, RequestAccess access, object positions
    ) except -1
    cdef list chain_of(self, object positions)
    cdef void start(self, RequestAccess access) noexcept
    cdef void record(self, RequestAccess access, bint may_repeat) noexcept
    cdef void protect_resident(self) noexcept

    cdef inline int require_ready(self) except -1:
        if self.policy is None:
            raise self.not_initialised()
        return 0

    cdef inline Node* resident(self, Py_ssize_t place) noexcept:
        """Return the node of a key of the batch if it is resident, else NULL."""
        return resident(self.policy.table, &self.batch, place)
