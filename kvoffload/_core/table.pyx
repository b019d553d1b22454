"""Storage of nodes and index; see ``table.pxd`` for the structure and its invariants."""

import os
import weakref

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from libc.string cimport memset

from kvoffload._core.index cimport (
    KvoBucket,
    index_check,
    index_clear,
    index_close,
    index_distance,
    index_open,
)
from kvoffload._core.memory cimport discard, extend, release, reserve, resize

from kvoffload.types import BlockStatus

cdef extern from *:
    """
    #define KVO_MOST_NODES ((uint64_t)UINT32_MAX - 1)
    static char KVO_BYTES_FORMAT[] = "B";
    """
    const uint64_t MOST_NODES "KVO_MOST_NODES"
    char* BYTES_FORMAT "KVO_BYTES_FORMAT"

# Keys per bucket on average at the announced number of keys: 64 / 6 bytes per key. With 9, stores
# and evictions leave overflow in every second bucket, and a store with eviction takes a quarter
# longer.
cdef enum:
    KEYS_PER_BUCKET = 6
    # Nodes made ready at a time: their block_id is written, so their pages get memory.
    READY_STEP = 512
    # An index up to this size gets its memory at construction, a larger one page by page.
    INDEX_BYTES_AT_ONCE = 1 << 26
    # The first version of a table has its number above this many bits.
    VERSION_BITS = 40
    LAST_TABLE = (1 << (64 - VERSION_BITS)) - 1

LAYOUT = {"block": sizeof(Block), "node": sizeof(Node), "bucket": sizeof(KvoBucket)}


cdef uint64_t num_opened = 0  # tables; after LAST_TABLE it is 1 again


cdef uint64_t next_version() noexcept:
    """Return the first version of a table, never 0.

    It is far from the versions of the other tables, of which the last LAST_TABLE are told apart.
    """
    global num_opened
    num_opened = num_opened % LAST_TABLE + 1
    return num_opened << VERSION_BITS


cdef bint table_open(Table* table, uint64_t num_nodes) noexcept:
    memset(table, 0, sizeof(Table))
    table.free_head = NIL
    table.epoch = 1
    if num_nodes > MOST_NODES:
        return False
    table.num_reserved = <uint32_t>num_nodes
    table.nodes = <Node*>reserve(num_nodes * sizeof(Node))
    if table.nodes == NULL or not index_open(&table.index, num_nodes, KEYS_PER_BUCKET):
        table_close(table)
        return False
    if table.index.num_buckets * sizeof(KvoBucket) <= INDEX_BYTES_AT_ONCE:
        # Keys are scattered over it, so each of the first would wait for a page to be cleared.
        index_clear(&table.index)
    table.version = next_version()
    make_ready(table, min(num_nodes, <uint64_t>READY_STEP))
    return True


cdef void table_close(Table* table) noexcept:
    cdef uint32_t node_id, segment
    cdef Node* node
    for node_id in range(table.num_used):
        node = node_at(table, node_id)
        if node.key_length == LONG_KEY:
            free_long_key(node)
    for segment in range(table.num_segments):
        release(table.segments[segment], sizeof(Node) << SEGMENT_BITS)
    discard(table.segments)
    release(table.nodes, table.num_reserved * sizeof(Node))
    index_close(&table.index)
    release(table.kept, table.num_kept * sizeof(Kept))
    memset(table, 0, sizeof(Table))


cdef void make_ready(Table* table, uint64_t num_ready) noexcept:
    """Write "no block" into the nodes up to `num_ready`."""
    cdef uint32_t node_id
    cdef uint32_t first = table.num_ready
    table.num_ready = <uint32_t>num_ready
    for node_id in range(first, table.num_ready):
        node_at(table, node_id).block.block_id = -1


cdef bint add_segment(Table* table) noexcept:
    cdef Node** segments = <Node**>resize(table.segments, (table.num_segments + 1) * sizeof(Node*))
    if segments == NULL:
        return False
    table.segments = segments
    segments[table.num_segments] = <Node*>reserve(sizeof(Node) << SEGMENT_BITS)
    if segments[table.num_segments] == NULL:
        return False
    table.num_segments += 1
    return True


cdef bint grow_index(Table* table, uint64_t num_keys) noexcept:
    """Rebuild the index for at least `num_keys` keys, at least twice as large."""
    cdef uint64_t size = max(num_keys, 2 * table.index.num_buckets * KEYS_PER_BUCKET)
    cdef Index larger
    cdef uint32_t node_id
    cdef Node* node
    if not index_open(&larger, size, KEYS_PER_BUCKET):
        return False
    for node_id in range(table.num_used):
        node = node_at(table, node_id)
        if node.key_length:
            index_insert(&larger, hash_node(table, node), node_id)
    index_close(&table.index)
    table.index = larger
    return True


cdef inline uint64_t reserved_nodes(const Table* table) noexcept:
    """Return the number of nodes that are reserved, in segments too."""
    return table.num_reserved + (<uint64_t>table.num_segments << SEGMENT_BITS)


cdef bint extend_by_node(
    Table* table, void** array, uint64_t* room, size_t entry_bytes
) noexcept:
    return extend(array, room, reserved_nodes(table), entry_bytes, room[0])


cdef bint table_extend(Table* table, uint64_t more) noexcept:
    cdef uint64_t total = more - min(more, table.num_freed) + table.num_used
    cdef uint64_t room = reserved_nodes(table)
    if total > MOST_NODES:
        return False
    while room < total:
        if not add_segment(table):
            return False
        room += <uint64_t>1 << SEGMENT_BITS
    if not has_room(table, more) and not grow_index(table, table.num_keys + more):
        return False
    if total > table.num_ready:
        make_ready(table, min(max(total, <uint64_t>table.num_ready + READY_STEP), room))
    return True


cdef void table_clear(Table* table) noexcept:
    cdef uint32_t node_id
    cdef Node* node
    # Emptying the whole index touches all of it; removing key by key touches only used buckets.
    cdef bint whole = table.num_keys * 4 > table.index.num_buckets
    cdef bint exported = table.num_retired > 0
    if whole:
        index_clear(&table.index)
    for node_id in range(table.num_used):
        node = node_at(table, node_id)
        if node.key_length:
            if not whole:
                index_remove(&table.index, hash_node(table, node), node_id)
            if node.key_length == LONG_KEY:
                free_long_key(node)
            exported = exported or is_exported(table, node_id, node)
            retire_or_give(table, node_id, node)
    table.num_keys = 0
    table.version += 1
    if not exported:
        # Nodes are handed out in order again, so that chains get successive ones.
        table.num_used = 0
        table.num_freed = 0
        table.free_head = NIL


cdef void table_new_epoch(Table* table) noexcept:
    cdef uint32_t node_id
    if table.epoch == <uint32_t>0xFFFFFFFF:
        for node_id in range(table.num_used):
            node_at(table, node_id).block.mark = 0
        table.epoch = 0
    table.epoch += 1


cdef void table_sample(Table* table, uint32_t below) noexcept:
    cdef uint32_t node_id
    cdef Node* node
    table.sample_below = below
    for node_id in range(table.num_used):
        node = node_at(table, node_id)
        node.flags &= <uint8_t>(~SAMPLED & 0xFF)
        if node.key_length and sample_of(hash_node(table, node)) < below:
            node.flags |= SAMPLED


cdef bint keep_id(Table* table, uint32_t node_id) noexcept:
    cdef Node* node = node_at(table, node_id)
    if node.flags & SHOWN:
        return True
    # Reserved: only memory of shown nodes is touched.
    if not extend(
        <void**>&table.kept,
        &table.num_kept,
        reserved_nodes(table),
        sizeof(Kept),
        min(table.num_kept, <uint64_t>table.num_used),
    ):
        return False
    table.kept[node_id] = Kept(node.block.block_id, False)
    node.flags |= SHOWN
    return True


cdef bint store_long_key(Node* node, const uint8_t* key, uint64_t length) noexcept:
    cdef uint8_t* copy = <uint8_t*>resize(NULL, length)
    if copy == NULL:
        return False
    memcpy(copy, key, length)
    memcpy(node.key + 4, &copy, sizeof(copy))
    memcpy(node.key + 12, &length, sizeof(length))
    node.key_length = LONG_KEY
    return True


cdef void free_long_key(Node* node) noexcept:
    cdef uint8_t* address
    memcpy(&address, node.key + 4, sizeof(address))
    discard(address)
    node.key_length = 0


cdef const char* table_check(Table* table) noexcept:
    cdef uint64_t keys = 0, retired = 0, freed = 0, passed = 0, length, hashed
    cdef uint32_t node_id
    cdef const uint8_t* key
    cdef Node* node
    for node_id in range(table.num_used):
        node = node_at(table, node_id)
        if node.key_length:
            keys += 1
            key = key_bytes(node, &length)
            hashed = hash_key(table, key, length)
            passed += index_distance(&table.index, hashed, node_id)
            if index_find(table, key, length, hashed) != node_id:
                return b"the index finds every key at its node"
            if (node.flags & RESIDENT) == 0 and node.block.block_id != -1:
                return b"a node without a block has block_id -1"
            if (node.flags & RESIDENT) and node.block.ref_cnt < -1:
                return b"ref_cnt is -1 or more"
        elif node.flags & SHOWN:
            retired += 1
    node_id = table.free_head
    while node_id != NIL and freed <= table.num_used:
        freed += 1
        node_id = node_at(table, node_id).next
    if keys != table.num_keys:
        return b"the keys are counted"
    if retired != table.num_retired:
        return b"retired nodes are counted"
    if freed != table.num_freed or freed + keys + retired != table.num_used:
        return b"every node is in use, free or retired"
    return index_check(&table.index, keys, passed)


cdef class Storage:
    """The owner of a table; every BlockStatus of the table keeps it alive."""

    def __cinit__(self):
        self.exports = {}
        self.statuses = {}

    def __dealloc__(self):
        table_close(&self.table)

    cdef int open(self, uint64_t num_nodes) except -1:
        cdef bytes secret = os.urandom(sizeof(self.table.secret))
        cdef const char* words = secret
        if not table_open(&self.table, num_nodes):
            raise MemoryError(f"no room for {num_nodes} nodes of {sizeof(Node)} bytes")
        memcpy(self.table.secret, words, sizeof(self.table.secret))
        return 0

    cdef object export(self, uint32_t node_id):
        """Return the BlockStatus that lies on the node's block and keeps the storage alive."""
        known = self.statuses.get(node_id)
        status = None if known is None else known()
        if status is None:
            status = BlockStatus.from_buffer(StatusBuffer(self, node_id))
            self.statuses[node_id] = weakref.ref(status)
        return status


@cython.final
@cython.no_gc
cdef class StatusBuffer:
    """The 16 bytes of a block, lent to a BlockStatus; it keeps the node until that is deleted."""

    def __cinit__(self, Storage storage not None, uint32_t node_id):
        if node_id >= storage.table.num_used:
            raise ValueError(f"node_id must name a node in use, got {node_id}")
        if not keep_id(&storage.table, node_id):
            raise MemoryError()
        # The count comes first: if it runs out of memory, the node is not marked.
        storage.exports[node_id] = storage.exports.get(node_id, 0) + 1
        self.storage = storage
        self.node_id = node_id
        storage.table.kept[node_id].is_exported = True

    def __dealloc__(self):
        cdef Node* node
        cdef Table* table
        if self.storage is None:
            return
        count = self.storage.exports.pop(self.node_id) - 1
        if count:
            self.storage.exports[self.node_id] = count
            return
        self.storage.statuses.pop(self.node_id, None)
        table = &self.storage.table
        node = node_at(table, self.node_id)
        table.kept[self.node_id].is_exported = False
        if node.key_length == 0:
            table.num_retired -= 1
            give_node(table, self.node_id, node)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        self.shape[0] = sizeof(Block)
        self.strides[0] = 1
        buffer.buf = <void*>&node_at(&self.storage.table, self.node_id).block
        buffer.format = BYTES_FORMAT if flags & PyBUF_FORMAT else NULL
        buffer.internal = NULL
        buffer.itemsize = 1
        buffer.len = sizeof(Block)
        buffer.ndim = 1
        buffer.obj = self
        buffer.readonly = 0
        buffer.shape = self.shape if flags & PyBUF_ND else NULL
        buffer.strides = self.strides if flags & PyBUF_STRIDES else NULL
        buffer.suboffsets = NULL
