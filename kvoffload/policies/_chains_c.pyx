"""The functions of chains outside the fast path; see ``_chains_c.pxd``."""

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
    cdef Py_ssize_t index
    cdef uint32_t before, node_id
    cdef Link* link
    for index in range(1, batch.size):
        before = batch.node_ids[index - 1]
        node_id = batch.node_ids[index]
        if before == NIL or node_id == NIL or before == node_id:
            continue
        link = chains.links + node_id
        # A ghost has a node but no link id.
        if link.link_id == 0 or chains.links[before].link_id == 0:
            continue
        if link.num_behind == 0 and chains_before(chains, link) == NULL:
            link.before = before
            link.before_id = chains.links[before].link_id
            link.depth = chains.links[before].depth + 1
            chains.links[before].num_behind += 1


cdef const char* chains_check(Chains* chains, Table* table) noexcept:
    cdef uint32_t node_id
    cdef uint64_t linked = 0, behind = 0
    cdef Link* link
    cdef Link* before
    for node_id in range(table.num_used):
        if not node_at(table, node_id).flags & RESIDENT:
            continue
        link = chains.links + node_id
        behind += link.num_behind
        before = chains_before(chains, link)
        if before != NULL:
            linked += 1
            if not node_at(table, link.before).flags & RESIDENT:
                return b"links join resident blocks"
            if before.num_behind == 0 or before.depth >= link.depth:
                return b"depth rises behind"
        if link.link_id == 0 or link.link_id > chains.last_id:
            return b"every resident block is in the chains"
    if linked != behind:
        return b"the blocks behind are counted"
    return NULL
