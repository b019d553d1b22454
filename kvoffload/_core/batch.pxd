"""The hashes of one call, and the nodes that hold them.

Structure
    ``items`` are borrowed from the caller's list, which the caller of these functions keeps alive
    and unchanged: no Python code runs between `batch_open` and the last use.
Cost
    A key is guessed before it is searched: a guess compares the whole key and, if right, saves the
    hash and the bucket. Consecutive calls of an engine ask about the same blocks, so the node that
    the previous call found at this position is tried first. Consecutive hashes of a request usually
    have successive nodes, since they were stored in order, so the node after the last hit comes
    next. If both fail, a group of keys goes through the index together, with prefetches between the
    steps, before guesses are made again. The first key of a batch goes alone, so that the others
    may follow it in a run.
"""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvoffload._core.index cimport NIL, index_approach, index_first, kvo_prefetch
from kvoffload._core.table cimport (
    Node,
    Table,
    hash_key,
    holds_key,
    index_find,
    node_at,
)

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(PyObject*) nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject*) nogil

cdef struct Batch:
    PyObject** items        # (size,) borrowed bytes objects
    uint64_t* hashes        # (size,) hash of each key without a node; others may have theirs
    uint32_t* node_ids      # (size,) node of each key, NIL if unknown; before: the last call's
    uint32_t* chosen        # (size,) room for a selection of node ids
    uint32_t* indexes       # (size,) room for the indexes in the batch of a selection
    uint32_t* drawn         # (size,) room for the bits by which a policy draws samples
    Py_ssize_t size
    Py_ssize_t num_hints    # leading node ids that the last call left
    Py_ssize_t num_chosen   # leading entries of `chosen` that are in use
    Py_ssize_t room         # of the five arrays
    uint64_t found_at       # the table's version for which `node_ids` are valid; 0: none

cdef enum:
    GROUP = 64              # keys that go through the index together, or nodes fetched ahead

cdef extern from *:
    """
    #define KVO_BACKWARDS UINT32_MAX
    """
    const uint32_t BACKWARDS "KVO_BACKWARDS"  # stride -1

# Make room for `size` hashes; False, with nothing changed, if there is no memory.
cdef bint batch_ensure(Batch* batch, Py_ssize_t size) noexcept
# Make room for exactly `size` hashes and keep the contents, for a batch that outlives a call.
cdef bint batch_fit(Batch* batch, Py_ssize_t size) noexcept
cdef void batch_close(Batch* batch) noexcept
# Append the keys of another batch, which are at the end of `items`, with the nodes found for them.
# The caller has made room.
cdef void batch_extend(Batch* batch, PyObject** items, const Batch* more) noexcept
# Consume an iterable of hashes and return a list of checked elements; a list is not copied.
cdef list checked_list(object hashes, str name)
# Point to the hashes of a list, which the caller keeps; MemoryError, with nothing changed.
cdef int batch_open(Batch* batch, list hashes) except -1


cdef inline void batch_set(Batch* batch, PyObject** items, Py_ssize_t size) noexcept nogil:
    """Point to the hashes of a call; the nodes found in the last call remain as hints."""
    batch.num_hints = batch.size
    batch.items = items
    batch.size = size
    batch.found_at = 0


cdef inline Batch batch_part(const Batch* batch, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Return a slice as a batch that shares the arrays, with the nodes found for its keys.

    It may be used until the other grows. Only one of the two has a selection at a time.
    """
    cdef Batch part = batch[0]
    part.items = batch.items + start
    part.hashes = batch.hashes + start
    part.node_ids = batch.node_ids + start
    part.size = part.num_hints = stop - start
    return part


cdef inline void hint_chosen(Batch* batch, const Batch* chooser) noexcept nogil:
    """Use the selection of an earlier call with the same number of keys as hints."""
    if batch.size and chooser.num_chosen == batch.size:  # arrays of no size are null
        memcpy(batch.node_ids, chooser.chosen, <size_t>batch.size * sizeof(uint32_t))
        batch.num_hints = batch.size


cdef inline void hint_found(Batch* batch, const Batch* finder) noexcept nogil:
    """Use the nodes that another batch has found as hints, as far as there is room."""
    cdef Py_ssize_t size = min(batch.room, finder.size)
    if size:
        memcpy(batch.node_ids, finder.node_ids, <size_t>size * sizeof(uint32_t))
    batch.num_hints = size


cdef inline void hint_first(Table* table, Batch* batch, uint32_t node_id) noexcept nogil:
    """Use a node as the hint of the first key, unless the last call's is right."""
    if batch.size and find_again(table, batch, 0, 1) == 0:
        batch.node_ids[0] = node_id
        batch.num_hints = 1


cdef inline const uint8_t* item_key(const Batch* batch, Py_ssize_t index) noexcept nogil:
    return <const uint8_t*>PyBytes_AS_STRING(batch.items[index])


cdef inline uint64_t item_length(const Batch* batch, Py_ssize_t index) noexcept nogil:
    return <uint64_t>PyBytes_GET_SIZE(batch.items[index])


cdef inline uint64_t hash_item(Table* table, const Batch* batch, Py_ssize_t index) noexcept nogil:
    return hash_key(table, item_key(batch, index), item_length(batch, index))


cdef inline void omit_node(Table* table, Batch* batch, Py_ssize_t index) noexcept nogil:
    """Treat a key that was found as unknown."""
    batch.hashes[index] = hash_item(table, batch, index)
    batch.node_ids[index] = NIL


cdef inline bint has_flag(
    Table* table, const Batch* batch, Py_ssize_t index, uint8_t flag
) noexcept nogil:
    """Return whether the node of a key has a flag."""
    cdef uint32_t node_id = batch.node_ids[index]
    return node_id != NIL and node_at(table, node_id).flags & flag != 0


cdef inline void find_group(
    Table* table, Batch* batch, Py_ssize_t start, Py_ssize_t stop
) noexcept nogil:
    """Find up to GROUP keys with their cache misses overlapped."""
    cdef uint64_t* hashes = batch.hashes
    cdef uint32_t node_id
    cdef Py_ssize_t index
    for index in range(start, stop):
        hashes[index] = hash_item(table, batch, index)
        index_approach(&table.index, hashes[index])
    for index in range(start, stop):
        node_id = index_first(&table.index, hashes[index])
        if node_id != NIL:
            kvo_prefetch(node_at(table, node_id))
    for index in range(start, stop):
        batch.node_ids[index] = index_find(
            table, item_key(batch, index), item_length(batch, index), hashes[index]
        )


cdef inline Py_ssize_t find_again(
    Table* table, Batch* batch, Py_ssize_t start, Py_ssize_t stop
) noexcept nogil:
    """Find keys in the nodes of the last call; return the first index that differs."""
    cdef Py_ssize_t index = start
    cdef uint32_t node_id
    stop = min(stop, batch.num_hints)
    while index < stop:
        node_id = batch.node_ids[index]
        if node_id >= table.num_used or not holds_key(
            node_at(table, node_id), item_key(batch, index), item_length(batch, index)
        ):
            break
        index += 1
    return index


cdef inline Py_ssize_t find_run(
    Table* table, Batch* batch, Py_ssize_t start, Py_ssize_t stop, uint32_t last, uint32_t stride
) noexcept nogil:
    """Find keys in successive nodes; return the index of the first that is not found."""
    cdef uint32_t node_id = last + stride
    cdef Py_ssize_t index = start
    # Below 0 the id wraps around, far above num_used.
    while (
        index < stop
        and node_id < table.num_used
        and holds_key(node_at(table, node_id), item_key(batch, index), item_length(batch, index))
    ):
        # Beyond the last node the address is wrong, and a prefetch of it does nothing.
        kvo_prefetch(table.nodes + <uint32_t>(node_id + GROUP * stride))
        batch.node_ids[index] = node_id
        node_id += stride
        index += 1
    return index


cdef inline void find_range(
    Table* table, Batch* batch, Py_ssize_t start, Py_ssize_t stop
) noexcept nogil:
    """Find the keys from index `start` to `stop`; those before `start` are found."""
    cdef Py_ssize_t index = start
    cdef Py_ssize_t end
    cdef uint32_t last, ahead, stride = 1
    while index < stop:
        index = find_again(table, batch, index, stop)
        if index == stop:
            return
        last = batch.node_ids[index - 1] if index else NIL
        if last != NIL:
            # A chain whose nodes were freed head first has its nodes in reverse order.
            if index > 1:
                stride = BACKWARDS if last - batch.node_ids[index - 2] == BACKWARDS else 1
            else:
                for ahead in range(1, <uint32_t>min(GROUP, stop)):
                    kvo_prefetch(table.nodes + <uint32_t>(last + ahead))
            index = find_run(table, batch, index, stop, last, stride)
            if index == stop:
                return
        end = min(index + (GROUP if index else 1), stop)
        find_group(table, batch, index, end)
        index = end


cdef inline void find_all(Table* table, Batch* batch) noexcept nogil:
    """Find the node of every key of the batch."""
    find_range(table, batch, 0, batch.size)


cdef inline void find_changed(Table* table, Batch* batch) noexcept nogil:
    """Find the node of every key again, unless no key of the table has changed since."""
    if batch.found_at != table.version:
        find_range(table, batch, 0, batch.size)
        batch.num_hints = batch.size
        batch.found_at = table.version


cdef inline void find_hashed(Table* table, Batch* batch) noexcept nogil:
    """Find the node of every key through the index, and keep the hashes."""
    cdef Py_ssize_t start = 0
    while start < batch.size:
        find_group(table, batch, start, min(start + GROUP, batch.size))
        start += GROUP
    batch.num_hints = batch.size
    batch.found_at = table.version
