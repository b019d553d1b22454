"""A miniature, compiled: a policy of small capacity that serves the sampled part of requests.

Structure
    The policy holds nodes without slots. What a miniature may need is reserved when it is made, but
    for keys too long to lie in a node: such a block is not stored if there is no memory. See
    ``_miniature_py`` for the rules and their reasons.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kvoffload._core.batch cimport (
    Batch,
    batch_close,
    batch_ensure,
    batch_set,
    find_all,
    find_changed,
    item_key,
    item_length,
)
from kvoffload._core.memory cimport discard, resize
from kvoffload._core.table cimport (
    NIL,
    PARKED,
    RESIDENT,
    Node,
    Table,
    add_key,
    drop_key,
    index_find,
    node_at,
    table_new_epoch,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint


cdef class Miniature:
    """A small cache that serves the sampled part of requests."""

    def __cinit__(self, CompiledPolicy policy not None, Py_ssize_t most):
        self.policy = policy
        self.most = most
        policy.join_manager(<void*>self)
        self.items = <PyObject**>resize(NULL, <size_t>max(most, 1) * sizeof(PyObject*))
        self.storing = <Storing*>resize(
            NULL, <size_t>max(policy.capacity, 1) * sizeof(Storing)
        )
        if (
            self.items == NULL
            or self.storing == NULL
            or not batch_ensure(&self.batch, most)
            or not policy.c_ensure(<uint64_t>(policy.capacity + most))
        ):
            raise MemoryError("no room for a miniature")

    def __dealloc__(self):
        discard(self.items)
        discard(self.storing)
        batch_close(&self.batch)

    cdef void take(self, const Batch* asked, const uint32_t* indexes, Py_ssize_t size) noexcept:
        cdef Py_ssize_t index
        for index in range(size):
            self.items[index] = asked.items[indexes[index]]
        batch_set(&self.batch, self.items, size)

    cdef Py_ssize_t serve(
        self, const Hint* hint, bint ends, uint32_t request, uint32_t lag
    ) noexcept:
        cdef CompiledPolicy policy = self.policy
        cdef Storing* stored
        cdef Py_ssize_t num_hits = 0
        cdef Node* node
        while self.num_storing and request - self.storing[self.oldest].request >= lag:
            stored = self.storing + self.oldest
            node = node_at(policy.table, stored.node_id)
            node.block.ref_cnt = 0
            if node.flags & PARKED:
                policy.became_idle(stored.node_id, node)
            self.oldest = (self.oldest + 1) % <uint32_t>policy.capacity
            self.num_storing -= 1
        find_all(policy.table, &self.batch)
        policy.begin_request(&self.batch, hint)
        while num_hits < self.batch.size and self.batch.node_ids[num_hits] != NIL:
            if node_at(policy.table, self.batch.node_ids[num_hits]).block.ref_cnt < 0:
                break
            num_hits += 1
        self.store(request, ends)
        self.finish(NULL)
        return num_hits

    cdef void store(self, uint32_t request, bint ends) noexcept:
        """Store the missing blocks of the request, as far as the policy admits them."""
        cdef CompiledPolicy policy = self.policy
        cdef Batch* batch = &self.batch
        cdef int64_t num_free = policy.capacity - <int64_t>policy.num_resident
        cdef Py_ssize_t index, num_admitted, num_missing = choose_missing(policy, batch, NULL)
        cdef uint32_t node_id
        cdef Storing* stored
        cdef Node* node
        if num_missing <= 0:
            return
        policy.victims.no_memory = False
        if ends:
            num_admitted = policy.c_make_room_of_released(batch, num_missing, num_free)
        else:
            num_admitted = policy.c_make_room(batch, num_missing, num_free)
        if num_admitted >= 0:
            policy.commit()
        for index in range(num_admitted):
            node_id = batch.chosen[index]
            node = node_at(policy.table, node_id)
            node.block.ref_cnt = -1
            node.block.block_id = 0
            node.flags |= RESIDENT
            policy.num_resident += 1
            policy.c_insert(node_id, node)
            stored = self.storing + (self.oldest + self.num_storing) % <uint32_t>policy.capacity
            stored.node_id = node_id
            stored.request = request
            self.num_storing += 1
        # The last first, so that the next batch gets successive nodes again.
        for index in range(num_missing - 1, max(num_admitted, 0) - 1, -1):
            node = node_at(policy.table, batch.chosen[index])
            if node.ring == 0:
                drop_key(policy.table, batch.chosen[index], node)

    cdef void finish(self, const Hint* hint) noexcept:
        """End the request that was taken."""
        find_changed(self.policy.table, &self.batch)
        self.policy.finish_request(&self.batch, hint)

    cdef void release(self) noexcept:
        """Release the blocks that were taken; the policy has made room."""
        find_all(self.policy.table, &self.batch)
        self.policy.c_release(&self.batch)

    cdef bint ensure_release(self) noexcept:
        return self.policy.ensure_release(self.most)

    cdef void clear(self) noexcept:
        """Forget everything."""
        self.oldest = self.num_storing = 0
        self.batch.size = self.batch.num_hints = 0
        self.policy.clear_now()


cdef Py_ssize_t choose_missing(
    CompiledPolicy policy, Batch* batch, const uint8_t* left_out
) noexcept:
    cdef Table* table = policy.table
    cdef Py_ssize_t index, num_missing = 0, num_unknown = 0
    cdef const uint8_t* key
    cdef uint64_t length
    cdef uint32_t node_id
    cdef Node* node
    batch.num_chosen = 0
    find_changed(table, batch)
    for index in range(batch.size):
        num_unknown += batch.node_ids[index] == NIL
    if not policy.c_ensure(<uint64_t>num_unknown):
        return -1
    table_new_epoch(table)
    for index in range(batch.size):
        if left_out != NULL and left_out[index]:
            continue
        node_id = batch.node_ids[index]
        if node_id == NIL:  # a repeat already has a node
            key = item_key(batch, index)
            length = item_length(batch, index)
            node_id = index_find(table, key, length, batch.hashes[index])
            if node_id == NIL:
                node_id = add_key(table, key, length, batch.hashes[index])
            if node_id == NIL:
                while num_missing:
                    num_missing -= 1
                    node = node_at(table, batch.chosen[num_missing])
                    if node.ring == 0:
                        drop_key(table, batch.chosen[num_missing], node)
                return -1
            batch.node_ids[index] = node_id
        node = node_at(table, node_id)
        if not node.flags & RESIDENT and node.block.mark != table.epoch:
            batch.chosen[num_missing] = node_id
            batch.indexes[num_missing] = <uint32_t>index
            num_missing += 1
        node.block.mark = table.epoch
    return num_missing
