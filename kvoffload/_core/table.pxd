"""Nodes and the index: every key that a policy knows, resident or ghost, has one node.

Structure
    A node is 64 bytes, one cache line; it never moves. The first ``num_reserved`` are contiguous in
    address space; later ones are in segments. The index has their numbers by the hashes of the
    keys.
Names
    A *node* is an entry of the table, and ``node`` the pointer to one; the uint32 that addresses it
    is its ``node_id``. A *slot* is a place in the medium, which a ``block_id`` addresses.
Invariants
    A node is in the index exactly if its ``key_length`` is not 0. Nodes that are not in use are on
    the free stack (linked by ``next``), or above ``num_used``, or retired: a retired node's block
    left while its status was still held; it keeps the last values until that status is deleted.
    A retired node is SHOWN and has no key. ``block_id`` is -1 in each of the first ``num_ready``
    nodes that has no block.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvoffload._core.index cimport (
    MOST_PER_BUCKET,
    NIL,
    Index,
    Probe,
    index_approach,
    index_insert,
    index_remove,
    kvo_prefetch,
    kvo_require,
    probe_from,
    probe_next,
)

cdef extern from "hash.h" nogil:
    uint64_t kvo_hash(const uint8_t* key, uint64_t length, const uint64_t* secret)
    bint kvo_equal(const uint8_t* left, const uint8_t* right, uint64_t length)

# The ctypes BlockStatus byte for byte: 16 bytes, ref_cnt at 0, block_id at 8.
cdef struct Block:
    int32_t ref_cnt     # -1 pending, 0 idle, n > 0 pinned by n loads
    uint32_t mark       # in BlockStatus padding: the epoch of the batch that the key is part of
    int64_t block_id    # slot in the medium; -1: the node has no block

cdef struct Node:
    Block block
    uint32_t prev       # ring: towards least recent; parked: low half of its position
    uint32_t next       # ring: towards most recent; parked: high half; free: the next free node
    uint8_t ring        # the policy's ring that the node is on, 0 for none
    uint8_t key_length  # 1 ... 36 inline, LONG_KEY out of line, 0 not in use
    uint8_t flags       # RESIDENT, PARKED, ...
    uint8_t note        # for the policy's use
    uint8_t key[36]     # the key; if long, its address at offset 4 and its length at offset 12

cdef enum:
    INLINE_KEY_BYTES = 36
    LONG_KEY = 255
    SEGMENT_BITS = 16

cdef enum:
    RESIDENT = 1        # has a block
    PARKED = 2          # off its ring, passed over by a victim scan
    LISTED = 4          # parked, idle, and in the ring's heap of returning blocks
    ENDS_REQUEST = 8    # a session may go on after the block
    IS_SHARED = 16      # several sessions have used the block
    SHOWN = 32          # a BlockStatus of the block was handed out, and its block_id kept
    CHOSEN = 64         # a victim of the current search, for a policy that meets it again
    SAMPLED = 128       # a watch observes the key, as long as the key has a node

cdef struct Kept:
    int64_t block_id    # before anyone could write to it
    bint is_exported    # a BlockStatus lies on the node's block

cdef struct Table:
    Node* nodes             # the contiguous nodes
    uint32_t num_reserved   # number of contiguous nodes, ready or not
    uint32_t num_ready      # nodes whose block_id was set to -1; segments included
    uint32_t num_used       # nodes that were handed out at least once
    uint32_t free_head      # stack of freed nodes
    uint64_t num_freed      # nodes on it
    Node** segments         # nodes beyond num_reserved, 2**SEGMENT_BITS each
    uint32_t num_segments
    uint32_t num_retired
    Index index
    uint64_t num_keys       # keys in the index
    uint32_t epoch          # of the current batch; marks of other epochs are void
    Kept* kept              # by node, where SHOWN
    uint64_t num_kept       # length of the array, in nodes
    uint64_t secret[8]      # words that key the hash
    uint64_t version        # changes when a key gets, leaves or changes its node; per table
    uint32_t sample_below   # keys are SAMPLED if bits 32 to 55 of their hash are below this

# Reserve room for about `num_nodes` nodes; False, with nothing reserved, if there is no memory.
cdef bint table_open(Table* table, uint64_t num_nodes) noexcept
cdef void table_close(Table* table) noexcept
# Reserve `more` nodes and index entries; False, with nothing changed, if there is no memory.
cdef bint table_extend(Table* table, uint64_t more) noexcept
# Drop every key. Nodes with an exported status are retired.
cdef void table_clear(Table* table) noexcept
cdef void table_new_epoch(Table* table) noexcept
# Give an array from `reserve`, of `room` entries, one for each node; False if there is no memory.
cdef bint extend_by_node(
    Table* table, void** array, uint64_t* room, size_t entry_bytes
) noexcept
# Draw a sample: flag the keys of which `sample_of` is below a threshold, now and from now on.
cdef void table_sample(Table* table, uint32_t below) noexcept
# Keep the block_id of a node whose status is about to be handed out; False if there is no memory.
cdef bint keep_id(Table* table, uint32_t node_id) noexcept
cdef bint store_long_key(Node* node, const uint8_t* key, uint64_t length) noexcept
cdef void free_long_key(Node* node) noexcept
# Verify the invariants; return the broken one, or NULL.
cdef const char* table_check(Table* table) noexcept


cdef inline Node* node_at(Table* table, uint32_t node_id) noexcept nogil:
    kvo_require(node_id < table.num_ready, "a node_id names a node that is ready")
    if node_id < table.num_reserved:
        return table.nodes + node_id
    node_id -= table.num_reserved
    return table.segments[node_id >> SEGMENT_BITS] + (node_id & ((1 << SEGMENT_BITS) - 1))


cdef inline int64_t own_id(const Table* table, uint32_t node_id, const Node* node) noexcept nogil:
    """Return the block_id that a manager assigned, even if a status has overwritten it."""
    return table.kept[node_id].block_id if node.flags & SHOWN else node.block.block_id


cdef inline bint is_exported(const Table* table, uint32_t node_id, const Node* node) noexcept nogil:
    """Return whether a BlockStatus lies on the node's block."""
    return node.flags & SHOWN and table.kept[node_id].is_exported


cdef inline const uint8_t* key_bytes(const Node* node, uint64_t* length) noexcept nogil:
    cdef const uint8_t* address
    if node.key_length != LONG_KEY:
        length[0] = node.key_length
        return node.key
    memcpy(&address, node.key + 4, sizeof(address))
    memcpy(length, node.key + 12, sizeof(uint64_t))
    return address


cdef inline bint holds_key(const Node* node, const uint8_t* key, uint64_t length) noexcept nogil:
    cdef uint64_t own_length
    cdef const uint8_t* own
    if length <= INLINE_KEY_BYTES:
        return node.key_length == length and kvo_equal(node.key, key, length)
    if node.key_length != LONG_KEY:
        return False
    own = key_bytes(node, &own_length)
    return own_length == length and kvo_equal(own, key, length)


cdef inline uint64_t hash_key(Table* table, const uint8_t* key, uint64_t length) noexcept nogil:
    return kvo_hash(key, length, table.secret)


cdef inline uint64_t hash_node(Table* table, const Node* node) noexcept nogil:
    cdef uint64_t length
    cdef const uint8_t* key = key_bytes(node, &length)
    return kvo_hash(key, length, table.secret)


cdef inline uint32_t sample_of(uint64_t hashed) noexcept nogil:
    """Return the 24 bits that determine the sample, which the index does not use."""
    return <uint32_t>(hashed >> 32) & 0xFFFFFF


cdef inline uint32_t index_find(
    Table* table, const uint8_t* key, uint64_t length, uint64_t hashed
) noexcept nogil:
    """Return the node of a key, or NIL."""
    cdef Probe probe = probe_from(&table.index, hashed)
    cdef uint32_t node_id = probe_next(&probe)
    while node_id != NIL and not holds_key(node_at(table, node_id), key, length):
        node_id = probe_next(&probe)
    return node_id


cdef inline bint has_room(const Table* table, uint64_t more) noexcept nogil:
    """Return whether the index has room for `more` keys."""
    return table.num_keys + more <= table.index.num_buckets * MOST_PER_BUCKET


cdef inline bint table_ensure(Table* table, uint64_t more) noexcept:
    """Reserve `more` nodes and index entries; False if there is no memory."""
    cdef uint64_t unused = table.num_freed + (table.num_ready - table.num_used)
    if unused >= more and has_room(table, more):
        return True
    return table_extend(table, more)


cdef inline uint32_t take_node(Table* table) noexcept nogil:
    """Take a node that is not in use; the caller has ensured that one exists."""
    cdef uint32_t node_id = table.free_head
    kvo_require(
        node_id != NIL or table.num_used < table.num_ready, "the caller has made sure of a node"
    )
    if node_id != NIL:
        table.free_head = node_at(table, node_id).next
        table.num_freed -= 1
        return node_id
    node_id = table.num_used
    table.num_used += 1
    return node_id


cdef inline void give_node(Table* table, uint32_t node_id, Node* node) noexcept nogil:
    """Put a node on the free stack."""
    kvo_require(not is_exported(table, node_id, node), "no status lies on a free node")
    node.block.ref_cnt = 0
    node.block.block_id = -1
    node.block.mark = 0
    node.ring = 0
    node.key_length = 0
    node.flags = 0
    node.note = 0
    node.next = table.free_head
    table.free_head = node_id
    table.num_freed += 1


cdef inline void retire_or_give(Table* table, uint32_t node_id, Node* node) noexcept nogil:
    """Retire or free a node whose key has left the index."""
    if is_exported(table, node_id, node):
        node.key_length = 0
        node.ring = 0
        node.flags = SHOWN
        table.num_retired += 1
    else:
        give_node(table, node_id, node)


cdef inline uint32_t add_key(
    Table* table, const uint8_t* key, uint64_t length, uint64_t hashed
) noexcept:
    """Give an absent key a node without a block; NIL if there is no memory for a long key.

    The caller has called `table_ensure`.
    """
    cdef uint32_t node_id = take_node(table)
    cdef Node* node = node_at(table, node_id)
    kvo_require(has_room(table, 1), "the caller has made sure of room in the index")
    if length == INLINE_KEY_BYTES or length == INLINE_KEY_BYTES - 4:
        # A digest, with or without a group suffix: copies of constant size need no call.
        node.key_length = <uint8_t>length
        memcpy(node.key, key, INLINE_KEY_BYTES - 4)
        if length == INLINE_KEY_BYTES:
            memcpy(node.key + INLINE_KEY_BYTES - 4, key + INLINE_KEY_BYTES - 4, 4)
    elif length < INLINE_KEY_BYTES:
        node.key_length = <uint8_t>length
        memcpy(node.key, key, length)
    elif not store_long_key(node, key, length):
        give_node(table, node_id, node)
        return NIL
    if sample_of(hashed) < table.sample_below:
        node.flags = SAMPLED
    index_insert(&table.index, hashed, node_id)
    table.num_keys += 1
    table.version += 1
    return node_id


cdef inline void drop_hashed_key(
    Table* table, uint32_t node_id, Node* node, uint64_t hashed
) noexcept:
    """Forget a key whose hash is known."""
    index_remove(&table.index, hashed, node_id)
    table.num_keys -= 1
    table.version += 1
    if node.key_length == LONG_KEY:
        free_long_key(node)
    retire_or_give(table, node_id, node)


cdef inline void drop_key(Table* table, uint32_t node_id, Node* node) noexcept:
    """Remove a key, which is on no ring, from the index; free or retire its node."""
    drop_hashed_key(table, node_id, node, hash_node(table, node))


cdef inline uint64_t hash_ahead(Table* table, const Node* node) noexcept nogil:
    """Hash the key of a node and prefetch its bucket for the removal that follows."""
    cdef uint64_t hashed = hash_node(table, node)
    index_approach(&table.index, hashed)
    return hashed


cdef inline uint32_t drop_block(Table* table, uint32_t node_id, Node* node) noexcept:
    """Take the block from a key that stays in the index; return its node, which is on no ring.

    If a status of the block is still held, the key moves to another node, which the caller has
    reserved with `table_ensure`.
    """
    cdef uint32_t successor
    cdef uint64_t hashed
    cdef Node* heir
    if is_exported(table, node_id, node):
        successor = take_node(table)
        heir = node_at(table, successor)
        heir[0] = node[0]
        hashed = hash_node(table, node)
        index_remove(&table.index, hashed, node_id)
        index_insert(&table.index, hashed, successor)
        table.version += 1
        retire_or_give(table, node_id, node)
        node_id = successor
        node = heir
    node.block.ref_cnt = 0
    node.block.block_id = -1
    node.ring = 0
    node.flags &= SAMPLED
    return node_id


cdef class Storage:
    cdef Table table
    cdef dict exports           # node_id -> number of StatusBuffers on it
    cdef dict statuses          # node_id -> weak reference to the BlockStatus on the last

    cdef int open(self, uint64_t num_nodes) except -1
    cdef object export(self, uint32_t node_id)


cdef class StatusBuffer:
    cdef Storage storage
    cdef uint32_t node_id
    cdef Py_ssize_t shape[1]
    cdef Py_ssize_t strides[1]
