"""The manager skeleton, compiled: the lifecycle of a block, over C structures.

Structure
    A compiled policy holds the nodes; a compiled pool holds the slots; both are reached at C
    level. Where the policy or the backend is a user's own, ``delegate`` is the Python skeleton
    and every call goes there. See ``_manager_py`` for the Python twin.
Invariants
    As in the Python twin. No Python code runs between the first look at the state and the last change: batches are
    consumed before, and the collector is off while results are allocated.
"""

cimport cython
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

cimport numpy as cnp

from kvoffload._core.batch cimport batch_ensure, batch_set, find_all, find_range, hint_chosen
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.items cimport first_bad, list_items, tuple_items
from kvoffload._core.pool cimport pool_give, pool_num_free, pool_reset
from kvoffload._core.table cimport NIL, RESIDENT, SAMPLED, Node, Table, node_at, own_id, table_new_epoch
from kvoffload.managers._results_c cimport new_event, new_ids, new_output, new_spec
from kvoffload.managers._state_c cimport Counters, ManagerState
from kvoffload.managers._watch_c cimport LOAD, STORE, WatchCore
from kvoffload.policies._twin_c cimport CompiledPolicy

from kvoffload._checks import as_batch, batch_error, check_bool
from kvoffload.backends._cpu_c import CPUBackend
from kvoffload.backends._cpu_py import CPUBackend as PythonCPUBackend
from kvoffload.errors import (
    block_not_found,
    block_not_pinned,
    block_not_ready,
    cannot_pickle,
    manager_not_initialised,
    ref_count_overflow,
)
from kvoffload.managers._manager_py import Manager as PythonManager
from kvoffload.policies import _ownership as ownership
from kvoffload.policies import registry

cnp.import_array()

cdef enum:
    # Keys that a lookup checks and finds before it looks whether one is not ready: few at first,
    # since many a prompt is not known at all.
    FIRST_LOOKUP_STEP = 4
    LOOKUP_STEP = 64

@cython.no_gc_clear
cdef class Manager(ManagerState):
    """Hold what every compiled manager does, whichever policy it is built from."""

    def __reduce__(self):
        raise cannot_pickle(self)

    def _setup(self, policy, backend, enable_events, rebuild=None, *, watch=None):
        """Join the parts; a user's own are driven by the Python skeleton."""
        cdef CompiledPolicy own_policy = None
        cdef CompiledPolicy former_policy = self._policy
        cdef object former = self.policy if self.backend_object is not None else policy
        # What is replaced dies when all is done: its finalisers may call this manager.
        cdef object former_parts = (
            self.delegate, self.backend_object, self._pool, self._events, self._watch
        )
        cdef WatchCore core = None
        cdef object delegate = None
        cdef list events = [] if enable_events else None
        if registry.is_builtin(type(policy), "c") and type(backend) is CPUBackend:
            own_policy = policy
            if watch is not None:
                core = WatchCore(watch.plan(self, backend.get_num_free_blocks()), watch.watch)
                core.attach(own_policy)
            ownership.take(policy, self)
        else:
            if type(backend) is CPUBackend:
                backend = PythonCPUBackend(backend.block_size, backend.num_blocks)
            delegate = PythonManager()
            delegate._setup(policy, backend, enable_events, rebuild, self, watch=watch)
        # From here on nothing fails.
        if former_policy is not None:
            former_policy.leave_manager(<void*>self)
        if own_policy is not None:
            own_policy.join_manager(<void*>self)
            self._pool = backend
        self._policy = own_policy
        self.delegate = delegate
        self.backend_object = backend
        self._events = events
        self._watch = core
        memset(&self.counters, 0, sizeof(Counters))
        self.num_pending = 0
        self.num_pinned = 0
        if core is not None:
            watch.watch._join(self, core)
        if former is not policy:
            ownership.release(former, self)

    # -- the life of a block -----------------------------------------------------------------

    def lookup(self, hashes):
        """Count the leading blocks that are ready."""
        if self._policy is None or self.delegate is not None:
            return self.driver().lookup(hashes)
        if self._watch is not None and self._watch.due:
            self._watch.watch._drain()
        cdef object batch = hashes
        cdef PyObject** items
        cdef Table* table = self._policy.table
        cdef Py_ssize_t size, place = 0, end = 0, num_sampled = 0
        cdef uint32_t slot
        cdef Node* node
        if type(hashes) is tuple:
            items = tuple_items(<tuple>batch)
        else:
            if type(hashes) is not list:
                batch = as_batch(hashes)
            items = list_items(<list>batch)
        size = len(batch)
        if not batch_ensure(&self.batch, size):
            raise MemoryError()
        batch_set(&self.batch, items, size)
        while place < size:
            if place == end:
                end = min(place + (LOOKUP_STEP if place else FIRST_LOOKUP_STEP), size)
                end = first_bad(items, place, end)
                if place == end:
                    raise batch_error(batch)
                find_range(table, &self.batch, place, end)
            slot = self.batch.slots[place]
            if slot == NIL:
                break
            node = node_at(table, slot)
            if not node.flags & RESIDENT or node.block.ref_cnt < 0:
                break
            if node.flags & SAMPLED:
                self.batch.places[num_sampled] = <uint32_t>place
                num_sampled += 1
            place += 1
        self.counters.lookups += 1
        self.counters.lookup_blocks += <uint64_t>size
        self.counters.hit_blocks += <uint64_t>place
        if self._watch is not None:
            self._watch.c_looked_up(&self.batch, place, num_sampled)
        return place

    def touch(self, hashes):
        """Mark blocks as recently used, last hash first."""
        if self._policy is None or self.delegate is not None:
            return self.driver().touch(hashes)
        cdef list batch = self.open_batch(hashes)
        find_all(self._policy.table, &self.batch)
        self._policy.c_touch(&self.batch)

    def prepare_load(self, hashes):
        """Pin every block for reading and say where they lie."""
        if self._policy is None or self.delegate is not None:
            return self.driver().prepare_load(hashes)
        cdef list batch = self.open_batch(hashes)
        cdef cnp.ndarray block_ids
        cdef Py_ssize_t place
        cdef object spec
        cdef int collecting = PyGC_Disable()
        try:
            block_ids = new_ids(self.batch.size)
            spec = new_spec(block_ids)
            place = self.pin(<int64_t*>cnp.PyArray_DATA(block_ids))
        finally:
            if collecting:
                PyGC_Enable()
        if place >= 0:
            raise self.load_error(batch[place])
        self.counters.loaded_blocks += <uint64_t>len(batch)
        if self._watch is not None:
            self._watch.c_opened(LOAD, <int64_t*>cnp.PyArray_DATA(block_ids), self.batch.size)
        return spec

    cdef object load_error(self, bytes block_hash):
        """Build the error of a block that cannot be pinned."""
        cdef Node* node = self.resident_node(block_hash)
        if node == NULL:
            return block_not_found("prepare_load", block_hash)
        if node.block.ref_cnt < 0:
            return block_not_ready("prepare_load", block_hash)
        return ref_count_overflow("prepare_load", block_hash)

    def complete_load(self, hashes):
        """Release one pin for each occurrence of each block."""
        if self._policy is None or self.delegate is not None:
            return self.driver().complete_load(hashes)
        cdef list batch = self.open_batch(hashes)
        cdef Table* table = self._policy.table
        cdef Py_ssize_t place, undo
        cdef uint32_t slot
        cdef Node* node
        find_all(table, &self.batch)
        for place in range(self.batch.size):
            slot = self.batch.slots[place]
            node = node_at(table, slot) if slot != NIL else NULL
            if node == NULL or not node.flags & RESIDENT or node.block.ref_cnt <= 0:
                # A ring that was told of an idle block passes over it while it is pinned.
                for undo in range(place):
                    self.repin(self.batch.slots[undo])
                if node == NULL or not node.flags & RESIDENT:
                    raise block_not_found("complete_load", batch[place])
                raise block_not_pinned("complete_load", batch[place])
            self.unpin(slot)
        if self._watch is not None:
            self._watch.c_loaded(&self.batch)

    def prepare_store(self, hashes):
        """Make room for the blocks that are not resident, and make them pending."""
        if self._policy is None or self.delegate is not None:
            return self.driver().prepare_store(hashes)
        cdef list batch = self.open_batch(hashes)
        cdef int collecting = PyGC_Disable()
        try:
            return self.store(batch)
        finally:
            if collecting:
                PyGC_Enable()

    cdef object store(self, list batch):
        cdef CompiledPolicy policy = self._policy
        cdef Py_ssize_t num_missing = self.choose_missing()
        cdef Py_ssize_t num_admitted, place
        cdef cnp.ndarray block_ids
        if num_missing < 0:
            raise MemoryError()
        if num_missing == 0:
            return new_output([], new_spec(new_ids(0)), [])
        policy.victims.no_memory = False
        num_admitted = policy.c_make_room(
            &self.batch, num_missing, pool_num_free(&self._pool.pool)
        )
        if num_admitted < 0:
            if self._watch is not None and not policy.victims.no_memory:
                self._watch.c_refused(&self.batch, num_missing)
            self.forget(0, num_missing)
            if policy.victims.no_memory:
                raise MemoryError()
            self.counters.refused_stores += 1
            return None
        try:
            block_ids = new_ids(num_admitted)
            to_store = PyList_New(num_admitted)
            for place in range(num_admitted):
                block_hash = batch[self.batch.places[place]]
                Py_INCREF(block_hash)
                PyList_SET_ITEM(to_store, place, block_hash)
            evicted = self.victim_keys()
            output = new_output(to_store, new_spec(block_ids), evicted)
            if self._events is not None and evicted:
                self._events.append(new_event(list(evicted), self.backend_object, True))
        except BaseException:
            policy.cancel()
            self.forget(0, num_missing)
            raise
        if self._watch is not None:
            self._watch.c_stored(&self.batch, num_admitted, num_missing)
        self.place_blocks(num_admitted, num_missing, <int64_t*>cnp.PyArray_DATA(block_ids))
        if self._watch is not None:
            self._watch.c_opened(STORE, <int64_t*>cnp.PyArray_DATA(block_ids), num_admitted)
        return output

    def complete_store(self, hashes, success=True):
        """Make pending blocks readable, or drop them."""
        if self._policy is None or self.delegate is not None:
            return self.driver().complete_store(hashes, success)
        cdef bint succeeded = success is True or (
            success is not False and check_bool("success", success)
        )
        cdef list batch = self.open_batch(hashes)
        cdef int collecting
        hint_chosen(&self.batch)
        find_all(self._policy.table, &self.batch)
        if succeeded and self._events is not None:
            collecting = PyGC_Disable()
            try:
                self.emit_stored(batch)
            finally:
                if collecting:
                    PyGC_Enable()
        if self._watch is not None:
            self._watch.c_ended(&self.batch, succeeded)
        self.end_stores(succeeded)

    cdef int emit_stored(self, list batch) except -1:
        """Append the event of the batch's pending blocks."""
        cdef Table* table = self._policy.table
        cdef Py_ssize_t place
        cdef uint32_t slot
        cdef Node* node
        cdef list stored = []
        table_new_epoch(table)
        for place in range(self.batch.size):
            slot = self.batch.slots[place]
            if slot == NIL:
                continue
            node = node_at(table, slot)
            if node.flags & RESIDENT and node.block.ref_cnt < 0 and not self.seen(node):
                stored.append(batch[place])
        if stored:
            self._events.append(new_event(stored, self.backend_object, False))
        return 0

    def take_events(self):
        """Return the events since the last call, oldest first."""
        if self._policy is None or self.delegate is not None:
            return self.driver().take_events()
        cdef list events, fresh
        cdef int collecting
        if self._events is None:
            return iter(())
        collecting = PyGC_Disable()
        try:
            fresh = []
            events = self._events
            iterator = iter(events)
            self._events = fresh
            return iterator
        finally:
            if collecting:
                PyGC_Enable()

    def reset_cache(self):
        """Drop everything, ghosts and adaptive state included, without events."""
        if self._policy is None or self.delegate is not None:
            return self.driver().reset_cache()
        cdef int collecting = PyGC_Disable()
        try:
            self.drop_all()
        finally:
            if collecting:
                PyGC_Enable()

    cdef int drop_all(self) except -1:
        """Give the slots back and empty the policy."""
        cdef CompiledPolicy policy = self._policy
        cdef int64_t held = self._pool.pool.num_fresh - self._pool.pool.num_freed
        cdef list order = None
        cdef uint32_t slot
        cdef int number
        cdef Node* node
        if held != <int64_t>policy.num_resident:
            # Somebody else holds slots of this pool: give back ours alone, oldest first.
            order = []
            for number in range(policy.num_rings):
                order += policy.c_slots(number)
            for slot in order:
                node = node_at(policy.table, slot)
                if node.flags & RESIDENT:
                    pool_give(&self._pool.pool, own_id(policy.table, slot, node))
        else:
            pool_reset(&self._pool.pool)
        policy.clear_now()
        self.num_pending = 0
        self.num_pinned = 0
        if self._watch is not None:
            self._watch.c_dropped()
        return 0

    # -- what can be seen --------------------------------------------------------------------

    def stats(self):
        """Return the counters since construction, and the present numbers of blocks.

        Returns
        -------
        dict of str to int
            ``lookups`` (calls), ``lookup_blocks``, ``hit_blocks``, ``stored_blocks`` (given a
            slot), ``failed_blocks``, ``evicted_blocks``, ``refused_stores`` (calls),
            ``not_admitted``, ``loaded_blocks``; and now: ``resident``, ``pending``, ``pinned``,
            ``free``, ``ghosts``.
        """
        if self._policy is None or self.delegate is not None:
            return self.driver().stats()
        return {
            "lookups": self.counters.lookups,
            "lookup_blocks": self.counters.lookup_blocks,
            "hit_blocks": self.counters.hit_blocks,
            "stored_blocks": self.counters.stored_blocks,
            "failed_blocks": self.counters.failed_blocks,
            "evicted_blocks": self.counters.evicted_blocks,
            "refused_stores": self.counters.refused_stores,
            "not_admitted": self.counters.not_admitted,
            "loaded_blocks": self.counters.loaded_blocks,
            "resident": self._policy.num_resident,
            "pending": max(<int64_t>self.num_pending, <int64_t>0),
            "pinned": max(<int64_t>self.num_pinned, <int64_t>0),
            "free": pool_num_free(&self._pool.pool),
            "ghosts": self._policy.c_num_ghosts(),
        }

    def __len__(self):
        """Return the number of resident blocks."""
        if self._policy is None or self.delegate is not None:
            return len(self.driver())
        return self._policy.num_resident

    def __bool__(self):
        """Be true, empty or not."""
        return True

    def __contains__(self, block_hash):
        """Tell whether a block is resident."""
        if self._policy is None or self.delegate is not None:
            return block_hash in self.driver()
        return self.resident_node(block_hash) != NULL

    @property
    def _backend_object(self):
        if self.backend_object is None:
            raise manager_not_initialised()
        return self.backend_object

    @property
    def block_size(self):
        """Tokens a block."""
        return self._backend_object.block_size

    @property
    def medium(self):
        """Name of the medium, as events carry it."""
        return self._backend_object.medium

    @property
    def policy(self):
        """The policy that decides which block leaves."""
        if self._policy is None or self.delegate is not None:
            return self.driver().policy
        return self._policy

    @property
    def watch(self):
        """The ``Watch`` that looks on, or None."""
        if self._policy is None or self.delegate is not None:
            return self.driver().watch
        return None if self._watch is None else self._watch.watch

    @property
    def events(self):
        """Copy of the events not yet taken; None when events are off."""
        if self._policy is None or self.delegate is not None:
            return self.driver().events
        return None if self._events is None else list(self._events)

    @property
    def block_table(self):
        """Statuses as a read-only structured array, ``(n,)`` for n resident blocks, in no order.

        It shows the moment of the call, not what changes later.
        """
        if self._policy is None or self.delegate is not None:
            return self.driver().block_table
        return self._policy.block_table

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        if self._policy is None or self.delegate is not None:
            return self.driver()._check()
        self.check_state()
        if self._watch is not None:
            self._watch._check()
