# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A loop in C that does only what a manager with these nodes and this hash cannot avoid.

A hit costs the hash of its key, the search in the index and a move to the recent end of a list; a
miss the removal of the oldest node's key and the insertion of its own instead.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from kvoffload._core.batch cimport (
    GROUP,
    Batch,
    batch_close,
    batch_ensure,
    batch_open,
    find_hashed,
    item_key,
    item_length,
)
from kvoffload._core.ring cimport (
    Ring,
    ring_append,
    ring_close,
    ring_fetch_ahead,
    ring_open,
    ring_remove,
    ring_renew,
)
from kvoffload._core.table cimport (
    NIL,
    Node,
    Storage,
    Table,
    add_key,
    drop_hashed_key,
    hash_ahead,
    node_at,
    table_ensure,
)


cdef class Loop:
    """A full list of keys."""

    cdef Storage storage
    cdef Ring ring
    cdef Batch batch
    cdef uint64_t most

    def __cinit__(self, uint64_t most):
        memset(&self.batch, 0, sizeof(Batch))
        ring_open(&self.ring, 1)
        self.most = most
        self.storage = Storage()
        self.storage.open(most + 1)

    def __dealloc__(self):
        batch_close(&self.batch)
        ring_close(&self.ring)

    def serve(self, list keys):
        """Find each key, last key first; insert those that are absent in place of the oldest."""
        cdef Table* table = &self.storage.table
        cdef Py_ssize_t index, size = len(keys)
        cdef uint64_t missing = 0
        cdef uint32_t node_id
        batch_open(&self.batch, keys)
        if not batch_ensure(&self.batch, size) or not table_ensure(table, <uint64_t>size):
            raise MemoryError()
        find_hashed(table, &self.batch)
        for index in range(size):
            missing += self.batch.node_ids[index] == NIL
        while missing and self.ring.size + missing > self.most:
            missing -= self.drop_oldest(min(missing, <uint64_t>GROUP))
        for index in reversed(range(size)):
            node_id = self.batch.node_ids[index]
            if node_id != NIL:
                ring_renew(table, &self.ring, node_id, node_at(table, node_id))
                continue
            node_id = add_key(
                table,
                item_key(&self.batch, index),
                item_length(&self.batch, index),
                self.batch.hashes[index],
            )
            ring_append(table, &self.ring, node_id, node_at(table, node_id))

    cdef uint64_t drop_oldest(self, uint64_t count) noexcept:
        """Drop the oldest keys, at most GROUP, with their cache misses overlapped."""
        cdef Table* table = &self.storage.table
        cdef uint32_t[GROUP] node_ids
        cdef uint64_t[GROUP] hashes
        cdef uint64_t index
        cdef Node* node
        for index in range(count):
            node_ids[index] = self.ring.oldest
            node = node_at(table, node_ids[index])
            ring_fetch_ahead(table, node_ids[index], node.next)
            hashes[index] = hash_ahead(table, node)
            ring_remove(table, &self.ring, node)
        for index in range(count):
            drop_hashed_key(table, node_ids[index], node_at(table, node_ids[index]), hashes[index])
        return count
