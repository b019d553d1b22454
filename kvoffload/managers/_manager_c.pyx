"""The manager skeleton, compiled: the lifecycle of a block, over C structures.

Structure
    A compiled policy holds the nodes; a compiled pool holds the slots; both are reached at C
    level. Where the policy or the backend is a user's own, ``delegate`` is the Python skeleton
    and every call goes there. See ``_manager_py`` for the Python twin.
Invariants
    As in the Python twin; ``num_pending`` and ``num_pinned`` count the resident blocks by state.
    No Python code runs between the first look at the state and the last change: batches are
    consumed before, and the collector is off while results are allocated.
"""

from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

cimport numpy as cnp

from kvoffload._core.batch cimport (
    Batch,
    batch_close,
    batch_ensure,
    batch_set,
    find_all,
    find_range,
    hint_chosen,
    item_key,
    item_length,
)
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.items cimport check_items, list_items
from kvoffload._core.pool cimport pool_give, pool_num_free, pool_reset, pool_take
from kvoffload._core.ring cimport ring_slots
from kvoffload._core.table cimport (
    NIL,
    PARKED,
    RESIDENT,
    Node,
    Table,
    add_key,
    drop_key,
    hash_key,
    index_find,
    node_at,
    table_new_epoch,
)
from kvoffload._core.victims cimport victims_cancel
from kvoffload.backends._cpu_c cimport PoolCore
from kvoffload.policies._twin_c cimport CompiledPolicy, key_of

from kvoffload._checks import as_batch, batch_error
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
from kvoffload.policies import registry
from kvoffload.types import CPULoadStoreSpec, OffloadingEvent, PrepareStoreOutput

cnp.import_array()

cdef enum:
    MOST_PINS = 0x7FFFFFFF
    # Keys that a lookup finds before it looks whether one is not ready: few at first, since many
    # a prompt is not known at all.
    FIRST_LOOKUP_STEP = 4
    LOOKUP_STEP = 64

cdef object new_object = object.__new__


cdef inline cnp.ndarray new_ids(Py_ssize_t size):
    cdef cnp.npy_intp length = size
    return cnp.PyArray_SimpleNew(1, &length, cnp.NPY_INT64)


cdef inline object new_spec(cnp.ndarray block_ids):
    """Build the spec without its constructor, which checks and copies."""
    spec = new_object(CPULoadStoreSpec)
    spec.block_ids = block_ids
    return spec


cdef inline object new_output(list to_store, object spec, list evicted):
    """Build the output without its constructor, which is Python."""
    output = new_object(PrepareStoreOutput)
    output.block_hashes_to_store = to_store
    output.store_spec = spec
    output.block_hashes_evicted = evicted
    return output


cdef inline object new_event(list block_hashes, object backend, bint removed):
    """Build the event without its constructor: another thread may run while Python code does."""
    event = new_object(OffloadingEvent)
    event.block_hashes = block_hashes
    event.block_size = backend.block_size
    event.medium = backend.medium
    event.removed = removed
    return event


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


cdef class Manager:
    """Hold what every compiled manager does, whichever policy it is built from."""

    cdef CompiledPolicy _policy
    cdef PoolCore _pool
    cdef object delegate            # the Python skeleton over a user's parts, or None
    cdef readonly object _backend_object
    cdef list _events               # None when off
    cdef Batch batch                # of the call at work
    cdef Counters counters
    cdef uint64_t num_pending
    cdef uint64_t num_pinned

    def __cinit__(self):
        memset(&self.batch, 0, sizeof(Batch))
        memset(&self.counters, 0, sizeof(Counters))

    def __dealloc__(self):
        batch_close(&self.batch)

    def __reduce__(self):
        raise cannot_pickle(self)

    def _setup(self, policy, backend, enable_events, rebuild=None):
        """Join the parts; a user's own are driven by the Python skeleton."""
        if registry.is_builtin(type(policy), "c") and type(backend) is CPUBackend:
            self.delegate = None
            self._policy = policy
            self._policy.victims.managed = True
            self._pool = backend
        else:
            if type(backend) is CPUBackend:
                backend = PythonCPUBackend(backend.block_size, backend.num_blocks)
            delegate = PythonManager()
            delegate._setup(policy, backend, enable_events, rebuild)
            self.delegate = delegate
        self._backend_object = backend
        self._events = [] if enable_events else None
        memset(&self.counters, 0, sizeof(Counters))
        self.num_pending = 0
        self.num_pinned = 0

    cdef object driver(self):
        """Return the Python skeleton where there is one; an error before ``__init__``."""
        if self.delegate is None:
            raise manager_not_initialised()
        return self.delegate

    cdef list open_batch(self, object hashes):
        """Return the batch as a checked list, which the scratch arrays point into."""
        cdef list batch
        if type(hashes) is list:
            batch = <list>hashes
            if not check_items(batch):
                raise batch_error(batch)
        else:
            batch = as_batch(hashes)
        if not batch_ensure(&self.batch, len(batch)):
            raise MemoryError()
        batch_set(&self.batch, list_items(batch), len(batch))
        return batch

    # -- the life of a block -----------------------------------------------------------------

    def lookup(self, hashes):
        """Count the leading blocks that are ready."""
        if self._policy is None or self.delegate is not None:
            return self.driver().lookup(hashes)
        cdef list batch = self.open_batch(hashes)
        cdef Table* table = self._policy.table
        cdef Py_ssize_t size = self.batch.size
        cdef Py_ssize_t place = 0, end = 0
        cdef uint32_t slot
        cdef Node* node
        while place < size:
            if place == end:
                end = min(place + (LOOKUP_STEP if place else FIRST_LOOKUP_STEP), size)
                find_range(table, &self.batch, place, end)
            slot = self.batch.slots[place]
            if slot == NIL:
                break
            node = node_at(table, slot)
            if not node.flags & RESIDENT or node.block.ref_cnt < 0:
                break
            place += 1
        self.counters.lookups += 1
        self.counters.lookup_blocks += <uint64_t>size
        self.counters.hit_blocks += <uint64_t>place
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
        return spec

    cdef Py_ssize_t pin(self, int64_t* block_ids) noexcept:
        """Pin the batch; return the position of the first block that cannot be, or -1."""
        cdef Table* table = self._policy.table
        cdef Py_ssize_t place, undo
        cdef uint32_t slot
        cdef Node* node
        find_all(table, &self.batch)
        for place in range(self.batch.size):
            slot = self.batch.slots[place]
            node = node_at(table, slot) if slot != NIL else NULL
            if (
                node == NULL
                or not node.flags & RESIDENT
                or node.block.ref_cnt < 0
                or node.block.ref_cnt == MOST_PINS
            ):
                for undo in range(place):
                    self.unpin(self.batch.slots[undo])
                return place
            self.num_pinned += node.block.ref_cnt == 0
            node.block.ref_cnt += 1
            block_ids[place] = node.block.block_id
        return -1

    cdef inline void unpin(self, uint32_t slot) noexcept:
        """Take one pin from a pinned block."""
        cdef Node* node = node_at(self._policy.table, slot)
        node.block.ref_cnt -= 1
        if node.block.ref_cnt == 0:
            self.num_pinned -= 1
            if node.flags & PARKED:
                self._policy.became_idle(slot, node)

    cdef inline void repin(self, uint32_t slot) noexcept:
        """Give a block the pin back that `unpin` took."""
        cdef Node* node = node_at(self._policy.table, slot)
        self.num_pinned += node.block.ref_cnt == 0
        node.block.ref_cnt += 1

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
                self._events.append(new_event(list(evicted), self._backend_object, True))
        except BaseException:
            victims_cancel(&policy.victims, policy.table)
            self.forget(0, num_missing)
            raise
        self.place_blocks(num_admitted, num_missing, <int64_t*>cnp.PyArray_DATA(block_ids))
        return output

    cdef Py_ssize_t choose_missing(self) noexcept:
        """Choose the keys that are not resident, once each, and give the unknown ones nodes.

        Marks every key of the batch. Return their number, or -1 if there is no memory.
        """
        cdef CompiledPolicy policy = self._policy
        cdef Table* table = policy.table
        cdef Batch* batch = &self.batch
        cdef Py_ssize_t place, num_missing = 0, num_unknown = 0
        cdef uint64_t hashed
        cdef uint32_t slot
        cdef Node* node
        find_all(table, batch)
        for place in range(batch.size):
            num_unknown += batch.slots[place] == NIL
        if not policy.c_ensure(<uint64_t>num_unknown):
            return -1
        table_new_epoch(table)
        for place in range(batch.size):
            slot = batch.slots[place]
            if slot == NIL:
                hashed = batch.hashes[place]
                # A repeat of an unknown key has got a node by now.
                slot = index_find(table, item_key(batch, place), item_length(batch, place), hashed)
                if slot == NIL:
                    slot = add_key(
                        table, item_key(batch, place), item_length(batch, place), hashed
                    )
                    if slot == NIL:
                        self.forget(0, num_missing)
                        return -1
                batch.slots[place] = slot
            node = node_at(table, slot)
            if not node.flags & RESIDENT and node.block.mark != table.epoch:
                batch.chosen[num_missing] = slot
                batch.places[num_missing] = <uint32_t>place
                num_missing += 1
            node.block.mark = table.epoch
        return num_missing

    cdef list victim_keys(self):
        """Return the keys of the victims, in eviction order."""
        cdef CompiledPolicy policy = self._policy
        cdef Py_ssize_t place, size = <Py_ssize_t>policy.victims.size
        cdef list keys = PyList_New(size)
        for place in range(size):
            key = key_of(node_at(policy.table, policy.victims.items[place].slot))
            Py_INCREF(key)
            PyList_SET_ITEM(keys, place, key)
        return keys

    cdef void place_blocks(
        self, Py_ssize_t num_admitted, Py_ssize_t num_missing, int64_t* block_ids
    ) noexcept:
        """Free the victims' slots, let them go, and give the admitted keys theirs."""
        cdef CompiledPolicy policy = self._policy
        cdef Table* table = policy.table
        cdef uint64_t number
        cdef Py_ssize_t place
        cdef Node* node
        for number in range(policy.victims.size):
            node = node_at(table, policy.victims.items[number].slot)
            pool_give(&self._pool.pool, node.block.block_id)
        self.counters.evicted_blocks += policy.victims.size
        policy.commit()
        for place in range(num_admitted):
            node = node_at(table, self.batch.chosen[place])
            node.block.ref_cnt = -1
            node.block.block_id = pool_take(&self._pool.pool)
            node.flags |= RESIDENT
            block_ids[place] = node.block.block_id
            policy.c_insert(self.batch.chosen[place], node)
        policy.num_resident += <uint64_t>num_admitted
        self.num_pending += <uint64_t>num_admitted
        self.batch.num_chosen = num_admitted
        self.forget(num_admitted, num_missing)
        self.counters.stored_blocks += <uint64_t>num_admitted
        self.counters.not_admitted += <uint64_t>(num_missing - num_admitted)

    cdef void forget(self, Py_ssize_t start, Py_ssize_t stop) noexcept:
        """Drop the chosen keys that got a node only for this call: they are on no ring."""
        cdef Table* table = self._policy.table
        cdef Py_ssize_t place
        cdef Node* node
        # The last first, so that the next batch gets successive nodes again.
        for place in range(stop - 1, start - 1, -1):
            node = node_at(table, self.batch.chosen[place])
            if node.ring == 0:
                drop_key(table, self.batch.chosen[place], node)

    def complete_store(self, hashes, success=True):
        """Make pending blocks readable, or drop them."""
        if self._policy is None or self.delegate is not None:
            return self.driver().complete_store(hashes, success)
        cdef bint succeeded = success
        cdef list batch = self.open_batch(hashes)
        cdef Table* table = self._policy.table
        cdef Py_ssize_t place
        cdef uint32_t slot
        cdef Node* node
        cdef int collecting
        hint_chosen(&self.batch)
        find_all(table, &self.batch)
        if succeeded and self._events is not None:
            collecting = PyGC_Disable()
            try:
                self.emit_stored(batch)
            finally:
                if collecting:
                    PyGC_Enable()
        for place in range(self.batch.size):
            slot = self.batch.slots[place]
            if slot == NIL:
                continue
            node = node_at(table, slot)
            if not node.flags & RESIDENT or node.block.ref_cnt >= 0:
                continue
            self.num_pending -= 1
            if succeeded:
                node.block.ref_cnt = 0
                if node.flags & PARKED:
                    self._policy.became_idle(slot, node)
            else:
                self.counters.failed_blocks += 1
                pool_give(&self._pool.pool, node.block.block_id)
                self._policy.take_off(node)
                drop_key(table, slot, node)

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
            self._events.append(new_event(stored, self._backend_object, False))
        return 0

    cdef inline bint seen(self, Node* node) noexcept:
        """Mark a node; tell whether it was marked in this epoch."""
        cdef bint marked = node.block.mark == self._policy.table.epoch
        node.block.mark = self._policy.table.epoch
        return marked

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
                order += ring_slots(policy.table, &policy.rings[number])
            for slot in order:
                node = node_at(policy.table, slot)
                if node.flags & RESIDENT:
                    pool_give(&self._pool.pool, node.block.block_id)
        else:
            pool_reset(&self._pool.pool)
        policy.clear()
        self.num_pending = 0
        self.num_pinned = 0

    # -- what can be seen --------------------------------------------------------------------

    cdef Node* resident_node(self, object block_hash) noexcept:
        """Return the node of a resident block, or NULL."""
        cdef uint32_t slot
        cdef Node* node
        cdef Table* table = self._policy.table
        cdef bytes key
        if type(block_hash) is not bytes or not block_hash:
            return NULL
        key = block_hash
        slot = index_find(
            table,
            <const unsigned char*>key,
            <uint64_t>len(key),
            hash_key(table, <const unsigned char*>key, <uint64_t>len(key)),
        )
        if slot == NIL:
            return NULL
        node = node_at(table, slot)
        return node if node.flags & RESIDENT else NULL

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
            "pending": self.num_pending,
            "pinned": self.num_pinned,
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
    def block_size(self):
        """Tokens a block."""
        if self._backend_object is None:
            raise manager_not_initialised()
        return self._backend_object.block_size

    @property
    def medium(self):
        """Name of the medium, as events carry it."""
        if self._backend_object is None:
            raise manager_not_initialised()
        return self._backend_object.medium

    @property
    def policy(self):
        """The policy that decides which block leaves."""
        if self._policy is None or self.delegate is not None:
            return self.driver().policy
        return self._policy

    @property
    def events(self):
        """Copy of the events not yet taken; None when events are off."""
        if self._policy is None or self.delegate is not None:
            return self.driver().events
        return None if self._events is None else list(self._events)

    @property
    def block_table(self):
        """Statuses as a read-only structured array, rows in no order, ``block_id`` -1 if empty."""
        if self._policy is None or self.delegate is not None:
            return self.driver().block_table
        return self._policy.block_table

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        cdef uint64_t pending = 0, pinned = 0
        cdef uint32_t slot
        cdef Node* node
        if self._policy is None or self.delegate is not None:
            return self.driver()._check()
        self._policy._check()
        self._pool._check()
        block_ids = set()
        for slot in range(self._policy.table.num_used):
            node = node_at(self._policy.table, slot)
            if node.flags & RESIDENT:
                pending += node.block.ref_cnt < 0
                pinned += node.block.ref_cnt > 0
                block_ids.add(node.block.block_id)
        if <uint64_t>len(block_ids) != self._policy.num_resident:
            raise AssertionError("every resident block owns a slot of its own")
        if pending != self.num_pending or pinned != self.num_pinned:
            raise AssertionError("pending and pinned blocks are counted")
