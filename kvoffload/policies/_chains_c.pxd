"""Chains of resident blocks, compiled; see ``_chains_py`` for the rule.

Structure
    One link per node of the table, by the node's id.
Invariants
    A link names the node before and that block's link id. Ids are never reused, not even after a
    clear, so a link is dead if its block has left or its node now holds another block.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport NIL, Table

cdef struct Link:
    uint64_t link_id        # of the block on this node, from 1; 0: no block
    uint64_t before_id      # of the block before, when it was linked
    uint32_t before         # its node, NIL for none
    uint32_t num_behind     # blocks linked to this one
    uint32_t depth          # blocks before this one when it was linked
    uint32_t waiting        # its place among the waiting blocks, from 1, 0 for none

cdef struct Chains:
    Link* links             # by node_id
    uint64_t room           # of `links`
    uint64_t last_id        # given out

cdef void chains_open(Chains* chains) noexcept
cdef void chains_close(Chains* chains) noexcept
# Make room for the links of `num_nodes` nodes; False if there is no memory.
cdef bint chains_ensure(Chains* chains, uint64_t num_nodes) noexcept
# Learn from a touched batch.
cdef void chains_link(Chains* chains, const Batch* batch) noexcept
# Verify the invariants; return the broken one, or NULL.
cdef const char* chains_check(Chains* chains, Table* table) noexcept


cdef inline void chains_insert(Chains* chains, uint32_t node_id) noexcept nogil:
    """Add a block that is linked to none."""
    cdef Link* link = chains.links + node_id
    chains.last_id += 1
    link.link_id = chains.last_id
    link.before_id = 0
    link.before = NIL
    link.num_behind = 0
    link.depth = 0
    link.waiting = 0


cdef inline Link* chains_before(Chains* chains, const Link* link) noexcept nogil:
    """Return the link of the block before, or NULL if it has left or never existed."""
    cdef Link* before
    if link.before == NIL:
        return NULL
    before = chains.links + link.before
    return before if before.link_id == link.before_id else NULL


cdef inline void chains_leave(Chains* chains, uint32_t node_id) noexcept nogil:
    """Remove a block from the count of the one before it."""
    cdef Link* before = chains_before(chains, chains.links + node_id)
    if before != NULL:
        before.num_behind -= 1


cdef inline void chains_return(Chains* chains, uint32_t node_id) noexcept nogil:
    """Undo `chains_leave`."""
    cdef Link* before = chains_before(chains, chains.links + node_id)
    if before != NULL:
        before.num_behind += 1
