"""The life of a block, compiled, for the library's manager and for vLLM's.

Structure
    ``ref_cnt`` of a resident block is its state: -1 pending, 0 idle, above 0 the number of pins.
    `BlockStates` counts the pending and the pinned ones; every other resident block is idle. Each
    manager adds its own interface, the reports to the policy and the handling of idle blocks.
Invariants
    A step that returns no object neither allocates nor fails, and none runs Python code. So a
    manager always completes a decision once made.
"""

from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch, batch_part
from kvoffload._core.pool cimport Pool, pool_give, pool_take
from kvoffload._core.table cimport (
    NIL,
    ENDS_REQUEST,
    IS_SHARED,
    PARKED,
    RESIDENT,
    Node,
    Table,
    drop_key,
    node_at,
    own_id,
    table_new_epoch,
)
from kvoffload.policies._steps_c cimport begin_block, make_ready, resident
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef struct BlockStates:
    uint64_t num_pending
    uint64_t num_pinned


# The blocks of a transfer that has ended. Their number, the sum of their ids and one of these
# identify it, as vLLM completes a transfer with a set of its keys: open stores have no block in
# common.
cdef struct Ended:
    Py_ssize_t size
    uint32_t sum            # modulo 2**32
    int64_t one


# -- loads -------------------------------------------------------------------------------------


cdef inline void pin(BlockStates* states, Node* node) noexcept:
    """Add one pin to a readable block."""
    states.num_pinned += node.block.ref_cnt == 0
    node.block.ref_cnt += 1


cdef inline bint unpin(BlockStates* states, Node* node) noexcept:
    """Remove one pin from a pinned block; return whether it was the last."""
    node.block.ref_cnt -= 1
    if node.block.ref_cnt != 0:
        return False
    states.num_pinned -= 1
    return True


cdef inline void park_pinned(
    const BlockStates* states, CompiledPolicy policy, uint64_t num_loaded
) noexcept:
    """Park pinned nodes during the load if so many are pinned that a search would meet them all."""
    if states.num_pinned > policy.num_resident // 4:
        policy.c_park(2 * num_loaded)


# -- stores ------------------------------------------------------------------------------------


cdef inline void begin_store(
    BlockStates* states, CompiledPolicy policy, Pool* pool, Node* node
) noexcept:
    """Give an absent block a slot of the medium, pending; the caller inserts it."""
    begin_block(policy, node, pool_take(pool))
    states.num_pending += 1


cdef inline list chosen_keys(const Batch* batch, Py_ssize_t num_admitted):
    """Return the chosen keys that are stored."""
    cdef list chosen = PyList_New(num_admitted)
    cdef Py_ssize_t index
    for index in range(num_admitted):
        key = <object>batch.items[batch.indexes[index]]
        Py_INCREF(key)
        PyList_SET_ITEM(chosen, index, key)
    return chosen


cdef inline void end_store(
    BlockStates* states, CompiledPolicy policy, Pool* pool, uint32_t node_id, bint stored
) noexcept:
    """Make a pending block idle, or drop it."""
    cdef Node* node = node_at(policy.table, node_id)
    states.num_pending -= 1
    if stored:
        make_ready(policy, node_id, node)
        return
    pool_give(pool, own_id(policy.table, node_id, node))
    policy.c_removed(node_id, node)
    policy.take_off(node_id, node)
    drop_key(policy.table, node_id, node)


cdef inline list pending_keys(Table* table, const Batch* batch, list keys):
    """Return the keys of the batch whose blocks are pending, once each."""
    cdef list pending = []
    cdef Py_ssize_t index
    cdef Node* node
    table_new_epoch(table)
    for index in range(batch.size):
        node = resident(table, batch, index)
        if node != NULL and node.block.ref_cnt < 0 and node.block.mark != table.epoch:
            node.block.mark = table.epoch
            pending.append(keys[index])
    return pending


# -- sessions ----------------------------------------------------------------------------------


cdef inline Py_ssize_t num_known(Table* table, const Batch* batch, Py_ssize_t start) noexcept:
    """Return the number of blocks up to the deepest resident one, at least `start`."""
    cdef Py_ssize_t end = batch.size
    cdef const uint32_t* node_ids = batch.node_ids
    while end > start:
        # Most of a new prompt is unknown, so four keys at a time.
        if end - start >= 4 and NIL == (
            node_ids[end - 1] & node_ids[end - 2] & node_ids[end - 3] & node_ids[end - 4]
        ):
            end -= 4
        elif resident(table, batch, end - 1) == NULL:
            end -= 1
        else:
            break
    return end


cdef inline void share(Table* table, const Batch* batch, Py_ssize_t end) noexcept:
    """Note that several sessions use the resident blocks before `end`."""
    cdef Py_ssize_t index
    cdef Node* node
    for index in range(end):
        node = resident(table, batch, index)
        if node != NULL:
            node.flags |= IS_SHARED


cdef inline void go_on(Table* table, const Batch* batch, Py_ssize_t known) noexcept:
    """Note whether a request goes on after its deepest known block, which is before `known`."""
    cdef Node* deepest = node_at(table, batch.node_ids[known - 1])
    if deepest.flags & ENDS_REQUEST:
        deepest.flags &= <uint8_t>(~ENDS_REQUEST & 0xFF)
    else:
        share(table, batch, known)


cdef inline Py_ssize_t meet(Table* table, const Batch* batch, Py_ssize_t start) noexcept:
    """Note a request, or the blocks that it adds, as `Sessions.meet` does."""
    cdef Py_ssize_t known = num_known(table, batch, start)
    if known > start:
        go_on(table, batch, known)
    return known


cdef inline void leave(Table* table, const Batch* batch, Py_ssize_t met, Py_ssize_t own) noexcept:
    """Note the end of a request, as `Sessions.leave` does."""
    cdef Batch others
    cdef Py_ssize_t known
    cdef Node* last
    if met < own:
        others = batch_part(batch, 0, own)
        known = num_known(table, &others, met)
        if known > met:
            share(table, batch, known)
    last = resident(table, batch, batch.size - 1) if batch.size else NULL
    if last != NULL:
        last.flags |= ENDS_REQUEST


cdef inline void serve_at_once(
    Table* table, const Batch* batch, Py_ssize_t known, Py_ssize_t num_last
) noexcept:
    """Note a whole request, as `Sessions.serve_at_once` does, given its deepest known block."""
    cdef Py_ssize_t index
    cdef Node* node
    if known:
        go_on(table, batch, known)
    for index in range(batch.size - 1, max(batch.size - num_last, 0) - 1, -1):
        node = resident(table, batch, index)
        if node != NULL:
            node.flags |= ENDS_REQUEST
            break


cdef inline void release_unshared(CompiledPolicy policy, const Batch* batch) noexcept:
    """Release the blocks that are not shared, last first; the policy has made room."""
    cdef Py_ssize_t start, end = batch.size
    cdef Batch part
    while end > 0:
        start = end
        while start > 0 and not is_shared(policy.table, batch.node_ids[start - 1]):
            start -= 1
        if start < end:
            part = batch_part(batch, start, end)
            policy.c_release(&part)
        end = start - 1


cdef inline bint is_shared(Table* table, uint32_t node_id) noexcept:
    return node_id != NIL and node_at(table, node_id).flags & IS_SHARED


# -- what holds --------------------------------------------------------------------------------


cdef inline BlockStates count_states(Table* table) noexcept:
    """Recount the states, block by block."""
    cdef BlockStates states = BlockStates(0, 0)
    cdef uint32_t node_id
    cdef Node* node
    for node_id in range(table.num_used):
        node = node_at(table, node_id)
        if node.flags & RESIDENT:
            states.num_pending += node.block.ref_cnt < 0
            states.num_pinned += node.block.ref_cnt > 0
    return states
