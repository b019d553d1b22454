"""The calls of a block's life cycle over C structures, for the managers built on them.

The library's manager and vLLM's call the same steps. A manager with another interface opens its own
batches, joins steps without a watch, and reports to its watch itself.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Node
from kvoffload.backends._cpu_c cimport PoolCore
from kvoffload.managers._lifecycle_c cimport BlockStates, Ended
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


cdef class CompiledSteps:
    cdef CompiledPolicy _policy
    cdef PoolCore _pool
    cdef readonly list _events      # None when off
    cdef readonly WatchCore _watch  # None without a watch
    cdef Batch batch                # of the call at work
    cdef Counters counters
    cdef BlockStates states
    cdef readonly uint64_t _resets  # number of resets

    # Join built-in parts, once; `events` are None when off.
    cdef void join(
        self, CompiledPolicy policy, PoolCore pool, list events, WatchCore watch
    ) noexcept

    # -- loads -----------------------------------------------------------------------------------
    # Pin the whole batch, or none of it; return the first index that cannot be pinned, or -1. Ids
    # are written unless `block_ids` is NULL.
    cdef Py_ssize_t pin_batch(self, Batch* batch, int64_t* block_ids) noexcept
    # Build the error of a block that cannot be pinned.
    cdef object load_error(self, bytes block_hash)
    # Remove a pin from each block of the batch, whose keys are those of the list from `start` on;
    # unless it is NULL, `ended` gets the blocks.
    cdef int release(self, Batch* batch, list keys, Py_ssize_t start, Ended* ended) except -1
    # Remove one pin from a pinned block.
    cdef void unpin_node(self, uint32_t node_id) noexcept

    # -- stores ----------------------------------------------------------------------------------
    # Find victims and return how many of the chosen keys to store; if `is_last`, for a session that
    # ends, only as many as fit into free slots and those of released blocks. -1, with the keys
    # forgotten, if the store is refused; MemoryError, with the keys forgotten.
    cdef Py_ssize_t make_room(self, Batch* batch, Py_ssize_t num_missing, bint is_last) except -2
    # Return the keys of the victims, in eviction order.
    cdef list victim_keys(self)
    # Free the victims' slots, and evict them.
    cdef void evict_victims(self, WatchCore watch) noexcept
    # Note the result of the store: how many of the chosen keys have a block.
    cdef void note_stored(
        self, Batch* batch, Py_ssize_t num_admitted, Py_ssize_t num_missing
    ) noexcept
    # Make the batch's pending blocks idle, or drop them; unless it is NULL, `ended` gets them.
    cdef void end_pending(self, bint succeeded, Ended* ended) noexcept

    # -- everything ------------------------------------------------------------------------------
    # Give the slots back and empty the policy.
    cdef int drop_all(self) except -1
    # Return the node of a resident block, or NULL.
    cdef Node* resident_node(self, object block_hash) noexcept


cdef class CompiledRequest:
    cdef CompiledSteps steps
    cdef object manager             # kept alive
    cdef list keys                  # its own: only the request changes it
    # Keys returned by its stores and not ended: from `store_start` to before `store_stop` of this
    # list, which is `keys` itself while they are one part of the request.
    cdef list storing
    cdef Py_ssize_t store_start, store_stop
    # Parts that it has pinned: mostly only one, from `load_start` to before `load_stop`, if that is
    # not 0; the others are in the list.
    cdef Py_ssize_t load_start, load_stop
    cdef list loading               # or None
    cdef list outdated              # parts that it had pinned when the manager was reset, or None
    cdef Py_ssize_t met             # number of blocks up to the deepest resident one at `begin`
    cdef Py_ssize_t own             # first position that it has stored; -1: it has made no store
    cdef Py_ssize_t first, last     # of its first and last `prepare_store`, as in `InSession`
    cdef Py_ssize_t prompt          # number of blocks at `begin`
    cdef object hints               # of `begin`
    cdef bint ends                  # whether its session ends, by the hints of `begin`
    cdef Batch batch                # of all keys
    cdef uint64_t resets            # of the steps, at its last call
    cdef readonly bint is_finished

    cpdef int _note_own(self, Py_ssize_t first) except -1
