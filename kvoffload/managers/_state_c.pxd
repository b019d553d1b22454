"""The state of a compiled manager, and the steps of its calls that are not Python.

Invariants
    ``num_pending`` and ``num_pinned`` count the resident blocks by state. Between calls no key is
    known that is neither resident nor a ghost.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Node
from kvoffload.backends._cpu_c cimport PoolCore
from kvoffload.managers._watch_c cimport WatchCore
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef struct Counters:
    uint64_t lookups            # calls
    uint64_t lookup_blocks
    uint64_t hit_blocks
    uint64_t stored_blocks      # given a slot
    uint64_t failed_blocks
    uint64_t evicted_blocks
    uint64_t refused_stores     # calls
    uint64_t not_admitted
    uint64_t loaded_blocks


# Without tp_clear, so that the policy can be told when the manager is gone. What a cycle goes
# through, the instance's dict or an object of a user, is cleared.
@cython.no_gc_clear
cdef class ManagerState:
    cdef CompiledPolicy _policy
    cdef PoolCore _pool
    cdef object delegate            # the Python skeleton over a user's parts, or None
    cdef object backend_object
    cdef list _events               # None when off
    cdef WatchCore _watch           # None when nobody looks on
    cdef Batch batch                # of the call at work
    cdef Counters counters
    cdef uint64_t num_pending
    cdef uint64_t num_pinned

    cdef object driver(self)
    cdef list open_batch(self, object hashes)
    cdef Py_ssize_t pin(self, int64_t* block_ids) noexcept
    cdef void unpin(self, uint32_t slot) noexcept
    cdef void repin(self, uint32_t slot) noexcept
    cdef Py_ssize_t choose_missing(self) noexcept
    cdef list victim_keys(self)
    cdef void place_blocks(
        self, Py_ssize_t num_admitted, Py_ssize_t num_missing, int64_t* block_ids
    ) noexcept
    cdef void forget(self, Py_ssize_t start, Py_ssize_t stop) noexcept
    cdef void end_stores(self, bint succeeded) noexcept
    cdef bint seen(self, Node* node) noexcept
    cdef Node* resident_node(self, object block_hash) noexcept
    cdef int check_state(self) except -1
