"""The call sequence of vLLM's CPU manager, over the library's compiled policies and pool.

Structure
    A compiled policy holds the nodes, a pool the chunk ids, rules say what a request's accesses
    mean to the policy.
Invariants
    ``num_idle`` and ``num_pending`` count the resident chunks by state. An exception leaves no
    trace.
"""

cimport numpy as cnp
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport find_all
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.pool cimport pool_reset
from kvoffload._core.table cimport (
    NIL,
    RESIDENT,
    Node,
    Table,
    hash_key,
    holds_key,
    index_find,
    node_at,
)
from kvoffload.integrations.vllm._finish cimport KeyOrder, order_keys
from kvoffload.integrations.vllm._request cimport (
    INSERTED,
    MISSED,
    REUSED,
    RequestAccess,
    RequestRank,
)
from kvoffload.integrations.vllm._rules_c cimport (
    NOT_STORED,
    OBSERVED,
    ONLY_INSERTED,
    READY,
    USED_AGAIN,
)
from kvoffload.integrations.vllm._store_c cimport StoringManager
from kvoffload.policies._twin_c cimport CompiledPolicy, key_of

from kvoffload._checks import batch_error
from kvoffload.errors import (
    block_not_found,
    block_not_pinned,
    block_not_ready,
    ref_count_overflow,
)

cnp.import_array()

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(PyObject*) nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject*) nogil


cdef class ManagerCore(StoringManager):
    """Do for vLLM what its own CPU manager does; ``KVOffloadManager`` adds what is not hot."""

    # -- reads -------------------------------------------------------------------------------

    def lookup(self, key, req_context):
        """Tell whether one chunk is resident and readable; changes no order."""
        cdef Table* table
        cdef const uint8_t* address
        cdef uint64_t length
        cdef uint32_t slot
        cdef Node* node
        self.require_ready()
        if type(key) is not bytes or not key:
            raise batch_error([key], "keys")
        table = self.policy.table
        address = <const uint8_t*>PyBytes_AS_STRING(<PyObject*>key)
        length = <uint64_t>PyBytes_GET_SIZE(<PyObject*>key)
        # A request's keys lie mostly in successive nodes: try the one after the last hit.
        slot = self.last + 1
        if self.last == NIL or slot >= table.num_used or not holds_key(
            node_at(table, slot), address, length
        ):
            slot = index_find(table, address, length, hash_key(table, address, length))
        self.last = slot
        if slot == NIL:
            return self.miss
        node = node_at(table, slot)
        if not node.flags & RESIDENT:
            return self.miss
        return self.hit if node.block.ref_cnt >= 0 else self.hit_pending

    def get_load_source(self, key, req_context):
        """Name the tier that a hit comes from: host memory."""
        self.require_ready()
        return self.host

    def prepare_load(self, keys, req_context):
        """Pin chunks for reading, and count the access."""
        return self.pin(keys, req_context, True)

    def _prepare_read(self, keys, req_context):
        """Pin chunks for a transfer that is not an access of the request."""
        return self.pin(keys, req_context, False)

    cdef object pin(self, object keys, object req_context, bint is_access):
        cdef list batch = self.open_batch(keys)
        cdef RequestAccess access = None, new_access = None
        cdef RequestRank rank = None, new_rank = None
        cdef object positions = None, spec
        cdef cnp.ndarray chunk_ids
        cdef Py_ssize_t place
        cdef int64_t num_new
        cdef Node* node
        cdef Table* table = self.policy.table
        cdef int collecting
        if is_access:
            access = self.access_of(req_context)
            if access is None:
                access = new_access = RequestAccess(self, self.generation)
            if self.rules.ranked:
                rank = self.rank_of(req_context)
            positions = self.positions_of(req_context)
        collecting = PyGC_Disable()
        try:
            chunk_ids = self.new_ids(len(batch))
            spec = self.new_spec(chunk_ids)
            find_all(table, &self.batch)
            for place in range(self.batch.size):
                node = self.resident(place)
                if node == NULL:
                    raise block_not_found("prepare_load", batch[place])
                if node.block.ref_cnt < 0:
                    raise block_not_ready("prepare_load", batch[place])
                if node.block.ref_cnt > INT32_MAX - self.batch.size:
                    raise ref_count_overflow("prepare_load", batch[place])
                self.accesses[place].flags = OBSERVED | READY
            if is_access:
                num_new = self.observe("prepare_load", req_context, access, positions)
                if self.rules.ranked and rank is None and num_new:
                    rank = new_rank = RequestRank(self.policy)
                self.attach(req_context, new_access, new_rank)
            for place in range(self.batch.size):
                node = node_at(table, self.batch.slots[place])
                self.num_idle -= node.block.ref_cnt == 0
                node.block.ref_cnt += 1
                (<int32_t*>cnp.PyArray_DATA(chunk_ids))[place] = <int32_t>node.block.block_id
            if is_access:
                self.start(access)
                self.record(access, True)
                self.rules.accessed(&self.batch, self.accesses, rank)
        finally:
            if collecting:
                PyGC_Enable()
        return spec

    def complete_load(self, keys, req_context):
        """Release one pin for each occurrence of each chunk."""
        cdef list batch = self.open_batch(keys)
        cdef Table* table = self.policy.table
        cdef Py_ssize_t place, undo
        cdef Node* node
        find_all(table, &self.batch)
        if not self.rules.ensure(0):
            raise MemoryError()
        for place in range(self.batch.size):
            node = self.resident(place)
            if node == NULL or node.block.ref_cnt <= 0:
                for undo in range(place):
                    node_at(table, self.batch.slots[undo]).block.ref_cnt += 1
                if self.resident(place) == NULL:
                    raise block_not_found("complete_load", batch[place])
                raise block_not_pinned("complete_load", batch[place])
            node.block.ref_cnt -= 1
            # The occurrence that releases the last pin.
            self.accesses[place].flags = READY if node.block.ref_cnt == 0 else 0
        for place in range(self.batch.size):
            if self.accesses[place].flags:
                self.num_idle += 1
                self.rules.became_idle(
                    self.batch.slots[place], node_at(table, self.batch.slots[place])
                )

    def touch(self, keys, req_context):
        """Mark chunks as used now, the last key first."""
        cdef list batch = self.open_batch(keys)
        if not self.rules.ensure(<uint64_t>self.batch.size):
            raise MemoryError()
        find_all(self.policy.table, &self.batch)
        self.policy.c_touch(&self.batch)

    # -- requests ----------------------------------------------------------------------------

    def on_new_request(self, req_context):
        """Begin to follow a request."""
        self.require_ready()
        context = self.request_context_class()
        if self.access_of(req_context) is None:
            self.attach(req_context, RequestAccess(self, self.generation), None)
        return context

    def on_request_finished(self, req_context):
        """Count what the request has used as one access, tail first."""
        cdef RequestAccess access
        cdef KeyOrder order
        cdef uint64_t number
        cdef Py_ssize_t place
        cdef uint8_t uses
        self.require_ready()
        access = self.access_of(req_context)
        if access is None or access.finished:
            return
        order = order_keys(access, req_context, self.positions_of(req_context))
        self.ensure_scratch(<Py_ssize_t>access.size)
        self.batch.items = order.keys
        self.batch.size = <Py_ssize_t>access.size
        if not self.rules.ensure(<uint64_t>self.batch.size):
            raise MemoryError()
        access.finished = True
        find_all(self.policy.table, &self.batch)
        for place in range(self.batch.size):
            if self.resident(place) == NULL:
                self.batch.slots[place] = NIL
            uses = access.seen[order.numbers[place]].uses
            if uses & REUSED:
                self.accesses[place].flags = USED_AGAIN
            elif uses & INSERTED:
                self.accesses[place].flags = ONLY_INSERTED
            else:
                self.accesses[place].flags = NOT_STORED if uses & MISSED else 0
        self.rules.finished(&self.batch, self.accesses)

    def reset_cache(self):
        """Drop every chunk; counted offers, events and samples stay, ids start at 0 again."""
        self.require_ready()
        self.policy.clear()
        pool_reset(&self.pool)
        self.generation += 1
        self.num_idle = self.num_pending = 0
        self.last = NIL

    # -- what is shown -----------------------------------------------------------------------

    def _evict(self, int64_t n, protected):
        """Evict exactly `n` idle chunks that are not protected, or None; return keys and ids."""
        cdef CompiledPolicy policy = self.policy
        cdef list batch = self.open_batch(protected)
        cdef list evicted = []
        cdef uint64_t victim
        cdef Node* node
        cdef int collecting
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        collecting = PyGC_Disable()
        try:
            if not policy.c_ensure(0):
                raise MemoryError()
            find_all(policy.table, &self.batch)
            self.protect_resident()
            policy.victims.no_memory = False
            if not policy.c_search(<uint64_t>n):
                if policy.victims.no_memory:
                    raise MemoryError()
                return None
            try:
                for victim in range(policy.victims.size):
                    node = node_at(policy.table, policy.victims.items[victim].slot)
                    evicted.append((key_of(node), node.block.block_id))
            except BaseException:
                self.rules.cancel()
                raise
            self.free_victims()
            policy.commit()
        finally:
            if collecting:
                PyGC_Enable()
        return evicted

    def _usage(self):
        """Return the chunks in use by transfers and, of these, those being written."""
        cdef int64_t taken
        self.require_ready()
        taken = self.pool.num_fresh - self.pool.num_freed
        return taken - <int64_t>self.num_idle, self.num_pending

    def _chunk(self, key):
        """Return ``(ref_cnt, chunk_id)`` of a resident chunk, or None."""
        cdef list batch = self.open_batch([key])
        cdef Node* node
        find_all(self.policy.table, &self.batch)
        node = self.resident(0)
        return None if node == NULL else (node.block.ref_cnt, node.block.block_id)

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        cdef uint64_t idle = 0, pending = 0
        cdef uint32_t slot
        cdef Node* node
        self.require_ready()
        self.policy._check()
        for slot in range(self.policy.table.num_used):
            node = node_at(self.policy.table, slot)
            if node.flags & RESIDENT:
                idle += node.block.ref_cnt == 0
                pending += node.block.ref_cnt < 0
        if idle != self.num_idle or pending != self.num_pending:
            raise AssertionError("idle and pending chunks are counted")
        if self.pool.num_fresh - self.pool.num_freed != <int64_t>self.policy.num_resident:
            raise AssertionError("every resident chunk has an id of its own")
