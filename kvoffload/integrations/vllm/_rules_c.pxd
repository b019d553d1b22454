"""Rules that translate a request's accesses to calls of a policy, one class per kind of policy."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Node
from kvoffload.integrations.vllm._request_c cimport RequestState
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

# The state of a key in the running call, bits of Access.flags.
cdef enum:
    OBSERVED = 1        # counts as an access of the request
    NEW = 2             # its first one
    FIRST_MISS = 4      # offered for storing while absent, for the first time
    POSITIONED = 8      # the request has its token position
    READY = 16          # resident and readable
    ONLY_INSERTED = 32  # at finish: stored by the request and not reused
    USED_AGAIN = 64     # at finish: reused by the request
    NOT_STORED = 128    # at finish: offered by the request and declined

cdef struct Access:
    uint32_t seen_index         # in RequestAccess.seen
    int32_t reverse_position    # minus the token position
    uint8_t flags


cdef class RequestRules:
    cdef readonly CompiledPolicy policy
    cdef bint ranked            # requests take ranks: positions are needed
    cdef bint by_chain          # `started` wants all keys of a request at its first access

    # Make room for `moves` of nodes; False if there is no memory.
    cdef bint ensure(self, uint64_t moves) noexcept
    # Keep the keys of a request, head to tail, for `started`; False if there is no memory.
    cdef bint open_chain(self, list keys) noexcept
    # A request has made its first access; its keys are those of `open_chain`. `hint` is NULL if its
    # client gave no hints.
    cdef void started(self, const Hint* hint) noexcept
    # A request has observed the keys that are NEW; nodes are NIL or without a block if absent.
    cdef void accessed(self, Batch* batch, const Access* accesses, RequestState state) noexcept
    # The keys with FIRST_MISS will be stored, if there is room.
    cdef void missed(self, Batch* batch, const Access* accesses) noexcept
    # A node has got a block.
    cdef void insert(
        self, uint32_t node_id, Node* node, const Access* access, RequestState state
    ) noexcept
    # A request has finished; the batch is its keys head to tail.
    cdef void finished(self, Batch* batch, const Access* accesses, const Hint* hint) noexcept
