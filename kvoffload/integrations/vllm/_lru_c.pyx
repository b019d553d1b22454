"""LRU as vLLM counts uses, by request: the policy alone.

A request takes one provisional rank, its chunks share it, newest position first, and what it used
is ranked anew, tail first, when it finishes. The order is (rank, reverse position, key).
"""

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport NIL, SEGMENT_BITS, Table, drop_key, node_at
from kvoffload._core.victims cimport Victim, victims_ensure
from kvoffload.integrations.vllm._order cimport (
    group_open,
    group_release,
    order_append,
    order_check,
    order_close,
    order_ensure,
    order_idle,
    order_join,
    order_leave,
    order_open,
    order_settle,
    order_slots,
    order_take,
)
from kvoffload.policies._twin_c cimport key_of


cdef class RankedLRU(CompiledPolicy):
    def __init__(self, cache_capacity):
        self.set_up(cache_capacity, 1, 0)
        self.victims.managed = True
        order_close(&self.order)
        order_open(&self.order, &self.storage.table)
        self.generation += 1
        self.publish()

    def __dealloc__(self):
        order_close(&self.order)

    def _keys(self):
        """Return the resident keys, oldest first."""
        self.require_ready()
        return [key_of(node_at(self.table, slot)) for slot in order_slots(&self.order)]

    # -- moves -------------------------------------------------------------------------------

    cdef bint ensure_moves(self, uint64_t entries) noexcept:
        # Beside the moves, a request may take a rank.
        return order_ensure(&self.order, entries + 1, self.table.num_keys)

    cdef bint ensure_victims(self, uint64_t n) noexcept:
        return victims_ensure(&self.victims, n, 0)

    cdef void renew(self, uint32_t slot, Node* node) noexcept:
        order_leave(&self.order, slot, node)
        order_append(&self.order, slot, node)

    cdef void raise_to(
        self, uint32_t slot, Node* node, uint32_t group, int32_t reverse_position
    ) noexcept:
        cdef uint64_t rank = self.order.groups[group].rank
        if self.order.ranks[slot].rank > rank or (
            self.order.ranks[slot].rank == rank
            and self.order.ranks[slot].reverse_position >= reverse_position
        ):
            return
        order_leave(&self.order, slot, node)
        order_join(&self.order, slot, node, group, reverse_position)

    cdef void join(
        self, uint32_t slot, Node* node, uint32_t group, int32_t reverse_position
    ) noexcept:
        order_join(&self.order, slot, node, group, reverse_position)

    cdef uint32_t open_group(self) noexcept:
        return group_open(&self.order)

    cdef void release(self, uint64_t generation, uint32_t group) noexcept:
        if generation == self.generation:
            group_release(&self.order, group)

    # -- what the skeleton calls -------------------------------------------------------------

    cdef bint c_ensure(self, uint64_t more) noexcept:
        return CompiledPolicy.c_ensure(self, more) and self.ensure_moves(more)

    cdef void c_touch(self, Batch* batch) noexcept:
        # Without memory for the log the order stays as it is.
        cdef Py_ssize_t place
        if not self.ensure_moves(<uint64_t>batch.size):
            return
        for place in range(batch.size - 1, -1, -1):
            if batch.slots[place] != NIL:
                self.renew(batch.slots[place], node_at(self.table, batch.slots[place]))

    cdef void c_insert(self, uint32_t slot, Node* node) noexcept:
        order_append(&self.order, slot, node)

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef uint32_t slot
        if not self.ensure_victims(n):
            self.victims.no_memory = True
            return False
        while self.victims.size < n:
            slot = order_take(&self.order)
            if slot == NIL:
                self.cancel()
                return False
            self.victims.items[self.victims.size].slot = slot
            self.victims.items[self.victims.size].ring = NULL
            self.victims.size += 1
        return True

    cdef void cancel(self) noexcept:
        """End a search and give the victims back, where a scan would find them again."""
        cdef uint64_t place
        cdef uint32_t slot
        for place in range(self.victims.size):
            slot = self.victims.items[place].slot
            order_idle(&self.order, slot, node_at(self.table, slot))
        self.victims.size = 0
        order_settle(&self.order)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        self.num_resident -= 1
        drop_key(self.table, victim.slot, node_at(self.table, victim.slot))

    cdef void c_settled(self) noexcept:
        order_settle(&self.order)

    cdef void take_off(self, Node* node) noexcept:
        order_leave(&self.order, slot_of(self.table, node), node)
        self.num_resident -= 1

    cdef void became_idle(self, uint32_t slot, Node* node) noexcept:
        order_idle(&self.order, slot, node)

    cdef void c_clear(self) noexcept:
        order_close(&self.order)
        self.generation += 1

    cdef const char* c_check(self) noexcept:
        return order_check(&self.order)


cdef uint32_t slot_of(Table* table, Node* node) noexcept:
    """Return the slot of a node of the table."""
    cdef uint32_t number
    cdef Node* segment
    if table.nodes <= node < table.nodes + table.num_reserved:
        return <uint32_t>(node - table.nodes)
    for number in range(table.num_segments):
        segment = table.segments[number]
        if segment <= node < segment + (1 << SEGMENT_BITS):
            return table.num_reserved + (number << SEGMENT_BITS) + <uint32_t>(node - segment)
    return NIL
