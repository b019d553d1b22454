"""The parts of chains that are not on the fast path; see ``_chains_c.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport extend, release
from kvoffload._core.table cimport RESIDENT, node_at


cdef void chains_open(Chains* chains) noexcept:
    memset(chains, 0, sizeof(Chains))


cdef void chains_close(Chains* chains) noexcept:
    release(chains.links, chains.room * sizeof(Link))
    chains_open(chains)


cdef bint chains_ensure(Chains* chains, uint64_t num_nodes) noexcept:
    return extend(<void**>&chains.links, &chains.room, num_nodes, sizeof(Link), chains.room)


cdef void chains_link(Chains* chains, const Batch* batch) noexcept:
    cdef Py_ssize_t place
    cdef uint32_t before, slot
    cdef Link* link
    for place in range(1, batch.size):
        before = batch.slots[place - 1]
        slot = batch.slots[place]
        if before == NIL or slot == NIL or before == slot:
            continue
        link = chains.links + slot
        # A ghost has a node but no number.
        if link.number == 0 or chains.links[before].number == 0:
            continue
        if link.num_behind == 0 and chains_before(chains, link) == NULL:
            link.before = before
            link.before_number = chains.links[before].number
            link.depth = chains.links[before].depth + 1
            chains.links[before].num_behind += 1


cdef const char* chains_check(Chains* chains, Table* table) noexcept:
    cdef uint32_t slot
    cdef uint64_t linked = 0, behind = 0
    cdef Link* link
    cdef Link* before
    for slot in range(table.num_used):
        if not node_at(table, slot).flags & RESIDENT:
            continue
        link = chains.links + slot
        behind += link.num_behind
        before = chains_before(chains, link)
        if before != NULL:
            linked += 1
            if not node_at(table, link.before).flags & RESIDENT:
                return b"links join resident blocks"
            if before.num_behind == 0 or before.depth >= link.depth:
                return b"depth rises behind"
        if link.number == 0 or link.number > chains.last_number:
            return b"every resident block is in the chains"
    if linked != behind:
        return b"the blocks behind are counted"
    return NULL
