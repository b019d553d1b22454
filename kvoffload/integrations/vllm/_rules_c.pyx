"""Rules from a request's accesses to calls of a policy; see ``_rules_c.pxd``.

``LRURules`` and ``ARCRules`` decide as vLLM's own policies do; in releases before 0.33 requests
take no ranks. ``UseRules`` drives any other policy of the library: one touch a request and key, at
the request's first miss of it (a policy may learn from ghosts) or at the request's finish if it was
reused; what the request only inserted becomes recent at its finish without counting as used.

``ChainRules`` drives policies that learn from whole requests and decline stores: the touch is that
of all keys of the request, at its first access, so that a store is decided with all that is known;
at its finish what is left of it becomes recent once more, tail first, without counting as used.
"""

from libc.string cimport memset

from kvoffload._core.batch cimport batch_close, batch_ensure, find_all
from kvoffload._core.items cimport list_items
from kvoffload._core.memory cimport discard, resize
from kvoffload._core.ring cimport (
    Ring,
    ring_append,
    ring_remove,
    ring_renew,
    ring_reserve_parking,
)
from kvoffload._core.table cimport NIL, PARKED, RESIDENT, node_at
from kvoffload._core.victims cimport victims_ensure

_ARC_LISTS = ("t1", "t2", "b1", "b2")

# Rings of the ARC policy, by the number in Node.ring.
cdef enum:
    T1 = 1
    T2 = 2


cdef class RequestRules:
    def __cinit__(self, CompiledPolicy policy not None, bint ranked=False):
        policy.require_ready()
        self.policy = policy
        self.ranked = ranked
        policy.victims.managed = True

    def keys(self, name):
        """Return the keys of a list of the policy, least recent first."""
        raise AttributeError(name)

    cdef bint ensure(self, uint64_t moves) noexcept:
        return True

    cdef bint ensure_search(self, uint64_t n, uint64_t num_protected) noexcept:
        cdef uint64_t more = self.most_moved()
        cdef Ring* ring
        cdef int number
        # A policy looks one further, for one victim and for one that it passes over; those whose
        # scans leave chunks behind pass over as many more as they choose.
        if not victims_ensure(&self.policy.victims, n + 1, num_protected + n + 1):
            return False
        for number in range(self.policy.num_rings):
            ring = &self.policy.rings[number]
            if not ring_reserve_parking(ring, ring.size + more):
                return False
        return True

    cdef uint64_t most_moved(self) noexcept:
        return 0

    cdef bint open_chain(self, list keys) noexcept:
        return True

    cdef void started(self) noexcept:
        pass

    cdef void accessed(self, Batch* batch, const Access* accesses, RequestRank rank) noexcept:
        pass

    cdef void missed(self, Batch* batch, const Access* accesses) noexcept:
        pass

    cdef void insert(
        self, uint32_t slot, Node* node, const Access* access, RequestRank rank
    ) noexcept:
        self.policy.c_insert(slot, node)

    cdef void finished(self, Batch* batch, const Access* accesses) noexcept:
        pass

    cdef void became_idle(self, uint32_t slot, Node* node) noexcept:
        if node.flags & PARKED:
            self.policy.became_idle(slot, node)

    cdef void cancel(self) noexcept:
        self.policy.cancel()


cdef class LRURules(RequestRules):
    def __cinit__(self, RankedLRU policy not None, bint ranked=False):
        self.lru = policy
        self.all_or_none = True

    def keys(self, name):
        """Return the keys of ``chunks``, least recent first."""
        if name != "chunks":
            raise AttributeError(name)
        return self.lru._keys()

    cdef bint ensure(self, uint64_t moves) noexcept:
        return self.lru.ensure_moves(moves)

    cdef bint ensure_search(self, uint64_t n, uint64_t num_protected) noexcept:
        return self.lru.ensure_victims(n)

    cdef void accessed(self, Batch* batch, const Access* accesses, RequestRank rank) noexcept:
        cdef Py_ssize_t place
        cdef Node* node
        if not self.ranked:
            return
        for place in range(batch.size):
            if not accesses[place].flags & NEW:
                continue
            if rank.group == NIL:
                rank.group = self.lru.open_group()
            if batch.slots[place] == NIL or not accesses[place].flags & POSITIONED:
                continue
            node = node_at(self.policy.table, batch.slots[place])
            if node.flags & RESIDENT:
                self.lru.raise_to(
                    batch.slots[place], node, rank.group, accesses[place].reverse_position
                )

    cdef void insert(
        self, uint32_t slot, Node* node, const Access* access, RequestRank rank
    ) noexcept:
        if not access.flags & POSITIONED:
            self.lru.c_insert(slot, node)
            return
        if rank.group == NIL:
            rank.group = self.lru.open_group()
        self.lru.join(slot, node, rank.group, access.reverse_position)

    cdef void finished(self, Batch* batch, const Access* accesses) noexcept:
        cdef Py_ssize_t place
        for place in range(batch.size - 1, -1, -1):
            if batch.slots[place] != NIL:
                self.lru.renew(
                    batch.slots[place], node_at(self.policy.table, batch.slots[place])
                )

    cdef void became_idle(self, uint32_t slot, Node* node) noexcept:
        self.lru.became_idle(slot, node)

    cdef void cancel(self) noexcept:
        self.lru.cancel()


cdef class UseRules(RequestRules):
    def __cinit__(self, CompiledPolicy policy not None):
        memset(&self.part, 0, sizeof(Batch))
        self.items_room = 0
        self.counts = NULL

    def __dealloc__(self):
        discard(self.counts)
        discard(self.part.items)
        batch_close(&self.part)

    cdef bint ensure(self, uint64_t moves) noexcept:
        cdef PyObject** items
        cdef int32_t* counts
        if moves > self.items_room:
            items = <PyObject**>resize(self.part.items, moves * sizeof(PyObject*))
            if items == NULL:
                return False
            self.part.items = items
            counts = <int32_t*>resize(self.counts, moves * sizeof(int32_t))
            if counts == NULL:
                return False
            self.counts = counts
            self.items_room = moves
        return batch_ensure(&self.part, <Py_ssize_t>moves)

    cdef uint64_t most_moved(self) noexcept:
        return self.policy.num_resident if self.demotes else 0

    cdef void choose(
        self, Batch* batch, const Access* accesses, uint8_t flags, uint8_t absent_flags
    ) noexcept:
        """Take the keys that have one of the flags; for those that are absent, of the others."""
        cdef Py_ssize_t place
        cdef uint32_t slot
        cdef Batch* part = &self.part
        part.size = 0
        for place in range(batch.size):
            slot = batch.slots[place]
            if accesses[place].flags & (absent_flags if slot == NIL else flags):
                if slot != NIL and node_at(self.policy.table, slot).ring == 0:
                    slot = NIL  # a key that is only about to become known
                part.items[part.size] = batch.items[place]
                part.slots[part.size] = slot
                part.size += 1

    cdef void touch(self, Batch* batch, const Access* accesses, uint8_t flags) noexcept:
        """Touch the keys that have one of the flags."""
        self.choose(batch, accesses, flags, flags)
        if self.part.size:
            self.policy.c_touch(&self.part)

    cdef void missed(self, Batch* batch, const Access* accesses) noexcept:
        self.touch(batch, accesses, FIRST_MISS)

    cdef void finished(self, Batch* batch, const Access* accesses) noexcept:
        # What was only inserted is touched as a pending block: it becomes recent, tail first, in
        # the place that it has, and does not count as used.
        self.show_pending(batch, accesses, ONLY_INSERTED, True)
        self.touch(batch, accesses, USED_AGAIN | ONLY_INSERTED)
        self.show_pending(batch, accesses, ONLY_INSERTED, False)

    cdef void show_pending(
        self, Batch* batch, const Access* accesses, uint8_t flags, bint pending
    ) noexcept:
        """Show chunks with one of the flags as pending, or restore their counts."""
        cdef Py_ssize_t place
        cdef Node* node
        for place in range(batch.size):
            if batch.slots[place] == NIL or not accesses[place].flags & flags:
                continue
            node = node_at(self.policy.table, batch.slots[place])
            if pending:
                self.counts[place] = node.block.ref_cnt
                node.block.ref_cnt = -1
            else:
                node.block.ref_cnt = self.counts[place]
                if node.block.ref_cnt == 0:  # the touch may have passed over it
                    self.became_idle(batch.slots[place], node)


cdef class ChainRules(UseRules):
    def __cinit__(self, CompiledPolicy policy not None):
        memset(&self.chain, 0, sizeof(Batch))
        self.by_chain = True

    def __dealloc__(self):
        batch_close(&self.chain)

    cdef bint open_chain(self, list keys) noexcept:
        if not batch_ensure(&self.chain, len(keys)):
            return False
        self.chain.items = list_items(keys)
        self.chain.size = len(keys)
        return True

    cdef uint64_t most_moved(self) noexcept:
        return <uint64_t>self.chain.size

    cdef void started(self) noexcept:
        cdef Py_ssize_t place
        cdef uint32_t slot
        find_all(self.policy.table, &self.chain)
        for place in range(self.chain.size):
            slot = self.chain.slots[place]
            if slot != NIL and node_at(self.policy.table, slot).ring == 0:
                self.chain.slots[place] = NIL  # a key that is only about to become known
        self.policy.c_touch(&self.chain)

    cdef void missed(self, Batch* batch, const Access* accesses) noexcept:
        pass

    cdef void finished(self, Batch* batch, const Access* accesses) noexcept:
        # Its uses were counted when it started; of what is absent only what was declined is shown
        # again, what was evicted since is not.
        self.choose(batch, accesses, USED_AGAIN | ONLY_INSERTED | NOT_STORED, NOT_STORED)
        if self.part.size:
            self.policy.c_finished(&self.part)


cdef class ARCRules(UseRules):
    def __cinit__(self, _ARC policy not None):
        self.arc = policy
        self.all_or_none = True

    def keys(self, name):
        """Return the keys of ``t1``, ``t2``, ``b1`` or ``b2``, least recent first."""
        if name not in _ARC_LISTS:
            raise AttributeError(name)
        return self.policy._ring_keys(_ARC_LISTS.index(name))

    @property
    def target_t1_size(self):
        """Size that T1 should have, in chunks; adapts."""
        return self.arc.target

    @target_t1_size.setter
    def target_t1_size(self, value):
        number = float(value)
        if not 0.0 <= number <= self.arc.capacity:
            raise ValueError(
                f"target_t1_size must be in 0 ... {self.arc.capacity}, got {value!r}"
            )
        self.arc.target = number

    cdef void finished(self, Batch* batch, const Access* accesses) noexcept:
        cdef Py_ssize_t place
        cdef uint32_t slot
        cdef Node* node
        cdef CompiledPolicy policy = self.policy
        for place in range(batch.size - 1, -1, -1):
            slot = batch.slots[place]
            if slot == NIL or not accesses[place].flags & (ONLY_INSERTED | USED_AGAIN):
                continue
            node = node_at(policy.table, slot)
            if not node.flags & RESIDENT:
                continue
            if accesses[place].flags & ONLY_INSERTED or node.ring == T2:
                ring_renew(policy.table, &policy.rings[node.ring - 1], slot, node)
            else:  # even a chunk that is pending again
                ring_remove(policy.table, &policy.rings[T1 - 1], node)
                ring_append(policy.table, &policy.rings[T2 - 1], slot, node)
