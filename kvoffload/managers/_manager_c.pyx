"""The manager skeleton, compiled: the lifecycle of a block, over C structures.

Structure
    `CompiledSteps` have the state and the steps of a block's life cycle for built-in policies and
    backends: a compiled policy holds the nodes, a compiled pool the slots, and both are used at C
    level. `ManagerCore` makes its calls of these steps, and so does `CompiledRequest`. Over a
    user's own parts, a manager forwards its calls to the Python twin, ``_manager_py``.
Invariants
    As in the Python twin, and those of ``_lifecycle_c``. Between calls every known key is resident
    or a ghost. No Python code runs between the first read of the state and the last change: batches
    are consumed before, and the collector is off while results are allocated.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t
from libc.string cimport memcpy

cimport numpy as cnp

from kvoffload._core.batch cimport (
    batch_close,
    batch_ensure,
    batch_extend,
    batch_fit,
    batch_open,
    batch_part,
    batch_set,
    checked_list,
    find_changed,
    find_range,
    hint_chosen,
    hint_found,
)
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.items cimport check_items, first_bad, list_items, tuple_items
from kvoffload._core.pool cimport pool_give, pool_num_free, pool_reset
from kvoffload._core.table cimport (
    INLINE_KEY_BYTES,
    IS_SHARED,
    LONG_KEY,
    NIL,
    PARKED,
    RESIDENT,
    SAMPLED,
    Table,
    drop_key,
    hash_node,
    node_at,
    own_id,
)
from kvoffload.managers._lifecycle_c cimport begin_store, chosen_keys, pending_keys, pin, unpin
from kvoffload.managers._results_c cimport (
    _PackedKeys,
    new_event,
    new_ids,
    new_keys,
    new_output,
    new_spec,
)
from kvoffload.managers._watch_c cimport LOAD, STORE
from kvoffload.policies._steps_c cimport (
    choose_missing,
    find_room,
    forget,
    leave,
    make_ready,
    meet,
    num_known,
    num_ready,
    resident,
    serve_at_once,
    settle,
    touch_as_stored,
)
from kvoffload.policies._twin_c cimport CollectorOff, Hint, find_key, key_of

from kvoffload import errors
from kvoffload._checks import as_batch, batch_error, check_bool, check_hints, check_part
from kvoffload.backends._cpu_c import CPUBackend
from kvoffload.backends._cpu_py import CPUBackend as PythonCPUBackend
from kvoffload.managers import base
from kvoffload.managers._manager_py import Manager as PythonManager
from kvoffload.managers._views import ManagerViews
from kvoffload.policies import _ownership as ownership
from kvoffload.policies import registry
from kvoffload.types import Spec_co

cnp.import_array()

cdef enum:
    MOST_PINS = 0x7FFFFFFF
    # Keys that a lookup checks and finds before it tests for one that is not ready: few at first,
    # since many prompts are unknown.
    FIRST_LOOKUP_STEP = 4
    LOOKUP_STEP = 64


# Calls that a request makes of its manager.
CALLS = (
    "touch",
    "lookup",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "release",
)


# Without tp_clear, so that the policy can be notified when the manager is gone. Cycles are broken
# at the instance's dict or at a user's object, which are cleared.
@cython.final
@cython.no_gc_clear
cdef class CompiledSteps:
    """The steps over C structures, and their introspection."""

    def __dealloc__(self):
        if self._policy is not None:
            self._policy.leave_manager(<void*>self)
        batch_close(&self.batch)

    cdef void join(
        self, CompiledPolicy policy, PoolCore pool, list events, WatchCore watch
    ) noexcept:
        policy.join_manager(<void*>self)
        self._policy = policy
        self._pool = pool
        self._events = events
        self._watch = watch

    # -- for requests that call a subclass's methods, and engines that begin none ------------

    def _use_first(self, hashes, hints):
        cdef Hint said
        cdef const Hint* hint = self._policy.hint_of(hints, &said)
        cdef list batch = find_batch(self, hashes)
        self._policy.begin_request(&self.batch, hint)

    def _use_more(self, added):
        cdef list batch = find_batch(self, added)
        extend_found(self)

    def _met(self, hashes, Py_ssize_t start):
        cdef list batch = find_batch(self, hashes)
        return meet(self._policy.table, &self.batch, start)

    def _finished(self, hashes, hints, session):
        cdef Hint said
        cdef const Hint* hint = self._policy.hint_of(hints, &said)
        cdef list batch = open_batch(self, hashes)
        met, own, num_last, first, last = session
        finish_batch(self, &self.batch, hints, hint, None, met, own, num_last, first, last)

    def _used_last(self, hashes, hints):
        cdef Hint said
        cdef const Hint* hint = self._policy.hint_of(hints, &said)
        cdef list batch = find_batch(self, hashes)
        self._policy.finish_request(&self.batch, hint)

    def _touch_inserted(self, hashes, inserted):
        cdef list batch = open_batch(self, hashes)
        cdef bytes flags = bytes([block_hash in inserted for block_hash in batch])
        find_changed(self._policy.table, &self.batch)
        touch_as_stored(self._policy, &self.batch, <const uint8_t*>PyBytes_AS_STRING(flags))

    def _served_at_once(self, hashes, own, Py_ssize_t num_last):
        cdef list batch = open_batch(self, hashes)
        cdef bytes flags = bytes([block_hash in own for block_hash in batch])
        cdef const uint8_t* is_own = <const uint8_t*>PyBytes_AS_STRING(flags)
        cdef Py_ssize_t known = len(batch)
        find_changed(self._policy.table, &self.batch)
        while known and (
            is_own[known - 1] or resident(self._policy.table, &self.batch, known - 1) == NULL
        ):
            known -= 1
        serve_at_once(self._policy.table, &self.batch, known, num_last)

    def _unshared(self, hashes):
        cdef list batch = find_batch(self, hashes)
        cdef Py_ssize_t index
        return [
            batch[index]
            for index in range(len(batch))
            if resident(self._policy.table, &self.batch, index) != NULL
            and not resident(self._policy.table, &self.batch, index).flags & IS_SHARED
        ]

    def _store(self, hashes, *, bint is_last):
        cdef list batch = open_batch(self, hashes)
        return store(self, &self.batch, 0, None, is_last)

    # -- the life of a block -----------------------------------------------------------------

    cdef Py_ssize_t pin_batch(self, Batch* batch, int64_t* block_ids) noexcept:
        cdef Table* table = self._policy.table
        cdef Py_ssize_t index, undo
        cdef Node* node
        find_changed(table, batch)
        for index in range(batch.size):
            node = resident(table, batch, index)
            # As unsigned, the count of a pending block is above it, too.
            if node == NULL or <uint32_t>node.block.ref_cnt >= <uint32_t>MOST_PINS:
                for undo in range(index):
                    self.unpin_node(batch.node_ids[undo])
                return index
            pin(&self.states, node)
            if block_ids != NULL:
                block_ids[index] = own_id(table, batch.node_ids[index], node)
        # A search would meet all pinned nodes: park them during the load if they are that many.
        if self.states.num_pinned > self._policy.num_resident // 4:
            self._policy.c_park(2 * <uint64_t>batch.size)
        return -1

    cdef object load_error(self, bytes block_hash):
        cdef Node* node = self.resident_node(block_hash)
        if node == NULL:
            return errors.block_not_found("prepare_load", block_hash)
        if node.block.ref_cnt < 0:
            return errors.block_not_ready("prepare_load", block_hash)
        return errors.ref_count_overflow("prepare_load", block_hash)

    cdef int release(self, Batch* batch, list keys, Py_ssize_t start, Ended* ended) except -1:
        cdef Table* table = self._policy.table
        cdef Py_ssize_t index, undo
        cdef Node* node
        cdef uint32_t sum = 0
        cdef int64_t one = -1
        find_changed(table, batch)
        for index in range(batch.size):
            node = resident(table, batch, index)
            if node == NULL or node.block.ref_cnt <= 0:
                # A ring notified of an idle block skips it while it is pinned.
                for undo in range(index):
                    pin(&self.states, node_at(table, batch.node_ids[undo]))
                if node == NULL:
                    raise errors.block_not_found("complete_load", keys[start + index])
                raise errors.block_not_pinned("complete_load", keys[start + index])
            one = node.block.block_id
            sum += <uint32_t>one
            if unpin(&self.states, node) and node.flags & PARKED:
                self._policy.became_idle(batch.node_ids[index], node)
        if ended != NULL:
            ended[0] = Ended(batch.size, sum, one)
        if self._watch is not None:
            self._watch.c_closed(LOAD, table, batch)
        return 0

    cdef void unpin_node(self, uint32_t node_id) noexcept:
        cdef Node* node = node_at(self._policy.table, node_id)
        if unpin(&self.states, node) and node.flags & PARKED:
            self._policy.became_idle(node_id, node)

    cdef Py_ssize_t make_room(self, Batch* batch, Py_ssize_t num_missing, bint is_last) except -2:
        cdef CompiledPolicy policy = self._policy
        cdef int64_t num_free = pool_num_free(&self._pool.pool)
        cdef Py_ssize_t num_admitted = find_room(policy, batch, num_missing, num_free, is_last)
        if num_admitted >= 0:
            return num_admitted
        if not policy.victims.no_memory:
            self.counters.refused_stores += 1
            if self._watch is not None:
                self._watch.c_offered(policy.table, batch, -1, num_missing)
        forget(policy.table, batch, 0, num_missing)
        if policy.victims.no_memory:
            raise MemoryError()
        return -1

    cdef list victim_keys(self):
        cdef CompiledPolicy policy = self._policy
        cdef Py_ssize_t index
        cdef list keys = [None] * <Py_ssize_t>policy.victims.size
        for index in range(len(keys)):
            keys[index] = key_of(node_at(policy.table, policy.victims.items[index].node_id))
        return keys

    cdef void evict_victims(self, WatchCore watch) noexcept:
        cdef CompiledPolicy policy = self._policy
        cdef uint64_t index, size = policy.victims.size
        cdef uint32_t node_id
        cdef Node* node
        cdef bint watched = watch is not None and watch.begin(<Py_ssize_t>size)
        for index in range(size):
            node_id = policy.victims.items[index].node_id
            node = node_at(policy.table, node_id)
            if node.flags & SAMPLED and watched:
                watch.meet_leaving(hash_node(policy.table, node))
            pool_give(&self._pool.pool, own_id(policy.table, node_id, node))
        if watch is not None:
            watch.on_eviction(size)
        self.counters.evicted_blocks += size
        policy.commit()

    cdef void note_stored(
        self, Batch* batch, Py_ssize_t num_admitted, Py_ssize_t num_missing
    ) noexcept:
        settle(self._policy, batch, num_admitted, num_missing)
        self.counters.stored_blocks += <uint64_t>num_admitted
        self.counters.not_admitted += <uint64_t>(num_missing - num_admitted)

    cdef void end_pending(self, bint succeeded, Ended* ended) noexcept:
        cdef CompiledPolicy policy = self._policy
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        cdef uint32_t sum = 0
        cdef int64_t one = -1
        cdef uint64_t num_pending = self.states.num_pending
        for index in range(self.batch.size):
            node = resident(policy.table, &self.batch, index)
            if node == NULL or node.block.ref_cnt >= 0:
                continue
            node_id = self.batch.node_ids[index]
            one = node.block.block_id
            sum += <uint32_t>one
            self.states.num_pending -= 1
            if succeeded:
                make_ready(policy, node_id, node)
                continue
            self.counters.failed_blocks += 1
            pool_give(&self._pool.pool, own_id(policy.table, node_id, node))
            policy.c_removed(node_id, node)
            policy.take_off(node_id, node)
            drop_key(policy.table, node_id, node)
        if ended != NULL:
            ended[0] = Ended(<Py_ssize_t>(num_pending - self.states.num_pending), sum, one)

    def take_events(self):
        if self._events is None:
            return iter(())
        held = CollectorOff()
        fresh = []
        iterator = iter(self._events)
        self._events = fresh
        return iterator

    def _drop_all(self):
        cdef CollectorOff held = CollectorOff()
        self.drop_all()

    cdef int drop_all(self) except -1:
        cdef CompiledPolicy policy = self._policy
        cdef int64_t held = self._pool.pool.num_fresh - self._pool.pool.num_freed
        cdef list order = None
        cdef uint32_t node_id
        cdef int ring_index
        cdef Node* node
        if held != <int64_t>policy.num_resident:
            # Others hold slots of this pool: free only this manager's, oldest first.
            order = []
            for ring_index in range(policy.num_rings):
                order += policy.c_node_ids(ring_index)
            for node_id in order:
                node = node_at(policy.table, node_id)
                if node.flags & RESIDENT:
                    pool_give(&self._pool.pool, own_id(policy.table, node_id, node))
        else:
            pool_reset(&self._pool.pool)
        policy.clear_now()
        self.states = BlockStates(0, 0)
        self._resets += 1
        if self._watch is not None:
            self._watch.on_reset()
        return 0

    cdef Node* resident_node(self, object block_hash) noexcept:
        cdef uint32_t node_id
        cdef Node* node
        if type(block_hash) is not bytes or not block_hash:
            return NULL
        node_id = find_key(self._policy, <bytes>block_hash)
        if node_id == NIL:
            return NULL
        node = node_at(self._policy.table, node_id)
        return node if node.flags & RESIDENT else NULL

    # -- what can be seen --------------------------------------------------------------------

    def _stats(self):
        cdef dict counters = self.counters
        return {
            **counters,
            "resident": self._policy.num_resident,
            "pending": max(<int64_t>self.states.num_pending, <int64_t>0),
            "pinned": max(<int64_t>self.states.num_pinned, <int64_t>0),
            "free": pool_num_free(&self._pool.pool),
            "ghosts": self._policy.c_num_ghosts(),
        }

    def __len__(self):
        return self._policy.num_resident

    def __contains__(self, block_hash):
        return self.resident_node(block_hash) != NULL

    @property
    def _backend_object(self):
        return self._pool

    @property
    def _policy_object(self):
        return self._policy

    def _block_table(self):
        cdef CompiledPolicy policy = self._policy  # held while other threads run
        return policy.block_table

    def _check(self):
        cdef BlockStates counted = BlockStates(0, 0)
        cdef uint32_t node_id
        cdef Node* node
        self._policy._check()
        self._pool._check()
        block_ids = set()
        for node_id in range(self._policy.table.num_used):
            node = node_at(self._policy.table, node_id)
            if node.flags & RESIDENT:
                block_ids.add(node.block.block_id)
                counted.num_pending += node.block.ref_cnt < 0
                counted.num_pinned += node.block.ref_cnt > 0
            if self._watch is not None and node.key_length and bool(node.flags & SAMPLED) != (
                self._watch.samples(hash_node(self._policy.table, node))
            ):
                raise AssertionError("the flag says which keys are sampled")
        if <uint64_t>len(block_ids) != self._policy.num_resident:
            raise AssertionError("every resident block owns a slot of its own")
        if (
            counted.num_pending != self.states.num_pending
            or counted.num_pinned != self.states.num_pinned
        ):
            raise AssertionError("pending and pinned blocks are counted")
        if self._watch is not None:
            self._watch._check()


# -- the steps of the library's manager ---------------------------------------------------------


cdef list open_batch(CompiledSteps steps, object hashes):
    """Return the batch as a checked list, which the scratch arrays point into."""
    cdef list batch
    tick(steps)
    batch = checked_list(hashes, "hashes")
    batch_open(&steps.batch, batch)
    return batch


cdef list find_batch(CompiledSteps steps, object hashes):
    """Open a batch, and find the nodes of its keys."""
    cdef list batch = open_batch(steps, hashes)
    find_changed(steps._policy.table, &steps.batch)
    return batch


cdef int tick(CompiledSteps steps) except -1:
    """Let a watch read its clock, which may be a user's, before a call reads the state."""
    cdef WatchCore watch = steps._watch  # held while it runs
    if watch is not None:
        watch.tick()
    return 0


cdef void note_lookup(CompiledSteps steps, Batch* batch, Py_ssize_t num_hits) noexcept:
    """Count a lookup, for the watch, too."""
    steps.counters.lookups += 1
    steps.counters.lookup_blocks += <uint64_t>batch.size
    steps.counters.hit_blocks += <uint64_t>num_hits
    if steps._watch is not None:
        steps._watch.c_looked_up(steps._policy.table, batch, num_hits)


cdef void extend_found(CompiledSteps steps) noexcept:
    """Use the batch, which extends a request."""
    steps._policy.extend_request(&steps.batch)
    if steps._watch is not None:
        steps._watch.c_extended(steps._policy.table, &steps.batch)


cdef void release_batch(CompiledSteps steps, Batch* batch) noexcept:
    """Release the blocks that only one session uses; the policy has made room."""
    steps._policy.c_release(batch, IS_SHARED)
    if steps._watch is not None:
        steps._watch.c_released(steps._policy.table, batch)


cdef str source_of(CompiledSteps steps, object hints):
    """Return the source of hints for the watch to count, None without one; may run Python code."""
    return None if hints is None or steps._watch is None else str(hints.source)


cdef int finish_batch(
    CompiledSteps steps,
    Batch* batch,
    object hints,
    const Hint* hint,
    str source,
    Py_ssize_t met,
    Py_ssize_t own,
    Py_ssize_t num_last,
    Py_ssize_t first,
    Py_ssize_t last,
) except -1:
    """Use the batch for the last time; release it if the hint says that its session ends.

    The watch counts the source, unless it is None. `hints` are those of the hint; `met`, `own`,
    `num_last`, `first` and `last` are those of `InSession`.
    """
    cdef CompiledPolicy policy = steps._policy
    cdef bint ends = hint != NULL and hint.ends
    cdef Py_ssize_t prompt
    find_changed(policy.table, batch)
    if ends and not policy.ensure_release(batch.size):
        raise MemoryError()
    if source is not None:
        steps._watch.note_hints(source, hint.ends, hint.expect_s > 0.0)
    policy.finish_request(batch, hint)
    leave(policy.table, batch, met, own, num_last)
    if steps._watch is not None:
        prompt = batch.size + 1 - num_last
        steps._watch.c_finished(policy.table, batch, first, last, prompt, hints, hint)
    if ends:
        release_batch(steps, batch)
    return 0


cdef object load(CompiledSteps steps, Batch* batch):
    """Pin the batch and return the slots."""
    cdef cnp.ndarray block_ids
    cdef Py_ssize_t index
    cdef int collecting = PyGC_Disable()
    try:
        block_ids = new_ids(batch.size)
        spec = new_spec(block_ids)
        index = steps.pin_batch(batch, <int64_t*>cnp.PyArray_DATA(block_ids))
    finally:
        if collecting:
            PyGC_Enable()
    if index >= 0:
        raise steps.load_error(<object>batch.items[index])
    steps.counters.loaded_blocks += <uint64_t>batch.size
    if steps._watch is not None:
        steps._watch.c_opened(LOAD, <int64_t*>cnp.PyArray_DATA(block_ids), batch.size)
    return spec


cdef object store(
    CompiledSteps steps, Batch* batch, Py_ssize_t start, CompiledRequest request, bint is_last
):
    """Store the missing blocks of the batch, which the request, if there is one, has at `start`."""
    cdef int collecting = PyGC_Disable()
    try:
        return store_now(steps, batch, start, request, is_last)
    finally:
        if collecting:
            PyGC_Enable()


cdef object store_now(
    CompiledSteps steps, Batch* batch, Py_ssize_t start, CompiledRequest request, bint is_last
):
    cdef list storing = None
    cdef CompiledPolicy policy = steps._policy
    cdef Py_ssize_t num_missing = choose_missing(policy, batch, NULL)
    cdef Py_ssize_t num_admitted, index, first
    cdef cnp.ndarray block_ids
    cdef int64_t* block_id
    cdef Node* node
    if num_missing < 0:
        raise MemoryError()
    if num_missing == 0:
        return new_output([], new_spec(new_ids(0)), [])
    num_admitted = steps.make_room(batch, num_missing, is_last)
    if num_admitted < 0:
        return None
    first = start + <Py_ssize_t>batch.indexes[0]
    try:
        block_ids = new_ids(num_admitted)
        to_store = chosen_keys(batch, num_admitted)
        if request is not None and num_admitted:
            storing = storing_with(request, batch, first, to_store)
        evicted = packed_victims(steps)
        output = new_output(to_store, new_spec(block_ids), evicted)
        if steps._events is not None and evicted:
            removed = list(evicted) if type(evicted) is list else evicted
            steps._events.append(new_event(removed, steps._pool, True))
    except BaseException:
        policy.cancel()
        forget(policy.table, batch, 0, num_missing)
        raise
    if steps._watch is not None:
        steps._watch.c_offered(policy.table, batch, num_admitted, num_missing)
    if request is not None and num_admitted:
        request._note_own(first)
        request.first = first if request.last < 0 else request.first
        request.last = start + <Py_ssize_t>batch.indexes[num_admitted - 1]
    steps.evict_victims(steps._watch)
    block_id = <int64_t*>cnp.PyArray_DATA(block_ids)
    for index in range(num_admitted):
        node = node_at(policy.table, batch.chosen[index])
        begin_store(&steps.states, policy, &steps._pool.pool, node)
        block_id[index] = node.block.block_id
        policy.c_insert(batch.chosen[index], node)
    steps.note_stored(batch, num_admitted, num_missing)
    if steps._watch is not None:
        steps._watch.c_opened(STORE, block_id, num_admitted)
    if storing is not None:
        note_storing(request, storing, first, num_admitted)
    return output


cdef list storing_with(
    CompiledRequest request, const Batch* batch, Py_ssize_t first, list to_store
):
    """Return the list that has the keys of a request's stores with one more, not empty."""
    cdef Py_ssize_t last = len(to_store) - 1
    if (
        request.storing is request.keys
        and request.store_stop in (0, first)
        and <Py_ssize_t>(batch.indexes[last] - batch.indexes[0]) == last
    ):
        return request.keys
    return request.storing[request.store_start : request.store_stop] + to_store


cdef void note_storing(
    CompiledRequest request, list storing, Py_ssize_t first, Py_ssize_t size
) noexcept:
    """Note a store of blocks, the first at this position, with the list that has their keys."""
    if storing is not request.keys:
        request.store_start, request.store_stop = 0, len(storing)
    else:
        if request.store_stop == 0:
            request.store_start = first
        request.store_stop = first + size
    request.storing = storing


cdef object packed_victims(CompiledSteps steps):
    """Return the keys of the victims, in eviction order, packed if possible."""
    cdef CompiledPolicy policy = steps._policy
    cdef Py_ssize_t index, size = <Py_ssize_t>policy.victims.size
    cdef _PackedKeys packed
    cdef Node* node
    if size:
        packed = new_keys(size)
        for index in range(size):
            node = node_at(policy.table, policy.victims.items[index].node_id)
            if node.key_length == LONG_KEY:
                return steps.victim_keys()
            packed.keys[index].length = node.key_length
            memcpy(packed.keys[index].key, node.key, INLINE_KEY_BYTES)
        return packed
    return []


cdef int end_stores(CompiledSteps steps, list keys, Py_ssize_t start, bint succeeded) except -1:
    """Make the pending blocks of the steps' batch, the keys from `start` on, idle, or drop them."""
    find_changed(steps._policy.table, &steps.batch)
    if succeeded and steps._events is not None:
        held = CollectorOff()
        stored = pending_keys(steps._policy.table, &steps.batch, keys[start:] if start else keys)
        if stored:
            steps._events.append(new_event(stored, steps._pool, False))
    if steps._watch is not None:
        steps._watch.c_closed(STORE, steps._policy.table, &steps.batch)
        if not succeeded:
            steps._watch.c_failed(steps._policy.table, &steps.batch)
    steps.end_pending(succeeded, NULL)
    return 0


# Without tp_clear, since its methods need the objects they refer to. Cycles are broken at the dict
# of the manager, which is cleared.
@cython.final
@cython.no_gc_clear
cdef class CompiledRequest:
    """A request that knows the nodes of its blocks."""

    def __dealloc__(self):
        batch_close(&self.batch)

    def __init__(self):
        raise TypeError("a request is begun by a manager")

    def __reduce__(self):
        raise errors.cannot_pickle(self)

    def lookup(self, start=0):
        cdef CompiledSteps steps = self.steps
        cdef WatchCore watch = steps._watch  # held while its Python code runs
        cdef Py_ssize_t first = 0, end, num_hits
        cdef Batch part
        cdef Batch* asked
        require_open(self, "lookup")
        if watch is not None:
            watch.begin_lookup()
        first = bounds(self, start, None, &end)
        if watch is not None and (first or self.hints is not None):
            before = self.keys[:first] if first else None
            watch.hear(self.hints, before)
        asked = part_of(self, first, self.batch.size, &part)
        find_changed(steps._policy.table, asked)
        num_hits = num_ready(steps._policy.table, asked)
        note_lookup(steps, asked, num_hits)
        return num_hits

    def prepare_load(self, start, stop):
        cdef Py_ssize_t first, end
        cdef Batch part
        require_open(self, "prepare_load")
        tick(self.steps)
        first = bounds(self, start, stop, &end)
        note_resets(self)
        loading = open_loads(self) if self.load_stop else self.loading
        spec = load(self.steps, part_of(self, first, end, &part))
        if first < end:
            self.loading = loading
            self.load_start, self.load_stop = first, end
        return spec

    def _note_loaded(self, Py_ssize_t start, Py_ssize_t stop):
        note_resets(self)
        if start < stop:
            self.loading = open_loads(self) if self.load_stop else self.loading
            self.load_start, self.load_stop = start, stop

    def complete_load(self, start, stop):
        cdef CompiledSteps steps = self.steps
        cdef Py_ssize_t first, end
        cdef Batch part
        cdef list outdated, loading, keys, before, before_reset
        tick(steps)
        first = bounds(self, start, stop, &end)
        note_resets(self)
        if self.outdated is None and first == self.load_start and end == self.load_stop:
            steps.release(part_of(self, first, end, &part), self.keys, first, NULL)
            self.load_stop = 0
            return
        while True:
            before, before_reset = open_loads(self), self.outdated
            loading, outdated, keys = without_part(self, before, before_reset, first, end)
            # Python code has run, and maybe another thread's call of this request.
            if before == open_loads(self) and before_reset is self.outdated:
                break
            note_resets(self)
        batch_open(&steps.batch, keys)
        steps.release(&steps.batch, keys, 0, NULL)
        self.loading, self.outdated, self.load_stop = loading or None, outdated, 0

    def prepare_store(self, start=0, stop=None):
        cdef Py_ssize_t first, end
        cdef Batch part
        cdef Batch* stored
        require_open(self, "prepare_store")
        tick(self.steps)
        first = bounds(self, start, stop, &end)
        stored = part_of(self, first, end, &part)
        note_resets(self)
        output = store(self.steps, stored, first, self, self.ends)
        if self.own < 0:
            self.own = self.batch.size
        self.batch.num_chosen = stored.num_chosen
        return output

    def complete_store(self, success=True):
        cdef CompiledSteps steps = self.steps
        cdef bint succeeded = success is True or check_bool("success", success)
        cdef Py_ssize_t size
        tick(steps)
        note_resets(self)
        size = self.store_stop - self.store_start
        if not batch_ensure(&steps.batch, size):
            raise MemoryError()
        batch_set(&steps.batch, list_items(self.storing) + self.store_start, size)
        hint_chosen(&steps.batch, &self.batch)
        end_stores(steps, self.storing, self.store_start, succeeded)
        self.storing, self.store_start, self.store_stop = self.keys, 0, 0

    cpdef int _note_own(self, Py_ssize_t first) except -1:
        note_resets(self)
        if self.own < 0 or first < self.own:
            self.own = first
        return 0

    def extend(self, hashes):
        cdef CompiledSteps steps = self.steps
        cdef Py_ssize_t size
        cdef bint is_known
        require_open(self, "extend")
        batch = find_batch(steps, hashes)
        require_open(self, "extend")  # an iterator, or a clock, may have finished it
        if not batch_fit(&self.batch, self.batch.size + len(batch)):
            raise MemoryError()
        self.keys += batch
        extend_found(steps)
        size = self.batch.size
        is_known = num_known(steps._policy.table, &steps.batch, 0) > 0
        batch_extend(&self.batch, list_items(self.keys), &steps.batch)
        if is_known:
            find_changed(steps._policy.table, &self.batch)
            meet(steps._policy.table, &self.batch, size)

    def finish(self, *, hints=None, now=None):
        cdef Hint said
        cdef const Hint* hint
        cdef Py_ssize_t own, num_last
        cdef str source = None
        if now is not None:
            base.check_now(now)
        if hints is not None:
            check_hints(hints)
        said_last = self.hints if hints is None else hints
        if hints is not None and hints != self.hints:
            source = source_of(self.steps, hints)
        if self.is_finished:
            return
        tick(self.steps)
        hint = self.steps._policy.hint_of(said_last, &said)
        if self.is_finished:
            return
        note_resets(self)
        own = self.met if self.own < 0 else self.own
        num_last = self.batch.size - max(0, self.prompt - 1)
        finish_batch(
            self.steps, &self.batch, said_last, hint, source,
            self.met, own, num_last, self.first, self.last,
        )
        self.is_finished = True

    @property
    def hashes(self):
        return tuple(self.keys)

    def __len__(self):
        """Return the number of blocks."""
        return self.batch.size

    def __bool__(self):
        """Return True, even for a request without blocks."""
        return True

    def __enter__(self):
        """Return the request."""
        require_open(self, "with")
        return self

    def __exit__(self, kind, error, traceback):
        """Finish the request."""
        self.finish()

    def __repr__(self):
        """Return the number of blocks, and whether the request has finished."""
        return base.request_summary(self)


cdef CompiledRequest begin_request(
    CompiledSteps steps, object manager, object hashes, object hints
):
    """Begin a request: the first use of its blocks."""
    cdef CompiledRequest request = CompiledRequest.__new__(CompiledRequest)
    cdef list keys
    cdef Hint said
    cdef const Hint* hint
    cdef str source = source_of(steps, hints)
    tick(steps)
    keys = list(hashes if type(hashes) is list else as_batch(hashes))  # before others change it
    if not check_items(keys):
        raise batch_error(keys)
    if not batch_fit(&request.batch, len(keys)):
        raise MemoryError()
    batch_set(&request.batch, list_items(keys), len(keys))
    hint = steps._policy.hint_of(hints, &said)  # after the last Python code of others
    request.steps = steps
    request.manager = manager
    request.keys = request.storing = keys
    request.own, request.last, request.prompt = -1, -1, len(keys)
    request.resets = steps._resets
    request.hints = hints
    request.ends = hint != NULL and hint.ends
    # Consecutive requests often begin alike: try the nodes of the last one.
    batch_ensure(&steps.batch, request.batch.size)
    hint_found(&request.batch, &steps.batch)
    find_changed(steps._policy.table, &request.batch)
    hint_found(&steps.batch, &request.batch)
    steps.batch.size = steps.batch.num_hints
    if source is not None:
        steps._watch.note_hints(source, hint.ends, hint.expect_s > 0.0)
    steps._policy.begin_request(&request.batch, hint)
    request.met = meet(steps._policy.table, &request.batch, 0)
    return request


cdef int require_open(CompiledRequest request, str call) except -1:
    """Raise RequestFinishedError if the request has finished."""
    if request.is_finished:
        raise errors.request_finished(call)
    return 0


cdef Py_ssize_t bounds(
    CompiledRequest request, object start, object stop, Py_ssize_t* end
) except -1:
    """Return the first index of a part, and set `end`; this may run Python code."""
    cdef Py_ssize_t size = request.batch.size, first = -1
    if type(start) is int and (stop is None or type(stop) is int):
        try:
            first = start
            end[0] = size if stop is None else stop
        except OverflowError:
            first = -1
    if not 0 <= first <= end[0] <= size:
        first, last = check_part(start, stop, size)
        end[0] = last
    return first


cdef Batch* part_of(
    CompiledRequest request, Py_ssize_t start, Py_ssize_t stop, Batch* part
) noexcept:
    """Return the batch of a part: `part`, or that of the request if the part is the whole."""
    if start == 0 and stop == request.batch.size:
        return &request.batch
    part[0] = batch_part(&request.batch, start, stop)
    return part


cdef int note_resets(CompiledRequest request) except -1:
    """Forget the blocks that it was using if the manager was reset since its last call."""
    cdef list loading
    if request.resets != request.steps._resets:
        loading = open_loads(request)
        if loading:
            request.outdated = (request.outdated or []) + loading
        request.storing, request.store_start, request.store_stop = request.keys, 0, 0
        request.loading = None
        request.load_stop = 0
        request.met, request.own, request.last = 0, -1, -1
        request.resets = request.steps._resets
    return 0


cdef list open_loads(CompiledRequest request):
    """Return all parts that it has pinned since the last reset."""
    cdef list loading = request.loading or []
    return loading + [(request.load_start, request.load_stop)] if request.load_stop else loading


cdef tuple without_part(
    CompiledRequest request, list loading, list outdated, Py_ssize_t first, Py_ssize_t end
):
    """Return the parts that remain pinned, those from before a reset, and the keys to unpin."""
    outdated, parts = base.take_part(outdated or [], first, end)
    for begin, until in parts:
        loading = base.take_part(loading, begin, until)[0]
    keys = [key for begin, until in parts for key in request.keys[begin:until]]
    return loading, outdated or None, keys


# Without tp_clear: objects cleared with it may still call it.
@cython.no_gc_clear
cdef class ManagerCore:
    """The calls of a block's life cycle, over the steps or else the skeleton."""

    cdef CompiledSteps steps        # None over parts of a user
    cdef readonly object _skeleton  # the steps, or the Python manager over the parts of a user
    cdef bint calls_own             # a subclass overrides methods, which requests must call

    _twin = "c"
    _backend_class = CPUBackend

    def __cinit__(self):
        self._skeleton = NOT_INITIALISED

    def __reduce__(self):
        raise errors.cannot_pickle(self)

    def _setup(self, policy, backend, enable_events, rebuild=None, *, watch=None):
        """Join the parts; `rebuild` builds a new policy if the first cannot be cleared."""
        cdef CompiledSteps steps = None
        cdef WatchCore core = None
        cdef list events = [] if enable_events else None
        calls_own = any([self._overrides(call) for call in CALLS])
        if registry.is_builtin(type(policy), "c") and type(backend) is CPUBackend:
            skeleton = steps = CompiledSteps()
            if watch is not None:
                core = watch.new_core(self, backend.get_num_free_blocks())
        else:
            if type(backend) is CPUBackend:
                backend = PythonCPUBackend(backend.block_size, backend.num_blocks)
            skeleton = PythonManager()
        if self._skeleton is not NOT_INITIALISED:
            raise errors.manager_initialised()
        if steps is None:
            skeleton._setup(policy, backend, enable_events, rebuild, self, watch=watch)
        else:
            if core is not None:
                core.look_at((<CompiledPolicy>policy).table, policy.get)
            ownership.take(policy, self)
            steps.join(policy, backend, events, core)
        self.calls_own = calls_own
        self.steps = steps
        self._skeleton = skeleton
        if core is not None:
            core.watch._join(self, core)

    # -- the life of a block -----------------------------------------------------------------

    def lookup(self, hashes):
        cdef CompiledSteps steps = self.steps
        cdef WatchCore watch
        cdef object batch = hashes
        cdef PyObject** items
        cdef Table* table
        cdef Py_ssize_t size, index = 0, end = 0
        cdef Node* node
        if steps is None:
            return self._skeleton.lookup(hashes)
        watch = steps._watch  # held while its Python code runs
        if watch is not None:
            watch.begin_lookup()
        if type(hashes) is tuple:
            items = tuple_items(<tuple>batch)
        else:
            if type(hashes) is not list:
                batch = as_batch(hashes)
            items = list_items(<list>batch)
        size = len(batch)
        table = steps._policy.table
        if not batch_ensure(&steps.batch, size):
            raise MemoryError()
        batch_set(&steps.batch, items, size)
        while index < size:
            if index == end:
                end = min(index + (LOOKUP_STEP if index else FIRST_LOOKUP_STEP), size)
                end = first_bad(items, index, end)
                if index == end:
                    raise batch_error(batch)
                find_range(table, &steps.batch, index, end)
            node = resident(table, &steps.batch, index)
            if node == NULL or node.block.ref_cnt < 0:
                break
            index += 1
        note_lookup(steps, &steps.batch, index)
        return index

    def begin(self, hashes, *, hints=None, now=None):
        if now is not None:
            base.check_now(now)
        if hints is not None:
            check_hints(hints)
        if self.calls_own or self.steps is None:
            return base.CallingRequest(self, as_batch(hashes), hints)
        return begin_request(self.steps, self, hashes, hints)

    def touch(self, hashes):
        cdef CompiledSteps steps = self.steps
        if steps is None:
            return self._skeleton.touch(hashes)
        batch = find_batch(steps, hashes)
        steps._policy.touch_batch(&steps.batch)

    def release(self, hashes):
        cdef CompiledSteps steps = self.steps
        if steps is None:
            return self._skeleton.release(hashes)
        batch = find_batch(steps, hashes)
        if not steps._policy.ensure_release(steps.batch.size):
            raise MemoryError()
        release_batch(steps, &steps.batch)

    def prepare_load(self, hashes):
        cdef CompiledSteps steps = self.steps
        if steps is None:
            return self._skeleton.prepare_load(hashes)
        batch = open_batch(steps, hashes)
        return load(steps, &steps.batch)

    def complete_load(self, hashes):
        cdef CompiledSteps steps = self.steps
        if steps is None:
            return self._skeleton.complete_load(hashes)
        batch = open_batch(steps, hashes)
        steps.release(&steps.batch, batch, 0, NULL)

    def prepare_store(self, hashes):
        cdef CompiledSteps steps = self.steps
        if steps is None:
            return self._skeleton.prepare_store(hashes)
        batch = open_batch(steps, hashes)
        return store(steps, &steps.batch, 0, None, False)

    def complete_store(self, hashes, success=True):
        cdef CompiledSteps steps = self.steps
        cdef bint succeeded
        if steps is None:
            return self._skeleton.complete_store(hashes, success)
        succeeded = success is True or check_bool("success", success)
        batch = open_batch(steps, hashes)
        hint_chosen(&steps.batch, &steps.batch)
        end_stores(steps, batch, 0, succeeded)

    def take_events(self):
        return self._skeleton.take_events()


cdef object NOT_INITIALISED = PythonManager()  # its methods raise


class Manager(ManagerCore, ManagerViews[Spec_co]):
    """The base of all compiled managers, for any policy and backend."""

    __slots__ = ()


Manager._base = Manager


base.take_contract(ManagerCore)
base.take_contract(CompiledRequest, base.Request)
base.Request.register(CompiledRequest)
