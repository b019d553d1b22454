"""Steps of a request on a compiled policy, for managers and miniatures.

Invariants
    A step neither creates objects nor runs Python code.
"""

from libc.stdint cimport INT32_MAX, int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch, batch_part, find_changed, item_key, item_length
from kvoffload._core.table cimport (
    ENDS_REQUEST,
    IS_SHARED,
    NIL,
    PARKED,
    RESIDENT,
    Node,
    Table,
    add_key,
    drop_key,
    index_find,
    node_at,
    table_new_epoch,
)
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef inline Node* resident(Table* table, const Batch* batch, Py_ssize_t index) noexcept:
    """Return the node of a key that was found if its block is resident, else NULL."""
    cdef uint32_t node_id = batch.node_ids[index]
    cdef Node* node
    if node_id == NIL:
        return NULL
    node = node_at(table, node_id)
    return node if node.flags & RESIDENT else NULL


cdef inline Py_ssize_t num_ready(Table* table, const Batch* batch) noexcept:
    """Return the number of leading blocks that are ready; nodes are found."""
    cdef Py_ssize_t index = 0
    cdef Node* node
    while index < batch.size:
        node = resident(table, batch, index)
        if node == NULL or node.block.ref_cnt < 0:
            break
        index += 1
    return index


cdef inline Py_ssize_t choose_missing(
    CompiledPolicy policy, Batch* batch, const uint8_t* left_out
) noexcept:
    """Choose the keys that are not resident, once each, except those left out; NULL for none.

    Unknown keys get nodes, and all except those left out get a mark. -1 without memory.
    """
    cdef Table* table = policy.table
    cdef Py_ssize_t index, num_resident = 0, num_missing = 0, num_unknown = 0
    cdef uint32_t node_id
    cdef Node* node
    batch.num_chosen = 0
    find_changed(table, batch)
    while num_resident < batch.size and resident(table, batch, num_resident) != NULL:
        num_resident += 1
    if num_resident == batch.size:
        return 0
    for index in range(num_resident, batch.size):
        num_unknown += batch.node_ids[index] == NIL
    if not policy.c_ensure(<uint64_t>num_unknown):
        return -1
    table_new_epoch(table)
    for index in range(batch.size):
        if left_out != NULL and left_out[index]:
            continue
        node_id = batch.node_ids[index]
        if node_id == NIL:
            node_id = add_once(table, batch, index)
            if node_id == NIL:
                forget(table, batch, 0, num_missing)
                return -1
        node = node_at(table, node_id)
        if not node.flags & RESIDENT and node.block.mark != table.epoch:
            batch.chosen[num_missing] = node_id
            batch.indexes[num_missing] = <uint32_t>index
            num_missing += 1
        node.block.mark = table.epoch
    return num_missing


cdef inline uint32_t add_once(Table* table, Batch* batch, Py_ssize_t index) noexcept:
    """Give a key that was not found a node; a repeat already has one. NIL without memory."""
    cdef const uint8_t* key = item_key(batch, index)
    cdef uint64_t length = item_length(batch, index)
    cdef uint32_t node_id = index_find(table, key, length, batch.hashes[index])
    if node_id == NIL:
        node_id = add_key(table, key, length, batch.hashes[index])
    batch.node_ids[index] = node_id
    return node_id


cdef inline void forget(Table* table, Batch* batch, Py_ssize_t start, Py_ssize_t stop) noexcept:
    """Drop the chosen keys whose nodes were made only for this call: they are on no ring."""
    cdef Py_ssize_t chosen
    cdef Node* node
    # The last first, so that the next batch gets successive nodes again.
    for chosen in range(stop - 1, start - 1, -1):
        node = node_at(table, batch.chosen[chosen])
        if node.ring == 0:
            drop_key(table, batch.chosen[chosen], node)


cdef inline void touch_as_stored(
    CompiledPolicy policy, Batch* batch, const uint8_t* stored
) noexcept:
    """Touch a batch; of `stored`, (batch.size,), the policy sees each block as being stored.

    A request has stored them itself, so that they become recent within their rings, uncounted.
    """
    cdef Py_ssize_t index
    cdef Node* node
    for index in range(batch.size):
        node = resident(policy.table, batch, index)
        if stored[index] and node != NULL and 0 <= node.block.ref_cnt < INT32_MAX:
            node.block.ref_cnt = -2 - node.block.ref_cnt
    policy.touch_batch(batch)
    for index in range(batch.size):
        node = resident(policy.table, batch, index)
        if node != NULL and node.block.ref_cnt < -1:
            node.block.ref_cnt = -2 - node.block.ref_cnt
            if node.flags & PARKED and node.block.ref_cnt == 0:  # the touch has skipped it
                policy.became_idle(batch.node_ids[index], node)


cdef inline Py_ssize_t find_room(
    CompiledPolicy policy, Batch* batch, Py_ssize_t num_missing, int64_t num_free, bint is_last
) noexcept:
    """Find victims and return how many of the chosen keys to store.

    If `is_last`, for a session that ends, only as many as fit into free slots and those of released
    blocks. -1 if the store is refused or there is no memory; the policy's ``victims`` say which.
    """
    policy.victims.no_memory = False
    if is_last:
        return policy.c_make_room_of_released(batch, num_missing, num_free)
    return policy.c_make_room(batch, num_missing, num_free)


cdef inline void settle(
    CompiledPolicy policy, Batch* batch, Py_ssize_t num_admitted, Py_ssize_t num_missing
) noexcept:
    """End a store whose admitted keys have blocks: forget the others."""
    batch.num_chosen = num_admitted
    if num_admitted == num_missing:
        batch.found_at = policy.table.version  # every key of the batch has a block now
    else:
        forget(policy.table, batch, num_admitted, num_missing)


cdef inline void begin_block(CompiledPolicy policy, Node* node, int64_t block_id) noexcept:
    """Give an absent key a block, pending; the caller inserts it."""
    node.block.ref_cnt = -1
    node.block.block_id = block_id
    node.flags |= RESIDENT
    policy.num_resident += 1


cdef inline void make_ready(CompiledPolicy policy, uint32_t node_id, Node* node) noexcept:
    """Make a pending block idle."""
    node.block.ref_cnt = 0
    if node.flags & PARKED:
        policy.became_idle(node_id, node)


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
    cdef Py_ssize_t place = known
    cdef Node* node
    while place:
        node = resident(table, batch, place - 1)
        if node == NULL or not node.flags & ENDS_REQUEST:
            break
        node.flags &= <uint8_t>(~ENDS_REQUEST & 0xFF)
        place -= 1
    if place == known:
        share(table, batch, known)


cdef inline void mark_ends(
    Table* table, const Batch* batch, Py_ssize_t known, Py_ssize_t num_last
) noexcept:
    """Note after which blocks a session may go on, as `Sessions` does."""
    cdef Py_ssize_t index
    cdef Node* node
    cdef bint is_marked = False
    for index in range(max(batch.size - num_last, 0), batch.size):
        node = resident(table, batch, index)
        if node != NULL:
            node.flags |= ENDS_REQUEST
            is_marked = True
    if known and not is_marked:
        node = resident(table, batch, known - 1)
        if node != NULL and not node.flags & IS_SHARED:
            node.flags |= ENDS_REQUEST


cdef inline Py_ssize_t meet(Table* table, const Batch* batch, Py_ssize_t start) noexcept:
    """Note a request, or the blocks that it adds, as `Sessions.meet` does."""
    cdef Py_ssize_t known = num_known(table, batch, start)
    if known > start:
        go_on(table, batch, known)
    return known


cdef inline void leave(
    Table* table, const Batch* batch, Py_ssize_t met, Py_ssize_t own, Py_ssize_t num_last
) noexcept:
    """Note the end of a request, as `Sessions.leave` does."""
    cdef Batch others
    cdef Py_ssize_t known
    if met < own:
        others = batch_part(batch, 0, own)
        known = num_known(table, &others, met)
        if known > met:
            share(table, batch, known)
    mark_ends(table, batch, met, num_last)


cdef inline void serve_at_once(
    Table* table, const Batch* batch, Py_ssize_t known, Py_ssize_t num_last
) noexcept:
    """Note a whole request, as `Sessions.serve_at_once` does, given its deepest known block."""
    if known:
        go_on(table, batch, known)
    mark_ends(table, batch, known, num_last)
