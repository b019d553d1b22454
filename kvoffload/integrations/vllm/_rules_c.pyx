"""Rules that translate a request's accesses to calls of a policy; see ``_rules_c.pxd``.

``ARCRules`` decide like vLLM's own policy; ``LRURules``, in ``_ranked_lru_c``, do, too.
``UseRules`` drives any other policy of the library, with one touch per request and key: at the
request's first miss of the key (a policy may learn from ghosts), or at its finish if it reused the
key. Keys that the request only inserted become recent at its finish without counting as used.

``ChainRules`` drives policies that learn from whole requests and decline stores: they touch all
keys of the request at its first access, so that a store is decided with full knowledge; at its
finish the remaining keys become recent again, tail first, without counting as used.
"""

from cpython.object cimport PyObject

from kvoffload._core.batch cimport batch_close, batch_ensure, find_all, omit_node
from kvoffload._core.items cimport list_items
from kvoffload._core.memory cimport discard, grow
from kvoffload._core.ring cimport ring_append, ring_remove, ring_renew
from kvoffload._core.table cimport NIL, RESIDENT, node_at
from kvoffload.policies._steps_c cimport touch_as_stored

# Rings of the ARC policy, by the id in Node.ring.
cdef enum:
    T1 = 1
    T2 = 2


cdef class RequestRules:
    def __cinit__(self, CompiledPolicy policy not None, bint ranked=False):
        policy.require_ready()
        self.policy = policy
        self.ranked = ranked

    cdef bint ensure(self, uint64_t moves) noexcept:
        return True

    cdef bint open_chain(self, list keys) noexcept:
        return True

    cdef void started(self, const Hint* hint) noexcept:
        pass

    cdef void accessed(self, Batch* batch, const Access* accesses, RequestState state) noexcept:
        pass

    cdef void missed(self, Batch* batch, const Access* accesses) noexcept:
        pass

    cdef void insert(
        self, uint32_t node_id, Node* node, const Access* access, RequestState state
    ) noexcept:
        self.policy.c_insert(node_id, node)

    cdef void finished(self, Batch* batch, const Access* accesses, const Hint* hint) noexcept:
        pass


cdef class UseRules(RequestRules):
    cdef Batch part             # some keys of a batch; its items are its own array
    cdef uint8_t* inserted      # of each whether it is ONLY_INSERTED
    cdef uint64_t rooms[2]      # of the two arrays

    def __dealloc__(self):
        discard(self.inserted)
        discard(self.part.items)
        batch_close(&self.part)

    cdef bint ensure(self, uint64_t moves) noexcept:
        return (
            batch_ensure(&self.part, <Py_ssize_t>moves)
            and grow(<void**>&self.part.items, &self.rooms[0], moves, sizeof(PyObject*), 0)
            and grow(<void**>&self.inserted, &self.rooms[1], moves, sizeof(uint8_t), 0)
        )

    cdef void choose(
        self, Batch* batch, const Access* accesses, uint8_t flags, uint8_t absent_flags
    ) noexcept:
        """Take the resident keys with one of `flags` and the absent keys with one of the others."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Batch* part = &self.part
        part.size = 0
        for index in range(batch.size):
            node_id = batch.node_ids[index]
            if accesses[index].flags & (absent_flags if node_id == NIL else flags):
                if node_id != NIL and node_at(self.policy.table, node_id).ring == 0:
                    node_id = NIL  # a key that is about to be added
                part.items[part.size] = batch.items[index]
                part.node_ids[part.size] = node_id
                part.hashes[part.size] = batch.hashes[index]  # read where there is no node
                self.inserted[part.size] = accesses[index].flags & ONLY_INSERTED
                part.size += 1

    cdef void missed(self, Batch* batch, const Access* accesses) noexcept:
        self.choose(batch, accesses, FIRST_MISS, FIRST_MISS)
        if self.part.size:
            self.policy.touch_batch(&self.part)

    cdef void finished(self, Batch* batch, const Access* accesses, const Hint* hint) noexcept:
        self.choose(batch, accesses, USED_AGAIN | ONLY_INSERTED, USED_AGAIN | ONLY_INSERTED)
        if self.part.size:
            touch_as_stored(self.policy, &self.part, self.inserted)


cdef class ChainRules(UseRules):
    cdef Batch chain            # the keys of a request; its items are a list's

    def __cinit__(self, CompiledPolicy policy not None):
        self.by_chain = True

    def __dealloc__(self):
        batch_close(&self.chain)

    cdef bint open_chain(self, list keys) noexcept:
        if not batch_ensure(&self.chain, len(keys)):
            return False
        self.chain.items = list_items(keys)
        self.chain.size = len(keys)
        return True

    cdef void started(self, const Hint* hint) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id
        find_all(self.policy.table, &self.chain)
        for index in range(self.chain.size):
            node_id = self.chain.node_ids[index]
            if node_id != NIL and node_at(self.policy.table, node_id).ring == 0:
                omit_node(self.policy.table, &self.chain, index)  # it is about to be added
        self.policy.begin_request(&self.chain, hint)

    cdef void missed(self, Batch* batch, const Access* accesses) noexcept:
        pass

    cdef void finished(self, Batch* batch, const Access* accesses, const Hint* hint) noexcept:
        # Its uses were counted when it started; of the absent keys only the declined ones are shown
        # again, not those evicted since.
        self.choose(batch, accesses, USED_AGAIN | ONLY_INSERTED | NOT_STORED, NOT_STORED)
        if self.part.size:
            self.policy.finish_request(&self.part, hint)


cdef class ARCRules(UseRules):
    cdef void finished(self, Batch* batch, const Access* accesses, const Hint* hint) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        cdef CompiledPolicy policy = self.policy
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL or not accesses[index].flags & (ONLY_INSERTED | USED_AGAIN):
                continue
            node = node_at(policy.table, node_id)
            if not node.flags & RESIDENT:
                continue
            if accesses[index].flags & ONLY_INSERTED or node.ring == T2:
                ring_renew(policy.table, &policy.rings[node.ring - 1], node_id, node)
            else:  # including a chunk that is pending again
                ring_remove(policy.table, &policy.rings[T1 - 1], node)
                ring_append(policy.table, &policy.rings[T2 - 1], node_id, node)
