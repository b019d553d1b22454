"""LRU that ranks by returns, compiled: ``lru?hints=1``.

Structure
    Hit density with a time of last use per node, which counts uses of blocks. Each ring of a class
    is in the order of these times, so LRU's choice among the blocks without a turn is the oldest of
    the rings' candidates. See ``_lru_by_return_py`` for the Python twin.
Cost
    As hit density, and 8 bytes per node.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ghosts cimport DECLINED
from kvoffload._core.memory cimport extend, release
from kvoffload._core.table cimport NIL, Node
from kvoffload.policies._hit_density_c cimport NONE, Candidate, _HitDensity
from kvoffload.policies._turn_tails_c cimport NO_TAIL, Tails, is_sparser, tails_first
from kvoffload.policies._turns_c cimport NUM_RINGS
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

from kvoffload.policies.base import CachePolicy


cdef class _LRUByReturn(_HitDensity):
    cdef uint64_t* times            # by node_id: of the last use
    cdef uint64_t num_times         # nodes that the array has room for
    cdef uint64_t num_uses

    def __cinit__(self):
        self.times = NULL

    def __dealloc__(self):
        release(self.times, self.num_times * sizeof(uint64_t))

    def __init__(self, cache_capacity):
        _HitDensity.__init__(self, cache_capacity, guard=0)

    @property
    def rule(self):
        """The policy that ranks blocks without a turn: ``lru``."""
        self.require_ready()
        return "lru"

    cdef bint ensure_last(self) noexcept:
        return _HitDensity.ensure_last(self) and extend(
            <void**>&self.times, &self.num_times, self.num_last, sizeof(uint64_t), self.num_times
        )

    # -- uses --------------------------------------------------------------------------------

    cdef void note_use(self, uint32_t node_id) noexcept:
        self.num_uses += 1
        self.times[node_id] = self.num_uses

    cdef void note_uses(self, Batch* batch) noexcept:
        """Note that the blocks of a batch have become recent, the last first."""
        cdef Py_ssize_t index
        for index in range(batch.size - 1, -1, -1):
            if batch.node_ids[index] != NIL:
                self.note_use(batch.node_ids[index])

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        _HitDensity.c_insert(self, node_id, node)
        self.note_use(node_id)

    cdef void c_touch(self, Batch* batch) noexcept:
        _HitDensity.c_touch(self, batch)
        self.note_uses(batch)

    cdef void c_begun(self, Batch* batch, const Hint* hint) noexcept:
        _HitDensity.c_begun(self, batch, hint)
        self.note_uses(batch)

    cdef void c_extended(self, Batch* batch) noexcept:
        _HitDensity.c_extended(self, batch)
        self.note_uses(batch)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        _HitDensity.c_finished(self, batch, hint)
        self.note_uses(batch)

    # -- searches ----------------------------------------------------------------------------

    cdef tuple room_now(self, int64_t num_free):
        cdef Batch* batch = &self.batch
        cdef int64_t admitted
        cdef Py_ssize_t index
        for index in range(batch.size):
            batch.indexes[index] = <uint32_t>index
        self.victims.no_memory = False
        admitted = self.c_make_room(batch, batch.size, num_free)
        if admitted >= 0:
            return admitted, self.let_go()
        if self.victims.no_memory:
            raise MemoryError()
        return None

    cdef int64_t c_make_room(self, Batch* batch, int64_t n, int64_t num_free) noexcept:
        cdef int64_t admitted = CompiledPolicy.c_make_room(self, batch, n, num_free)
        cdef int64_t index
        cdef uint32_t position
        if admitted < 0 and not self.victims.no_memory:
            for index in range(n):
                position = self.ghost_offered(batch, index)
                if position != NIL:
                    self.memory.items[position].flags |= DECLINED
        return admitted

    cdef int next_to_leave(self) noexcept:
        """Return the candidate that leaves next: LRU's, or a sparser one of a turn."""
        cdef const Candidate* candidate
        cdef const Tails* tails
        cdef uint64_t time, first_time = 0
        cdef int first = NONE, ring, tail
        for ring in range(NUM_RINGS):
            candidate = &self.candidates[ring]
            if not candidate.present:
                continue
            time = self.times[candidate.node_id]
            if first == NONE or time < first_time:
                first = ring
                first_time = time
        if self.hinted == NULL:
            return first
        tails = &self.hinted.tails
        tail = tails_first(tails, 0)
        if tail == NO_TAIL:
            return first
        if first == NONE or is_sparser(
            &tails.items[tail],
            1.0 / (<double>self.candidates[first].age + 1.0),
            self.candidates[first].age,
        ):
            return NUM_RINGS + tail
        return first


class LRUByReturnCachePolicy(_LRUByReturn, CachePolicy):
    """A policy that evicts by LRU, or by the sessions' return times if clients announce them.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        # Not inherited: a Python function shows its signature, a slot of a C type does not.
        _LRUByReturn.__init__(self, cache_capacity)
