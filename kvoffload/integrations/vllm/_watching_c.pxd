"""Requests are revealed to a watch incrementally and scored on completion.

A request of the library is one lookup. vLLM looks single keys up, stops at the first miss, repeats
lookups while it waits, and shows its keys in loads and offers. So the first access of a key
decides: a load is a hit, and an offer a miss, whose cause is taken from the watch at that moment.
At the finish all keys are judged once and used once, including those that were never recorded
because they were offered below the threshold or while pending. The accelerator had the keys before
the first position that was looked up, and the keys after the last position that the request had at
a lookup were generated: both are used, but not counted as requested.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Table
from kvoffload.integrations.vllm._request_c cimport Contexts, KeyOrder, RequestAccess
from kvoffload.integrations.vllm._rules_c cimport Access
from kvoffload.managers._lifecycle_c cimport Ended
from kvoffload.managers._manager_c cimport CompiledSteps
from kvoffload.managers._watch_c cimport WatchCore

# Which groups a watch judges.
cdef enum:
    ALL_GROUPS = -1
    NO_GROUP = -2

cdef class RequestWatch:
    cdef readonly WatchCore core
    cdef CompiledSteps steps    # of the manager
    cdef Table* table           # theirs
    cdef int64_t judged         # the group whose chunks are judged, or ALL_GROUPS, or NO_GROUP
    # Full groups whose chunks other groups can keep from being loaded, id -> tokens per chunk; or
    # None.
    cdef dict full_groups
    cdef Contexts contexts
    # Of the request that looks up single keys and is not settled yet:
    cdef object asker           # its context
    cdef RequestAccess asker_access     # and its state; None if it cannot be attached
    cdef object asker_positions         # and its dict of token positions, or None
    cdef object first_asked     # its first key
    cdef object last_asked      # its last key, if that is needed
    cdef bint keeps_last        # it is
    cdef int64_t asker_from     # the least token position that it looked up; NOT_ASKED: not known
    cdef int64_t asker_until    # the largest token position of its keys; NOT_ASKED: not known
    # And if groups count separately:
    cdef object first_full      # the first key of its present lookup
    cdef uint32_t asked_group   # the KV group of the last key
    cdef int64_t full_until     # position up to which the full groups so far had all
    cdef bint full_missed       # one of them ended at an absent chunk

    # A request looks up a key.
    cdef inline int asked(self, object key, object req_context) except -1:
        if req_context is not self.asker:
            self.ask(key, req_context)
        elif self.full_groups is not None:
            self.ask_on(key)
        if self.keeps_last:
            self.last_asked = key
        return 0

    cdef int ask(self, object key, object req_context) except -1
    cdef int ask_on(self, object key) except -1
    # Record the positions that the last request has looked up.
    cdef int settle(self) except -1
    cdef void forget_asker(self) noexcept
    # All are called before the state changes, except `c_loading`, `c_begun`, `c_completed` and
    # `c_finished`. A load was granted, and recorded: its keys were hit.
    cdef void c_loading(
        self, Batch* batch, const Access* accesses, RequestAccess access
    ) noexcept
    # An offer was decided and recorded: `admitted` of `missing` keys, < 0 if it was refused. Record
    # why keys were missed, then the result of the store.
    cdef void c_offered(
        self,
        Batch* batch,
        const Access* accesses,
        RequestAccess access,
        int64_t admitted,
        int64_t missing,
    ) noexcept
    # A transfer begins.
    cdef void c_begun(self, uint32_t kind, const int32_t* chunk_ids, Py_ssize_t size) noexcept
    # A transfer has ended.
    cdef void c_completed(self, uint32_t kind, Ended ended) noexcept
    # A request has finished; its keys, head to tail, and their nodes, NIL if not resident, or NULL.
    # Judge those that it looked up, then use all, last first.
    cdef void c_finished(
        self, RequestAccess access, KeyOrder order, const uint32_t* node_ids
    ) noexcept

# Return all keys that a request has offered or loaded, recorded or not.
cdef RequestAccess all_keys(RequestAccess access)
