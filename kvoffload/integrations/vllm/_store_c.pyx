"""Stores: what is offered, what of it is admitted, who leaves for it.

An exception leaves no trace; a refused store leaves what it leaves in vLLM: counted offers and
skips, the recorded accesses with their ranks, the adaptation to misses and the sample of the
allocation size. No Python code runs between the first look at the state and the last change: keys
are copied before, and the collector is off while results are allocated.

So everything is allocated before the policy learns from the offer, which cannot be undone: the
objects of the keys to be evicted, too, though which these are is not known yet. What is changed
until then is taken back on an error.
"""

cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_New, PyList_SET_ITEM
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

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
    key_bytes,
    kvo_prefetch,
    node_at,
    table_new_epoch,
)
from kvoffload.integrations.vllm._base_c cimport ManagerBase
from kvoffload.integrations.vllm._request cimport INSERTED, RequestAccess, RequestRank
from kvoffload.integrations.vllm._rules_c cimport OBSERVED, POSITIONED, READY, Access
from kvoffload.policies._twin_c cimport CompiledPolicy, key_of

cnp.import_array()

cdef extern from "Python.h":
    void Py_SET_SIZE(PyObject*, Py_ssize_t) nogil

# Objects for evicted keys are made before it is known how long each is; longer ones afterwards.
cdef enum:
    LONGEST_BLANK = 4096


cdef void shorten(list items, Py_ssize_t size) noexcept:
    """Drop the last items of a list; no allocation, which every method of lists may need."""
    cdef PyObject* last
    while len(items) > size:
        last = <PyObject*>PyList_GET_ITEM(items, len(items) - 1)
        Py_SET_SIZE(<PyObject*>items, len(items) - 1)
        Py_DECREF(<object>last)


cdef list blank_keys(int64_t number, uint64_t length):
    """Return as many new keys of that length, to be written and shortened before they are seen."""
    cdef list keys = PyList_New(number)
    cdef int64_t place
    for place in range(number):
        key = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>length)
        Py_INCREF(key)
        PyList_SET_ITEM(keys, place, key)
    return keys


cdef class Offer:
    """What one offer changes in the counts of offers."""


cdef class StoringManager(ManagerBase):
    """Add stores, and the threshold before them."""

    def prepare_store(self, keys, req_context):
        """Make room for the chunks that are absent, and make them pending.

        Returns None if enough chunks cannot be evicted. Repeated keys count once.
        """
        cdef list batch = self.open_batch(keys)
        cdef int collecting
        if self.counts is not None:
            batch = self.open_batch(list(dict.fromkeys(batch)))  # repeats are counted once
        collecting = PyGC_Disable()
        try:
            return self.store(batch, req_context)
        finally:
            if collecting:
                PyGC_Enable()

    cdef object store(self, list batch, object req_context):
        cdef CompiledPolicy policy = self.policy
        cdef RequestAccess access = self.access_of(req_context), new_access = None
        cdef RequestRank rank = None, new_rank = None
        cdef object positions = self.positions_of(req_context)
        cdef object access_before = None, rank_before = None, output, skipped
        cdef Py_ssize_t num_samples = len(self.allocation_sizes_in_current_batch)
        cdef Py_ssize_t num_events = 0 if self.events is None else len(self.events)
        cdef Py_ssize_t num_missing, num_skipped = 0
        cdef bint refused
        cdef int64_t num_new, num_admitted = -1, num_leaving
        cdef cnp.ndarray chunk_ids
        cdef list to_store, evicted, removed = None
        cdef Offer offer = None
        if access is None:
            access = new_access = RequestAccess(self, self.generation)
            access_before = self.state_of(req_context, RequestAccess)
        if self.rules.ranked:
            rank = self.rank_of(req_context)
            if rank is None:
                rank_before = self.state_of(req_context, RequestRank)
        num_missing = self.partition(&num_skipped)
        try:
            num_new = self.observe("prepare_store", req_context, access, positions)
            num_leaving = max(0, num_missing - pool_num_free(&self.pool))
            refused = self.rules.all_or_none and num_leaving > <int64_t>self.num_evictable()
            num_leaving = 0 if refused else num_leaving
            if not self.rules.ensure_search(<uint64_t>num_leaving, <uint64_t>self.batch.size):
                raise MemoryError()
            chunk_ids = self.new_ids(num_missing)
            if not self.rules.all_or_none:
                chunk_ids = chunk_ids[:]  # a view can be cut to what is admitted
            to_store = self.missing_keys(num_missing)
            evicted = blank_keys(num_leaving, min(self.longest_key, <uint64_t>LONGEST_BLANK))
            output = self.new_output(to_store, self.new_spec(chunk_ids), evicted)
            if self.events is not None and num_leaving:
                removed = list(evicted)
                self.events.append(
                    self.event_class(keys=removed, medium=self.medium, removed=True)
                )
            skipped = self.stores_skipped_in_current_batch + num_skipped
            if num_missing:
                self.allocation_sizes_in_current_batch.append(num_missing)
            if self.rules.ranked and rank is None and (
                num_new or not refused and self.any_positioned(num_missing)
            ):
                rank = new_rank = RequestRank(policy)
            if self.counts is not None:
                offer = self.open_offer(batch)
            self.attach(req_context, new_access, new_rank)
            # From here on only the searches of SIEVE and S3-FIFO allocate; they learn nothing here.
            self.start(access)
            self.rules.missed(&self.batch, self.accesses)
            self.rules.accessed(&self.batch, self.accesses, rank)
            if num_missing and not refused:
                if not self.rules.all_or_none:
                    self.protect()  # learning from misses may have begun a new epoch
                policy.victims.no_memory = False
                num_admitted = policy.c_make_room(
                    &self.batch, num_missing, pool_num_free(&self.pool)
                )
                if num_admitted < 0 and policy.victims.no_memory:
                    raise MemoryError()
                self.write_keys(evicted, removed)
        except BaseException:
            if num_admitted >= 0:
                self.rules.cancel()
            self.chain = None
            self.forget(0, num_missing)
            shorten(self.allocation_sizes_in_current_batch, num_samples)
            if removed is not None:
                shorten(self.events, num_events)
            if offer is not None:
                self.cancel_offer(offer)
            if new_access is not None:
                self.put_back(req_context, RequestAccess, access_before)
            if new_rank is not None:
                self.put_back(req_context, RequestRank, rank_before)
            raise
        self.stores_skipped_in_current_batch = skipped
        if offer is not None:
            self.count_offer(offer)
        self.record(access, False)
        if removed is not None and policy.victims.size == 0:
            shorten(self.events, num_events)
        if num_missing == 0:
            return output
        if num_admitted < 0:
            self.forget(0, num_missing)
            return None
        if num_admitted < num_missing:
            shorten(to_store, num_admitted)
            cnp.PyArray_DIMS(chunk_ids)[0] = num_admitted
        self.place(access, rank, num_admitted, num_missing, <int32_t*>cnp.PyArray_DATA(chunk_ids))
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
                self.longest_key = max(self.longest_key, item_length(keys, place))
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

    cdef bint any_positioned(self, Py_ssize_t num_missing) noexcept:
        """Tell whether the request knows the token position of a key that was chosen."""
        cdef Py_ssize_t place
        for place in range(num_missing):
            if self.accesses[self.batch.places[place]].flags & POSITIONED:
                return True
        return False

    cdef int write_keys(self, list evicted, list removed) except -1:
        """Write the keys of the victims over the blank ones, of which `removed` has the same."""
        cdef Py_ssize_t place, size = <Py_ssize_t>self.policy.victims.size
        cdef uint64_t length
        cdef const uint8_t* key
        cdef bytes blank
        cdef Node* node
        shorten(evicted, size)
        if removed is not None:
            shorten(removed, size)
        for place in range(size):
            node = node_at(self.policy.table, self.policy.victims.items[place].slot)
            key = key_bytes(node, &length)
            blank = evicted[place]
            if length > <uint64_t>PyBytes_GET_SIZE(blank):
                evicted[place] = key_of(node)
                if removed is not None:
                    removed[place] = evicted[place]
                continue
            memcpy(PyBytes_AS_STRING(blank), key, length)
            if length < <uint64_t>PyBytes_GET_SIZE(blank):
                Py_SET_SIZE(<PyObject*>blank, <Py_ssize_t>length)
                PyBytes_AS_STRING(blank)[length] = 0
        return 0

    cdef void free_victims(self) noexcept:
        """Give the victims' chunk ids back."""
        cdef Table* table = self.policy.table
        cdef uint64_t victim
        cdef Node* node
        for victim in range(self.policy.victims.size):
            node = node_at(table, self.policy.victims.items[victim].slot)
            kvo_prefetch(table.buckets + home_of(table, hash_node(table, node)))
            pool_give(&self.pool, node.block.block_id)
        self.num_idle -= self.policy.victims.size

    cdef void place(
        self,
        RequestAccess access,
        RequestRank rank,
        int64_t num_admitted,
        int64_t num_missing,
        int32_t* chunk_ids,
    ) noexcept:
        """Let the victims go, then give the chosen keys chunks."""
        cdef CompiledPolicy policy = self.policy
        cdef int64_t chosen
        cdef Access* entry
        cdef Node* node
        self.free_victims()
        policy.commit()
        for chosen in range(num_admitted):
            entry = self.accesses + self.batch.places[chosen]
            node = node_at(policy.table, self.batch.chosen[chosen])
            node.block.ref_cnt = -1
            node.block.block_id = pool_take(&self.pool)
            node.flags |= RESIDENT
            policy.num_resident += 1
            self.rules.insert(self.batch.chosen[chosen], node, entry, rank)
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
        cdef list completed
        cdef int collecting = PyGC_Disable()
        try:
            if not self.rules.ensure(0):
                raise MemoryError()
            find_all(self.policy.table, &self.batch)
            if self.events is not None and (stored or self.reports_failed_stores):
                completed = self.pending_keys(batch)
                if completed:
                    self.events.append(self.completion_event(completed, stored))
            for place in range(self.batch.size):
                node = self.resident(place)
                if node != NULL and node.block.ref_cnt < 0:
                    self.complete(self.batch.slots[place], node, stored)
        finally:
            if collecting:
                PyGC_Enable()

    cdef object completion_event(self, list keys, bint stored):
        """Return the event of a store that has ended."""
        if stored:
            return self.event_class(keys=keys, medium=self.medium, removed=False)
        return self.event_class(keys=keys, medium=self.medium, removed=True, metadata_only=True)

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

    cdef Offer open_offer(self, list batch):
        """Count new keys, and find out what else changes; only keys of earlier offers make room.

        `count_offer` or `cancel_offer` follows; neither allocates.
        """
        cdef object counts = self.counts, room
        cdef Offer offer = Offer()
        cdef Py_ssize_t num_tracked, num_dropped
        offer.known, offer.numbers, offer.tracked, offer.dropped = [], [], [], []
        for key in batch:
            count = counts.get(key)
            if count is None:
                offer.tracked.append(key)
            else:
                offer.known.append(key)
                offer.numbers.append(count + 1)
        room = max(0, self.max_tracker_size - len(counts))
        num_tracked = min(len(offer.tracked), room + len(counts) - len(offer.known))
        num_dropped = max(0, num_tracked - room)
        del offer.tracked[num_tracked:]
        if num_dropped:
            offered = set(offer.known)
            for key in counts:
                if key not in offered:
                    offer.dropped.append(key)
                    if len(offer.dropped) == num_dropped:
                        break
        try:
            for key in offer.tracked:
                counts[key] = 1
        except BaseException:
            self.cancel_offer(offer)
            raise
        return offer

    cdef int cancel_offer(self, Offer offer) except -1:
        """Forget the new keys of an offer."""
        for key in offer.tracked:
            if key in self.counts:
                del self.counts[key]
        return 0

    cdef int count_offer(self, Offer offer) except -1:
        """Count the known keys of an offer, and let others go for the new ones."""
        cdef object counts = self.counts
        cdef Py_ssize_t place
        for place in range(len(offer.known)):
            counts[offer.known[place]] = offer.numbers[place]
            counts.move_to_end(offer.known[place])
        for key in offer.tracked:
            counts.move_to_end(key)
        for key in offer.dropped:
            del counts[key]
        return 0
