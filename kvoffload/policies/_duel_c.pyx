"""The duel of hit density and LRU in miniatures, compiled; see ``_duel_py`` for the rules."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch, has_flag
from kvoffload._core.index cimport NIL, Probe, probe_from, probe_next
from kvoffload._core.table cimport Table, hash_node, node_at
from kvoffload.policies._learned cimport _FADE, Gain
from kvoffload.policies._miniature_c cimport Miniature
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

from kvoffload.policies._hit_density import sample_shift
from kvoffload.policies._lists_c import LRUCachePolicy

cdef double LEAD = 1.0


cdef class Duel:
    """The choice of the rule by which hit density evicts."""

    def __cinit__(self, int64_t capacity, CompiledPolicy by_density):
        self.gain = Gain()
        self.shift = sample_shift(capacity)
        self.by_density = self.new_miniature(by_density)
        self.by_recency = self.new_miniature(LRUCachePolicy(by_density.capacity))
        self.clear()

    def new_miniature(self, CompiledPolicy policy):
        """Return a miniature with a small policy."""
        return Miniature(policy, SAMPLE_CAPACITIES * policy.capacity)

    def compare(self, CompiledPolicy policy):
        """Begin to serve requests without their hints."""
        self.without_hints = self.new_miniature(policy)

    cdef void clear(self) noexcept:
        self.rule = DENSITY
        self.hits[DENSITY] = self.hits[LRU] = 0.0
        self.request = self.oldest = self.num_noted = 0
        self.lag = 1
        self.store_begins = False
        self.without_hints = None
        self.gain.clear()
        self.by_density.clear()
        self.by_recency.clear()

    cdef Py_ssize_t take(self, Table* table, Batch* batch, uint8_t kept) noexcept:
        cdef Py_ssize_t index = 0, size = 0
        while index < batch.size and size < self.by_density.most:
            if is_sampled(batch.drawn[index], self.shift) and not (
                kept and has_flag(table, batch, index, kept)
            ):
                batch.indexes[size] = <uint32_t>index
                size += 1
            index += 1
        self.by_density.take(batch, batch.indexes, size)
        self.by_recency.take(batch, batch.indexes, size)
        if self.without_hints is not None:
            self.without_hints.take(batch, batch.indexes, size)
        return size

    cdef int serve(
        self, Table* table, Batch* batch, const Hint* hint, double mean_length
    ) noexcept:
        cdef bint ends = hint != NULL and hint.ends
        cdef Py_ssize_t size = self.take(table, batch, 0), plain
        cdef double found, lead, at, before
        cdef int other = 1 - self.rule
        self.request += 1
        self.measure_lag(table)
        at, before = <double>self.request, <double>self.request + 1.0 - <double>self.lag
        found = <double>self.by_density.c_serve(hint, NULL, ends, at, before)
        self.hits[DENSITY] = self.hits[DENSITY] * _FADE + found
        self.hits[LRU] = self.hits[LRU] * _FADE + <double>self.by_recency.c_serve(
            hint, NULL, ends, at, before
        )
        if self.without_hints is not None:
            plain = self.without_hints.c_serve(NULL, NULL, ends, at, before)
            self.gain.add(<double>size, found, <double>plain)
        lead = (self.hits[other] - self.hits[self.rule]) * <double>(<uint64_t>1 << self.shift)
        if lead > LEAD * mean_length:
            self.rule = other
        return self.rule

    cdef void measure_lag(self, Table* table) noexcept:
        """Forget the noted stores that have ended; take the lag from the last of them."""
        cdef Noted* noted
        while self.num_noted:
            noted = &self.noted[self.oldest]
            if is_pending(table, noted.hashed):
                break
            self.lag = self.request - noted.request
            self.oldest = (self.oldest + 1) % MOST_NOTED
            self.num_noted -= 1

    cdef void finish(self, Table* table, Batch* batch, const Hint* hint) noexcept:
        self.take(table, batch, 0)
        self.by_density.c_finish(hint)
        self.by_recency.c_finish(hint)

    cdef void release(self, Table* table, Batch* batch, uint8_t kept) noexcept:
        self.take(table, batch, kept)
        self.by_density.c_release()
        self.by_recency.c_release()
        if self.without_hints is not None:
            self.without_hints.c_release()

    cdef bint ensure_release(self) noexcept:
        cdef Py_ssize_t most = self.by_density.most
        return (
            self.by_density.policy.ensure_release(most)
            and self.by_recency.policy.ensure_release(most)
            and (self.without_hints is None or self.without_hints.policy.ensure_release(most))
        )

    cdef void note_store(self, uint64_t hashed) noexcept:
        cdef Noted* noted
        self.store_begins = False
        if self.num_noted == MOST_NOTED:
            self.oldest = (self.oldest + 1) % MOST_NOTED
            self.num_noted -= 1
        noted = &self.noted[(self.oldest + self.num_noted) % MOST_NOTED]
        noted.hashed = hashed
        noted.request = self.request
        self.num_noted += 1

    def check(self):
        """Verify the invariants; raise AssertionError with the broken one."""
        if self.hits[DENSITY] < 0.0 or self.hits[LRU] < 0.0:
            raise AssertionError("hits are counted")
        if self.lag < 1:
            raise AssertionError("a store takes a request")
        for miniature in (self.by_density, self.by_recency, self.without_hints):
            if miniature is not None:
                miniature._check()


cdef bint is_pending(Table* table, uint64_t hashed) noexcept:
    """Return whether the block of a key with that hash is being stored."""
    cdef Probe probe = probe_from(&table.index, hashed)
    cdef uint32_t node_id = probe_next(&probe)
    while node_id != NIL and hash_node(table, node_at(table, node_id)) != hashed:
        node_id = probe_next(&probe)
    return node_id != NIL and node_at(table, node_id).block.ref_cnt < 0
