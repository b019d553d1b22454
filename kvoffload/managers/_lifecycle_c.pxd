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
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.pool cimport Pool, pool_take
from kvoffload._core.table cimport Node, Table, table_new_epoch
from kvoffload.policies._steps_c cimport begin_block, resident
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
