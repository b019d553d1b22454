"""The state of a compiled manager, and the steps of its calls; see ``_state_c.pxd``."""

from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from libc.string cimport memset

from kvoffload._core.batch cimport (
    batch_close,
    batch_ensure,
    batch_set,
    find_all,
    item_key,
    item_length,
)
from kvoffload._core.items cimport check_items, list_items
from kvoffload._core.pool cimport pool_give, pool_take
from kvoffload._core.table cimport (
    NIL,
    PARKED,
    RESIDENT,
    Table,
    add_key,
    drop_key,
    hash_key,
    index_find,
    node_at,
    own_id,
    table_new_epoch,
)
from kvoffload.policies._twin_c cimport key_of

from kvoffload._checks import as_batch, batch_error
from kvoffload.errors import manager_not_initialised

cdef enum:
    MOST_PINS = 0x7FFFFFFF


cdef class ManagerState:
    """Hold what a compiled manager knows, and change it without Python code in between."""

    def __cinit__(self):
        memset(&self.batch, 0, sizeof(Batch))
        memset(&self.counters, 0, sizeof(Counters))

    def __dealloc__(self):
        if self._policy is not None:
            self._policy.leave_manager(<void*>self)
        batch_close(&self.batch)

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
                or <uint32_t>node.block.ref_cnt >= <uint32_t>MOST_PINS  # or pending: negative
            ):
                for undo in range(place):
                    self.unpin(self.batch.slots[undo])
                return place
            self.num_pinned += node.block.ref_cnt == 0
            node.block.ref_cnt += 1
            block_ids[place] = own_id(table, slot, node)
        return -1

    cdef void unpin(self, uint32_t slot) noexcept:
        """Take one pin from a pinned block."""
        cdef Node* node = node_at(self._policy.table, slot)
        node.block.ref_cnt -= 1
        if node.block.ref_cnt == 0:
            self.num_pinned -= 1
            if node.flags & PARKED:
                self._policy.became_idle(slot, node)

    cdef void repin(self, uint32_t slot) noexcept:
        """Give a block the pin back that `unpin` took."""
        cdef Node* node = node_at(self._policy.table, slot)
        self.num_pinned += node.block.ref_cnt == 0
        node.block.ref_cnt += 1

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
        cdef uint32_t slot
        cdef Node* node
        for number in range(policy.victims.size):
            slot = policy.victims.items[number].slot
            pool_give(&self._pool.pool, own_id(table, slot, node_at(table, slot)))
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

    cdef void end_stores(self, bint succeeded) noexcept:
        """Make the batch's pending blocks idle, or drop them."""
        cdef Table* table = self._policy.table
        cdef Py_ssize_t place
        cdef uint32_t slot
        cdef Node* node
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
                pool_give(&self._pool.pool, own_id(table, slot, node))
                self._policy.c_removed(slot, node)
                self._policy.take_off(node)
                drop_key(table, slot, node)

    cdef bint seen(self, Node* node) noexcept:
        """Mark a node; tell whether it was marked in this epoch."""
        cdef bint marked = node.block.mark == self._policy.table.epoch
        node.block.mark = self._policy.table.epoch
        return marked

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

    cdef int check_state(self) except -1:
        """Verify every invariant; raise AssertionError with the broken one."""
        cdef uint64_t pending = 0, pinned = 0
        cdef uint32_t slot
        cdef Node* node
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
        return 0
