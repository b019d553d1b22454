"""Stores: what is offered, what of it is admitted, who leaves for it.

An exception leaves no trace; a refused store leaves what it leaves in vLLM: counted offers and
skips, the recorded accesses with their ranks, the adaptation to misses and the sample of the
allocation size. No Python code runs between the first look at the state and the last change: keys
are copied before, and the collector is off while results are allocated.
"""

cimport numpy as cnp
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch, find_all, item_key, item_length
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.pool cimport pool_give, pool_num_free, pool_take
from kvoffload._core.table cimport (
    NIL,
    RESIDENT,
    Node,
    Table,
    add_key,
    drop_key,
    hash_key,
    hash_node,
    home_of,
    index_find,
    kvo_prefetch,
    node_at,
    table_new_epoch,
)
from kvoffload.integrations.vllm._base_c cimport ManagerBase
from kvoffload.integrations.vllm._request cimport INSERTED, RequestAccess
from kvoffload.integrations.vllm._rules_c cimport OBSERVED, READY, Access
from kvoffload.policies._twin_c cimport CompiledPolicy, key_of

cnp.import_array()


cdef class StoringManager(ManagerBase):
    """Add stores, and the threshold before them."""

    def prepare_store(self, keys, req_context):
        """Make room for the chunks that are absent, and make them pending.

        Returns None if enough chunks cannot be evicted. Repeated keys count once.
        """
        cdef RequestAccess access
        cdef object positions
        cdef list batch = self.open_batch(keys)
        cdef int collecting
        if self.counts is not None:
            batch = self.open_batch(list(dict.fromkeys(batch)))  # repeats are counted once
        access = self.access_of(req_context, True)
        positions = self.positions_of(req_context)
        collecting = PyGC_Disable()
        try:
            return self.store(batch, req_context, access, positions)
        finally:
            if collecting:
                PyGC_Enable()

    cdef object store(
        self, list batch, object req_context, RequestAccess access, object positions
    ):
        cdef CompiledPolicy policy = self.policy
        cdef Py_ssize_t num_skipped = 0
        cdef Py_ssize_t num_missing = self.partition(&num_skipped)
        cdef int64_t num_admitted, shortfall = num_missing - pool_num_free(&self.pool)
        cdef cnp.ndarray chunk_ids
        cdef list to_store, evicted
        cdef object output, event = None
        cdef Py_ssize_t place
        try:
            self.observe("prepare_store", req_context, access, positions)
            chunk_ids = self.new_ids(num_missing)
            to_store = self.missing_keys(num_missing)
            evicted = []
            output = self.new_output(to_store, self.new_spec(chunk_ids), evicted)
            if self.events is not None and shortfall > 0:
                event = self.event_class(keys=[], medium=self.medium, removed=True)
            if self.counts is not None:
                self.count_offers(batch)
            if num_missing:
                self.allocation_sizes_in_current_batch.append(num_missing)
        except BaseException:
            self.forget(0, num_missing)
            raise
        if num_skipped:
            self.stores_skipped_in_current_batch += num_skipped
        self.record(access, False)
        self.rules.missed(&self.batch, self.accesses)
        self.rules.accessed(&self.batch, self.accesses, access.rank)
        if num_missing == 0:
            return output
        if self.rules.all_or_none and shortfall > <int64_t>self.num_evictable():
            self.forget(0, num_missing)
            return None
        if not self.rules.all_or_none:
            self.protect()  # learning from misses may have begun a new epoch
        policy.victims.no_memory = False
        num_admitted = policy.c_make_room(&self.batch, num_missing, pool_num_free(&self.pool))
        if num_admitted < 0:
            self.forget(0, num_missing)
            if policy.victims.no_memory:
                raise MemoryError()
            return None
        try:
            if num_admitted < num_missing:
                del to_store[num_admitted:]
                chunk_ids = self.new_ids(num_admitted)
                output.store_spec = self.new_spec(chunk_ids)
            for place in range(<Py_ssize_t>policy.victims.size):
                evicted.append(key_of(node_at(policy.table, policy.victims.items[place].slot)))
            if event is not None and evicted:
                event.keys.extend(evicted)
                self.events.append(event)
        except BaseException:
            self.rules.cancel()
            self.forget(0, num_missing)
            raise
        self.place(access, num_admitted, num_missing, <int32_t*>cnp.PyArray_DATA(chunk_ids))
        return output

    cdef Py_ssize_t partition(self, Py_ssize_t* num_skipped) except -1:
        """Choose the keys to store; unknown ones get nodes. Return their number.

        Marked are the resident keys, which stay, and the chosen ones: a mark on a ghost says that
        it is about to be stored. Below the threshold a key counts as absent, ghost or not.
        """
        cdef CompiledPolicy policy = self.policy
        cdef Table* table = policy.table
        cdef Batch* keys = &self.batch
        cdef Py_ssize_t place, number, num_absent = 0, num_unknown = 0, num_missing = 0
        cdef uint32_t slot
        cdef uint64_t hashed
        cdef Node* node
        for place in range(keys.size):
            hashed = hash_key(table, item_key(keys, place), item_length(keys, place))
            kvo_prefetch(table.buckets + home_of(table, hashed))
            self.accesses[place].hashed = hashed
            self.accesses[place].flags = 0
        # A loop of its own, whose cache misses overlap: in one with what follows a store cycle of
        # ARC takes 2.3 times as long.
        for place in range(keys.size):
            keys.slots[place] = index_find(
                table,
                item_key(keys, place),
                item_length(keys, place),
                self.accesses[place].hashed,
            )
        table_new_epoch(table)
        for place in range(keys.size):
            slot = keys.slots[place]
            if slot != NIL:
                node = node_at(table, slot)
                if node.block.mark == table.epoch:
                    continue  # a repeat
                if node.flags & RESIDENT:
                    node.block.mark = table.epoch
                    if node.block.ref_cnt >= 0:
                        self.accesses[place].flags = OBSERVED | READY
                    continue
            if self.counts is not None and not self.offered_enough(<object>keys.items[place]):
                keys.slots[place] = NIL
                num_skipped[0] += 1
                continue
            if slot == NIL:
                num_unknown += 1
            else:
                node.block.mark = table.epoch
            keys.places[num_absent] = <uint32_t>place
            num_absent += 1
        if not policy.c_ensure(<uint64_t>num_unknown):
            raise MemoryError()
        for number in range(num_absent):
            place = keys.places[number]
            slot = keys.slots[place]
            if slot == NIL:
                hashed = self.accesses[place].hashed
                # A repeat of an unknown key has got a node by now.
                slot = index_find(table, item_key(keys, place), item_length(keys, place), hashed)
                if slot != NIL:
                    keys.slots[place] = slot
                    continue
                slot = add_key(table, item_key(keys, place), item_length(keys, place), hashed)
                if slot == NIL:
                    self.forget(0, num_missing)
                    raise MemoryError()
                keys.slots[place] = slot
                node_at(table, slot).block.mark = table.epoch
            self.accesses[place].flags = OBSERVED
            keys.chosen[num_missing] = slot
            keys.places[num_missing] = <uint32_t>place
            num_missing += 1
        return num_missing

    cdef list missing_keys(self, Py_ssize_t num_missing):
        """Return the keys that were chosen."""
        cdef list missing = PyList_New(num_missing)
        cdef Py_ssize_t place
        cdef object key
        for place in range(num_missing):
            key = <object>self.batch.items[self.batch.places[place]]
            Py_INCREF(key)
            PyList_SET_ITEM(missing, place, key)
        return missing

    cdef void protect(self) noexcept:
        """Mark what `partition` has marked, in another epoch."""
        cdef Table* table = self.policy.table
        cdef Py_ssize_t place
        table_new_epoch(table)
        for place in range(self.batch.size):
            if self.batch.slots[place] != NIL:
                node_at(table, self.batch.slots[place]).block.mark = table.epoch

    cdef uint64_t num_evictable(self) noexcept:
        """Count the idle chunks that the running call does not protect."""
        cdef Py_ssize_t place
        cdef uint64_t num_protected = 0
        cdef Table* table = self.policy.table
        cdef Node* node
        for place in range(self.batch.size):
            # A repeat is not OBSERVED.
            if self.accesses[place].flags & READY:
                node = node_at(table, self.batch.slots[place])
                num_protected += node.block.ref_cnt == 0
        return self.num_idle - num_protected

    cdef void place(
        self, RequestAccess access, int64_t num_admitted, int64_t num_missing, int32_t* chunk_ids
    ) noexcept:
        """Let the victims go, then give the chosen keys chunks."""
        cdef CompiledPolicy policy = self.policy
        cdef Table* table = policy.table
        cdef int64_t chosen
        cdef uint64_t victim
        cdef Access* entry
        cdef Node* node
        for victim in range(policy.victims.size):
            node = node_at(table, policy.victims.items[victim].slot)
            kvo_prefetch(table.buckets + home_of(table, hash_node(table, node)))
            pool_give(&self.pool, node.block.block_id)
        self.num_idle -= policy.victims.size
        policy.commit()
        for chosen in range(num_admitted):
            entry = self.accesses + self.batch.places[chosen]
            node = node_at(table, self.batch.chosen[chosen])
            node.block.ref_cnt = -1
            node.block.block_id = pool_take(&self.pool)
            node.flags |= RESIDENT
            policy.num_resident += 1
            self.rules.insert(self.batch.chosen[chosen], node, entry, access.rank)
            access.seen[entry.number].uses |= INSERTED
            chunk_ids[chosen] = <int32_t>node.block.block_id
        self.num_pending += <uint64_t>num_admitted
        self.forget(num_admitted, num_missing)

    cdef void forget(self, int64_t start, int64_t stop) noexcept:
        """Take back the nodes of chosen keys that were unknown and are not stored."""
        cdef Node* node
        cdef int64_t chosen
        for chosen in range(start, stop):
            node = node_at(self.policy.table, self.batch.chosen[chosen])
            if node.ring == 0 and not node.flags & RESIDENT:
                drop_key(self.policy.table, self.batch.chosen[chosen], node)

    def complete_store(self, keys, req_context, success=True):
        """Make pending chunks readable, or drop them where the store failed."""
        cdef list batch = self.open_batch(keys)
        cdef bint stored = success
        cdef Py_ssize_t place
        cdef Node* node
        cdef list completed = None
        cdef object event = None
        cdef int collecting = PyGC_Disable()
        try:
            if not self.rules.ensure(0):
                raise MemoryError()
            find_all(self.policy.table, &self.batch)
            if self.events is not None:
                completed = self.pending_keys(batch)
                if completed:
                    event = self.event_class(
                        keys=completed,
                        medium=self.medium,
                        removed=not stored,
                        metadata_only=not stored,
                    )
                    self.events.append(event)
            for place in range(self.batch.size):
                node = self.resident(place)
                if node != NULL and node.block.ref_cnt < 0:
                    self.complete(self.batch.slots[place], node, stored)
        finally:
            if collecting:
                PyGC_Enable()

    cdef list pending_keys(self, list batch):
        """Return the keys of the batch that are pending, once each."""
        cdef list pending = []
        cdef Py_ssize_t place
        cdef Node* node
        cdef Table* table = self.policy.table
        table_new_epoch(table)
        for place in range(self.batch.size):
            node = self.resident(place)
            if node != NULL and node.block.ref_cnt < 0 and node.block.mark != table.epoch:
                node.block.mark = table.epoch
                pending.append(batch[place])
        return pending

    cdef void complete(self, uint32_t slot, Node* node, bint stored) noexcept:
        self.num_pending -= 1
        if stored:
            node.block.ref_cnt = 0
            self.num_idle += 1
            self.rules.became_idle(slot, node)
        else:
            pool_give(&self.pool, node.block.block_id)
            self.policy.c_removed(slot, node)
            self.policy.take_off(node)
            drop_key(self.policy.table, slot, node)

    # -- the threshold -----------------------------------------------------------------------

    cdef bint offered_enough(self, object key) except -1:
        """Tell whether this offer of a key is at least the threshold's."""
        count = self.counts.get(key)
        return count is not None and count + 1 >= self.store_threshold

    cdef int count_offers(self, list batch) except -1:
        """Count the keys of an offer; only keys of earlier offers make room for new ones."""
        cdef object counts = self.counts
        cdef list fresh = []
        cdef Py_ssize_t droppable = len(counts)
        for key in batch:
            if key in counts:
                counts[key] += 1
                counts.move_to_end(key)
                droppable -= 1
            else:
                fresh.append(key)
        for key in fresh:
            if len(counts) >= self.max_tracker_size:
                if droppable == 0:
                    continue
                counts.popitem(last=False)
                droppable -= 1
            counts[key] = 1
        return 0
