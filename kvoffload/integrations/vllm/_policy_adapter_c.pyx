"""A compiled policy behind vLLM's own policy interface.

vLLM's manager owns the ``ChunkStatus`` objects and changes their counts itself; it says through
``mark_evictable`` and ``mark_non_evictable`` when a chunk becomes idle or is pinned, and that is
what the compiled policy goes by. One owned reference a resident chunk, by slot.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kvoffload._core.batch cimport find_all, item_key, item_length
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.memory cimport discard, resize
from kvoffload._core.table cimport (
    NIL,
    RESIDENT,
    Node,
    Table,
    add_key,
    drop_key,
    hash_key,
    node_at,
)
from kvoffload.integrations.vllm._manager_c cimport PolicyDriver
from kvoffload.integrations.vllm._request_c cimport RequestRank
from kvoffload.integrations.vllm._rules_c cimport (
    FIRST_MISS,
    NEW,
    ONLY_INSERTED,
    POSITIONED,
    USED_AGAIN,
    RequestRules,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, key_of

from kvoffload.errors import block_already_resident, block_not_found, policy_not_initialised


cdef class AdapterCore(PolicyDriver):
    """Answer the calls of vLLM's ``CachePolicy``; a subclass gives the rules."""

    cdef PyObject** chunks          # by slot, owned; NULL where not resident
    cdef uint64_t chunks_room

    def __cinit__(self, *arguments, **keywords):
        self.chunks = NULL
        self.chunks_room = 0

    def __dealloc__(self):
        self.let_go()

    def _open(self, RequestRules rules not None, context_class):
        """Start with the empty policy of `rules`."""
        self.policy = None
        self.let_go()
        self.context_class = context_class
        self.follow(rules)

    cdef object not_initialised(self):
        return policy_not_initialised()

    cdef void let_go(self):
        """Drop every reference; the policy holds no chunk any more."""
        cdef PyObject** chunks = self.chunks
        cdef uint64_t slot, room = self.chunks_room
        self.chunks = NULL
        self.chunks_room = 0
        for slot in range(room):
            if chunks[slot] != NULL:
                Py_DECREF(<object>chunks[slot])
        discard(chunks)

    cdef list find_batch(self, object keys):
        """Find the keys; nodes without a chunk count as absent only to `resident`."""
        cdef list batch = self.open_batch(keys)
        cdef Py_ssize_t place
        find_all(self.policy.table, &self.batch)
        for place in range(self.batch.size):
            self.accesses[place].flags = 0
        return batch

    cdef list find_one(self, object key):
        return self.find_batch([key])

    # -- vLLM's interface --------------------------------------------------------------------

    def get(self, key):
        """Return vLLM's status of a resident chunk, or None."""
        cdef list batch = self.find_one(key)
        if self.resident(0) == NULL:
            return None
        return <object>self.chunks[self.batch.slots[0]]

    def insert(self, key, chunk, req_context=None):
        """Add a chunk that vLLM has allocated; from 0.33 on it says for which request."""
        cdef int32_t ref_cnt = chunk.ref_cnt
        cdef int64_t chunk_id = chunk.chunk_id
        cdef list batch = self.find_one(key)
        cdef int collecting
        if self.resident(0) != NULL:
            raise block_already_resident("insert", batch[0])
        collecting = PyGC_Disable()
        try:
            self.add(chunk, ref_cnt, chunk_id, req_context)
        finally:
            if collecting:
                PyGC_Enable()

    cdef int add(
        self, object chunk, int32_t ref_cnt, int64_t chunk_id, object req_context
    ) except -1:
        """Make the absent key that was found resident."""
        cdef Table* table = self.policy.table
        cdef RequestRank rank = None
        cdef Py_ssize_t cursor = 0
        cdef uint32_t slot = self.batch.slots[0]
        cdef Node* node
        if self.rules.ranked and req_context is not None:
            self.read_position(req_context, self.positions_of(req_context), 0, &cursor)
        if not self.policy.c_ensure(1) or not self.ensure_chunks():
            raise MemoryError()
        if slot == NIL:
            slot = add_key(
                table,
                item_key(&self.batch, 0),
                item_length(&self.batch, 0),
                hash_key(table, item_key(&self.batch, 0), item_length(&self.batch, 0)),
            )
            if slot == NIL:
                raise MemoryError()
        if self.accesses[0].flags & POSITIONED:
            try:
                rank = self.rank_for(req_context)
            except BaseException:
                if self.batch.slots[0] == NIL:
                    drop_key(table, slot, node_at(table, slot))
                raise
        node = node_at(table, slot)
        node.block.ref_cnt = ref_cnt
        node.block.block_id = chunk_id
        node.flags |= RESIDENT
        self.policy.num_resident += 1
        self.rules.insert(slot, node, self.accesses, rank)
        if ref_cnt == 0:
            self.rules.became_idle(slot, node)
        Py_INCREF(chunk)
        self.chunks[slot] = <PyObject*>chunk
        return 0

    cdef RequestRank rank_for(self, object req_context):
        """Return the rank of a request in this policy; a new one hangs on its context."""
        cdef RequestRank rank = self.rank_of(req_context)
        if rank is None:
            rank = RequestRank(self.policy)
            self.attach(req_context, None, rank)
        return rank

    cdef bint ensure_chunks(self) noexcept:
        """Make room for a reference at every slot."""
        cdef uint64_t room = self.policy.table.num_ready
        cdef PyObject** chunks
        if room <= self.chunks_room:
            return True
        chunks = <PyObject**>resize(self.chunks, room * sizeof(PyObject*))
        if chunks == NULL:
            return False
        memset(chunks + self.chunks_room, 0, (room - self.chunks_room) * sizeof(PyObject*))
        self.chunks = chunks
        self.chunks_room = room
        return True

    cdef object taken(self, uint32_t slot):
        """Give the reference of a slot to the caller."""
        cdef object chunk = <object>self.chunks[slot]
        self.chunks[slot] = NULL
        Py_DECREF(chunk)
        return chunk

    def remove(self, key):
        """Drop the chunk of a store that failed."""
        cdef list batch = self.find_one(key)
        cdef Node* node = self.resident(0)
        cdef object chunk
        if node == NULL:
            raise block_not_found("remove", batch[0])
        chunk = self.taken(self.batch.slots[0])
        self.policy.c_removed(self.batch.slots[0], node)
        self.policy.take_off(node)
        drop_key(self.policy.table, self.batch.slots[0], node)

    def touch(self, keys, req_context=None):
        """Mark chunks as used now, the last key first."""
        cdef list batch = self.find_batch(keys)
        if not self.rules.ensure(<uint64_t>self.batch.size):
            raise MemoryError()
        self.policy.c_touch(&self.batch)

    def on_store_miss(self, keys, req_context):
        """Learn from keys that are absent and will be stored if there is room."""
        cdef list batch = self.find_batch(keys)
        cdef Py_ssize_t place
        if not self.rules.ensure(<uint64_t>self.batch.size):
            raise MemoryError()
        for place in range(self.batch.size):
            self.accesses[place].flags = FIRST_MISS
        self.rules.missed(&self.batch, self.accesses)

    def on_request_access(self, keys, req_context):
        """Rank keys that a request accesses for the first time."""
        cdef list batch
        cdef Py_ssize_t place
        cdef Py_ssize_t cursor = 0
        cdef object positions
        cdef int collecting
        self.require_ready()
        if not self.rules.ranked:
            return
        positions = self.positions_of(req_context)
        batch = self.find_batch(keys)
        collecting = PyGC_Disable()
        try:
            for place in range(self.batch.size):
                self.accesses[place].flags = NEW
                self.read_position(req_context, positions, place, &cursor)
            if not self.rules.ensure(<uint64_t>self.batch.size):
                raise MemoryError()
            self.rules.accessed(&self.batch, self.accesses, self.rank_for(req_context))
        finally:
            if collecting:
                PyGC_Enable()

    def _finish(self, keys, insertion_only_keys, reused_keys):
        """Count what a request has used; `keys` are head to tail."""
        cdef list batch = self.find_batch(keys)
        cdef Py_ssize_t place
        if not self.rules.ensure(<uint64_t>self.batch.size):
            raise MemoryError()
        for place in range(self.batch.size):
            if self.resident(place) == NULL:
                self.batch.slots[place] = NIL
            if batch[place] in reused_keys:
                self.accesses[place].flags = USED_AGAIN
            elif batch[place] in insertion_only_keys:
                self.accesses[place].flags = ONLY_INSERTED
        self.rules.finished(&self.batch, self.accesses)

    def mark_evictable(self, key):
        """Say that a chunk has become idle."""
        cdef list batch = self.find_one(key)
        cdef Node* node = self.resident(0)
        if node == NULL:
            raise block_not_found("mark_evictable", batch[0])
        if not self.rules.ensure(1):
            raise MemoryError()
        node.block.ref_cnt = 0
        self.rules.became_idle(self.batch.slots[0], node)

    def mark_non_evictable(self, key):
        """Say that an idle chunk has been pinned."""
        cdef list batch = self.find_one(key)
        cdef Node* node = self.resident(0)
        if node == NULL:
            raise block_not_found("mark_non_evictable", batch[0])
        node.block.ref_cnt = 1

    def evict(self, n, protected):
        """Evict exactly `n` idle chunks that are not protected, or none: None."""
        cdef int64_t count = n
        cdef list batch, evicted = []
        cdef CompiledPolicy policy = self.policy
        cdef uint64_t victim
        cdef uint32_t slot
        cdef int collecting
        self.require_ready()
        if count < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        if count == 0:
            return evicted
        batch = self.find_batch(protected)
        collecting = PyGC_Disable()
        try:
            if not policy.c_ensure(0):
                raise MemoryError()
            self.protect_resident()
            policy.victims.no_memory = False
            if not policy.c_search(<uint64_t>count):
                if policy.victims.no_memory:
                    raise MemoryError()
                return None
            try:
                for victim in range(policy.victims.size):
                    slot = policy.victims.items[victim].slot
                    evicted.append((key_of(node_at(policy.table, slot)), <object>self.chunks[slot]))
            except BaseException:
                self.rules.cancel()
                raise
            for victim in range(policy.victims.size):
                self.taken(policy.victims.items[victim].slot)
            policy.commit()
        finally:
            if collecting:
                PyGC_Enable()
        return evicted

    def clear(self):
        """Drop every chunk, ghost and adaptive state."""
        self.require_ready()
        self.policy.clear()
        self.let_go()

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        self.require_ready()
        self.policy._check()
