"""The base of compiled policies: the public methods, over C structures.

See ``_twin_py`` for the Python twin, ``_core`` for the structures.
"""

cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t
from libc.string cimport memset

from kvoffload._core.batch cimport batch_close, batch_open, checked_list, find_all
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.ring cimport (
    ring_check,
    ring_clear,
    ring_close,
    ring_list,
    ring_node_ids,
    ring_open,
    ring_remove,
    ring_unpark,
)
from kvoffload._core.table cimport (
    NIL,
    RESIDENT,
    Block,
    add_key,
    drop_hashed_key,
    drop_key,
    hash_key,
    index_find,
    hash_ahead,
    key_bytes,
    node_at,
    table_check,
    table_clear,
    table_ensure,
    table_new_epoch,
)
from kvoffload._core.victims cimport (
    evictable,
    victims_cancel,
    victims_close,
    victims_open,
    victims_settle,
    victims_take,
)
from kvoffload.policies._released_c cimport (
    released_add,
    released_clear,
    released_close,
    released_ensure,
    released_next,
    released_remove,
)

import numpy as np

from kvoffload._checks import (
    as_batch,
    check_bool,
    check_cache_capacity,
    check_hash,
    check_hints,
    check_int,
    check_status,
)
from kvoffload.errors import (
    block_already_resident,
    block_not_found,
    cannot_pickle,
    not_initialised,
    policy_owned,
)
from kvoffload.policies.base import CachePolicy
from kvoffload.types import BLOCK_DTYPE, BlockStatus, Hints

cnp.import_array()

# Nodes beyond the capacity, for keys of a batch that is not stored yet.
cdef enum:
    SPARE_NODES = 1024


cdef uint32_t find_key(CompiledPolicy policy, bytes block_hash) noexcept:
    cdef const uint8_t* key = <const uint8_t*>PyBytes_AS_STRING(block_hash)
    cdef uint64_t length = <uint64_t>PyBytes_GET_SIZE(block_hash)
    return index_find(policy.table, key, length, hash_key(policy.table, key, length))


cdef object new_status = BlockStatus.__new__


cdef bytes key_of(Node* node):
    cdef uint64_t length
    cdef const uint8_t* key = key_bytes(node, &length)
    return PyBytes_FromStringAndSize(<const char*>key, <Py_ssize_t>length)


cdef class CollectorOff:
    """While this object lives, the collector is off, so that no Python code runs in a call."""

    def __cinit__(self):
        self.collecting = PyGC_Disable()

    def __dealloc__(self):
        if self.collecting:
            PyGC_Enable()


cdef class CompiledPolicy:
    """The public contract over the C functions of a compiled twin."""

    def __cinit__(self):
        victims_open(&self.victims)

    def __dealloc__(self):
        cdef int ring_index
        for ring_index in range(self.num_rings):
            ring_close(&self.rings[ring_index])
        victims_close(&self.victims)
        released_close(&self.released)
        batch_close(&self.batch)

    def __reduce__(self):
        raise cannot_pickle(self)

    cdef int set_up(self, object cache_capacity, int nodes_a_block, int num_rings) except -1:
        cdef int64_t capacity = check_cache_capacity(cache_capacity)
        cdef Storage storage = Storage()
        cdef int ring_index
        cdef uint64_t num_nodes = <uint64_t>capacity * nodes_a_block + SPARE_NODES
        storage.open(min(num_nodes, <uint64_t>0xFFFFFFFE))
        if self.owner != NULL:
            raise policy_owned("__init__")
        self.table = NULL
        self.was_owned = False
        for ring_index in range(self.num_rings):
            ring_close(&self.rings[ring_index])
        for ring_index in range(num_rings):
            ring_open(&self.rings[ring_index], <uint8_t>(ring_index + 1))
        self.num_rings = num_rings
        self.storage = storage
        self.capacity = capacity
        self.num_resident = 0
        released_clear(&self.released)
        self.victims.managed = False
        return 0

    cdef void publish(self) noexcept:
        self.table = &self.storage.table

    cdef int require_ready(self) except -1:
        if self.table == NULL:
            raise not_initialised("policy")
        return 0

    def _require_ready(self):
        """Raise RuntimeError if the constructor has not completed."""
        self.require_ready()

    cdef int require_free(self, str call) except -1:
        self.require_ready()  # code of the arguments may have initialised it again
        if self.owner != NULL:
            raise policy_owned(call)
        return self.stand_alone() if self.was_owned else 0

    cdef void join_manager(self, void* manager) noexcept:
        # It is empty, so nothing is parked from a former manager.
        self.owner = manager
        self.was_owned = False
        self.victims.managed = True

    cdef void leave_manager(self, void* manager) noexcept:
        # Blocks stay parked until the next change of the policy: this may be a deallocation.
        if self.owner == manager:
            self.owner = NULL
            self.was_owned = True

    cdef int stand_alone(self) except -1:
        """Become a policy used alone: unpark every block at its position."""
        cdef int ring_index
        cdef CollectorOff held = CollectorOff()
        cdef list orders = [self.c_node_ids(ring_index) for ring_index in range(self.num_rings)]
        for ring_index in range(self.num_rings):
            ring_unpark(self.table, &self.rings[ring_index], orders[ring_index])
        self.c_unparked()
        self.victims.managed = False
        self.was_owned = False
        return 0

    cdef list open_batch(self, object hashes, str name, str call):
        """Return the batch as a checked list, which the scratch arrays point into.

        Raises PolicyError if a manager owns the policy, which `call` would change.
        """
        cdef list batch
        self.require_ready()
        batch = checked_list(hashes, name)
        self.require_free(call)
        batch_open(&self.batch, batch)
        return batch

    cdef bint c_ensure(self, uint64_t more) noexcept:
        """Reserve `more` nodes, and one for each status that is held."""
        return table_ensure(self.table, more + <uint64_t>len(self.storage.exports))

    # -- the public contract -----------------------------------------------------------------

    @property
    def cache_capacity(self):
        """Number of blocks that the manager has room for."""
        self.require_ready()
        return self.capacity

    def get(self, block_hash):
        """Return the live status of a resident block, or None."""
        self.require_ready()
        cdef bytes key = check_hash(block_hash)
        cdef uint32_t node_id
        # So that the block stays on its node.
        cdef CollectorOff held = CollectorOff()
        self.require_ready()  # the check is Python code: another thread may have run
        node_id = find_key(self, key)
        if node_id != NIL and node_at(self.table, node_id).flags & RESIDENT:
            return self.storage.export(node_id)
        return None

    def insert(self, block_hash, status):
        """Make a block resident, as the most recent of those inserted."""
        self.require_ready()
        cdef bytes key = check_hash(block_hash)
        check_status(status)
        cdef int32_t ref_cnt = status.ref_cnt
        cdef int64_t block_id = status.block_id
        cdef const uint8_t* address = <const uint8_t*>PyBytes_AS_STRING(key)
        cdef uint64_t length = <uint64_t>len(key)
        cdef uint32_t node_id
        cdef Node* node
        self.require_free("insert")
        node_id = find_key(self, key)
        if node_id == NIL and self.c_ensure(1):
            node_id = add_key(self.table, address, length, hash_key(self.table, address, length))
        if node_id == NIL:
            raise MemoryError()
        node = node_at(self.table, node_id)
        if node.flags & RESIDENT:
            raise block_already_resident("insert", key)
        # Marks of earlier batches mean nothing to this insert.
        table_new_epoch(self.table)
        node.block.ref_cnt = ref_cnt
        node.block.block_id = block_id
        node.flags |= RESIDENT
        self.num_resident += 1
        self.c_insert(node_id, node)

    def remove(self, block_hash):
        """Drop a resident block without remembering it."""
        self.require_ready()
        cdef bytes key = check_hash(block_hash)
        cdef uint32_t node_id
        cdef Node* node
        self.require_free("remove")
        node_id = find_key(self, key)
        if node_id == NIL or not node_at(self.table, node_id).flags & RESIDENT:
            raise block_not_found("remove", block_hash)
        node = node_at(self.table, node_id)
        self.c_removed(node_id, node)
        self.take_off(node_id, node)
        drop_key(self.table, node_id, node)

    def touch(self, hashes):
        """Mark blocks as recently used, last hash first."""
        cdef list batch = self.open_batch(hashes, "hashes", "touch")
        find_all(self.table, &self.batch)
        self.touch_batch(&self.batch)

    def release(self, hashes):
        """Evict blocks before all others, until they are used again."""
        cdef list batch = self.open_batch(hashes, "hashes", "release")
        find_all(self.table, &self.batch)
        if not self.ensure_release(self.batch.size):
            raise MemoryError()
        self.c_release(&self.batch, 0)

    def _extend_alone(self, hashes):
        """Touch blocks that extend a request, without beginning a new request."""
        cdef list batch = self.open_batch(hashes, "hashes", "touch")
        find_all(self.table, &self.batch)
        self.extend_request(&self.batch)

    cdef int finish_alone(self, object hashes) except -1:
        """Implement `finished` for a policy that counts uses."""
        cdef list batch = self.open_batch(hashes, "hashes", "finished")
        find_all(self.table, &self.batch)
        self.finish_request(&self.batch, NULL)
        return 0

    def evict(self, n, protected):
        """Evict exactly `n` idle blocks that are not protected, or none."""
        self.require_ready()
        cdef int64_t count = check_int("n", n, 0)
        cdef list batch = self.open_batch(protected, "protected", "evict")
        # Until the victims are gone.
        cdef CollectorOff held = CollectorOff()
        if count == 0:
            return []
        if <uint64_t>count > self.num_resident:
            return None
        if not self.c_ensure(0):
            raise MemoryError()
        self.mark_protected()
        self.victims.no_memory = False
        if self.c_search(<uint64_t>count):
            return self.let_go()
        if self.victims.no_memory:
            raise MemoryError()
        return None

    def make_room(self, hashes, num_free, protected):
        """Decide how many of `hashes` to store, and evict for them."""
        self.require_ready()
        batch = as_batch(hashes)
        num_free = check_int("num_free", num_free, 0)
        self.require_free("make_room")
        return CachePolicy.make_room(self, batch, num_free, protected)

    def set_declining(self, allowed):
        """Allow or forbid the policy to decline blocks that it could make room for."""
        self.require_ready()
        check_bool("allowed", allowed)

    def clear(self):
        """Drop every block, ghost and adaptive state."""
        self.require_ready()
        self.require_free("clear")
        self.clear_now()

    cdef void clear_now(self) noexcept:
        cdef int ring_index
        for ring_index in range(self.num_rings):
            ring_clear(&self.rings[ring_index])
        released_clear(&self.released)
        table_clear(self.table)
        self.num_resident = 0
        self.c_clear()

    def __len__(self):
        """Return the number of resident blocks."""
        self.require_ready()
        return self.num_resident

    @property
    def num_ghosts(self):
        """Number of hashes remembered after eviction."""
        self.require_ready()
        return self.c_num_ghosts()

    @property
    def num_released(self):
        """Number of released blocks, which leave before all others."""
        self.require_ready()
        return self.released.count

    @property
    def block_table(self):
        """Statuses as a read-only structured array, ``(n,)`` for n resident blocks, in no order.

        The array is a snapshot and does not show later changes.
        """
        self.require_ready()
        cdef CollectorOff held = CollectorOff()
        cdef cnp.ndarray rows = np.zeros(self.num_resident, BLOCK_DTYPE)
        cdef Block* row
        cdef uint32_t node_id
        cdef Node* node
        while <uint64_t>len(rows) != self.num_resident:  # threads may run as numpy allocates
            rows = np.zeros(self.num_resident, BLOCK_DTYPE)
        self.require_ready()
        row = <Block*>cnp.PyArray_DATA(rows)
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.flags & RESIDENT:
                row.ref_cnt = node.block.ref_cnt
                row.block_id = node.block.block_id
                row += 1
        rows.setflags(write=False)
        return rows

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        cdef const char* broken
        self.require_ready()
        if self.was_owned:  # anyone may have written to its statuses meanwhile
            self.stand_alone()
        broken = self.find_broken()
        if broken != NULL:
            raise AssertionError((<bytes>broken).decode())

    cdef const char* find_broken(self) noexcept:
        """Return the first invariant that does not hold, or NULL."""
        cdef const char* broken = table_check(self.table)
        cdef uint64_t resident = 0
        cdef uint32_t node_id
        cdef int ring_index
        cdef Node* node
        for ring_index in range(self.num_rings):
            broken = broken or ring_check(self.table, &self.rings[ring_index])
        broken = broken or self.c_check() or self.check_released()
        if broken != NULL:
            return broken
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.flags & RESIDENT:
                resident += 1
            elif node.key_length and node.ring == 0:
                return b"a key without a block is a ghost on a ring"
        if resident != self.num_resident:
            return b"resident blocks are counted"
        if self.victims.size or self.victims.num_aside:
            return b"no search for victims is open"
        return NULL

    # -- for the views -----------------------------------------------------------------------

    def _ring_length(self, int ring_index):
        """Return the number of keys on a ring, from 0."""
        self.require_ring(ring_index)
        return self.rings[ring_index].size

    def _ring_keys(self, int ring_index):
        """Return the keys of a ring, from 0, least recent first."""
        self.require_ring(ring_index)
        cdef CollectorOff held = CollectorOff()
        return [key_of(node_at(self.table, node_id)) for node_id in self.c_node_ids(ring_index)]

    def _ring_holds(self, int ring_index, block_hash):
        """Return whether a key is on a ring, from 0."""
        cdef uint32_t node_id
        self.require_ring(ring_index)
        if type(block_hash) is not bytes or not block_hash:
            return False
        node_id = find_key(self, block_hash)
        return node_id != NIL and node_at(self.table, node_id).ring == ring_index + 1

    cdef int require_ring(self, int ring_index) except -1:
        self.require_ready()
        if not 0 <= ring_index < self.num_rings:
            raise IndexError(f"the policy has no ring {ring_index}")
        return 0

    # -- what policies share -----------------------------------------------------------------

    cdef void mark_protected(self) noexcept:
        """Mark the resident blocks of the batch: they stay in the search that follows."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        table_new_epoch(self.table)
        find_all(self.table, &self.batch)
        for index in range(self.batch.size):
            node_id = self.batch.node_ids[index]
            if node_id != NIL and node_at(self.table, node_id).flags & RESIDENT:
                node_at(self.table, node_id).block.mark = self.table.epoch

    cdef list let_go(self):
        """Evict the victims and return them with copies of their statuses."""
        cdef Node* node
        cdef uint64_t index
        cdef list evicted = []
        try:
            for index in range(self.victims.size):
                node = node_at(self.table, self.victims.items[index].node_id)
                # Not by the constructor: another thread may run while Python code does.
                status = new_status(BlockStatus)
                status.block_id = node.block.block_id
                status.ref_cnt = node.block.ref_cnt
                evicted.append((key_of(node), status))
        except BaseException:
            self.cancel()
            raise
        self.commit()
        return evicted

    cdef void commit(self) noexcept:
        """Evict all victims."""
        cdef uint64_t index
        for index in range(self.victims.size):
            self.c_evicted(&self.victims.items[index])
        self.victims.size = 0
        victims_settle(&self.victims, self.table)
        self.c_settled()

    cdef void take_off(self, uint32_t node_id, Node* node) noexcept:
        """Remove a resident node from its ring; the caller drops its key or its block."""
        released_remove(&self.released, node_id)
        ring_remove(self.table, &self.rings[node.ring - 1], node)
        self.num_resident -= 1

    cdef void became_idle(self, uint32_t node_id, Node* node) noexcept:
        """Tell the ring of a parked node that it may leave again."""
        ring_list(self.table, &self.rings[node.ring - 1], node_id, node)

    cdef int64_t c_make_room(self, Batch* batch, int64_t n, int64_t num_free) noexcept:
        if n <= num_free:
            return n
        return n if self.c_search(<uint64_t>(n - num_free)) else -1

    cdef void cancel(self) noexcept:
        victims_cancel(&self.victims, self.table)

    cdef void c_touch(self, Batch* batch) noexcept:
        pass

    cdef void c_extended(self, Batch* batch) noexcept:
        self.c_touch(batch)

    cdef void c_begun(self, Batch* batch, const Hint* hint) noexcept:
        self.c_touch(batch)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        self.c_touch(batch)

    cdef int c_source(self, str source) except -1:
        return 0

    cdef const Hint* hint_of(self, object hints, Hint* hint, bint is_second=False) except? NULL:
        if hints is None:
            return NULL
        if type(hints) is not Hints:  # managers have checked; a policy used alone has not
            check_hints(hints)
        memset(hint, 0, sizeof(Hint))
        hint.ends = hints.ends is True
        if hints.expect_s is not None:
            hint.expect_s = hints.expect_s
            hint.source = self.c_source(str(hints.source))
        return hint

    # -- released blocks ---------------------------------------------------------------------

    cdef void take_back(self, Batch* batch) noexcept:
        cdef Py_ssize_t index
        if self.released.count:
            for index in range(batch.size):
                if batch.node_ids[index] != NIL:
                    released_remove(&self.released, batch.node_ids[index])

    cdef void touch_batch(self, Batch* batch) noexcept:
        self.take_back(batch)
        self.c_touch(batch)

    cdef void begin_request(self, Batch* batch, const Hint* hint) noexcept:
        self.take_back(batch)
        self.c_begun(batch, hint)

    cdef void extend_request(self, Batch* batch) noexcept:
        self.take_back(batch)
        self.c_extended(batch)

    cdef void finish_request(self, Batch* batch, const Hint* hint) noexcept:
        self.take_back(batch)
        self.c_finished(batch, hint)

    cdef bint ensure_release(self, Py_ssize_t n) noexcept:
        return released_ensure(&self.released, self.table.num_used + <uint64_t>n)

    cdef void c_release(self, Batch* batch, uint8_t kept) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id != NIL and node_at(self.table, node_id).flags & (RESIDENT | kept) == RESIDENT:
                released_add(&self.released, node_id)

    cdef uint64_t count_released(self, uint64_t most) noexcept:
        cdef uint64_t found = 0
        cdef uint32_t node_id = released_next(&self.released, NIL)
        while found < most and node_id != NIL:
            found += evictable(self.table, node_at(self.table, node_id))
            node_id = released_next(&self.released, node_id)
        return found

    cdef bint take_released(self, uint64_t n) noexcept:
        cdef uint32_t node_id = released_next(&self.released, NIL)
        cdef Node* node
        while self.victims.size < n and node_id != NIL:
            node = node_at(self.table, node_id)
            if evictable(self.table, node) and not self.take_one(node_id, node):
                return False
            node_id = released_next(&self.released, node_id)
        return True

    cdef bint take_one(self, uint32_t node_id, Node* node) noexcept:
        cdef Ring* ring = &self.rings[node.ring - 1] if node.ring else NULL
        if not victims_take(&self.victims, self.table, ring, node_id):
            return False
        self.victims.items[self.victims.size - 1].hashed = hash_ahead(self.table, node)
        return True

    cdef int64_t c_make_room_of_released(
        self, Batch* batch, int64_t n, int64_t num_free
    ) noexcept:
        cdef int64_t shortfall = max(n - num_free, 0)
        cdef uint64_t num_victims = self.count_released(<uint64_t>shortfall)
        if num_victims and not self.c_search(num_victims):
            return -1
        return min(n, num_free + <int64_t>num_victims)

    cdef const char* check_released(self) noexcept:
        cdef uint64_t count = 0
        cdef uint32_t node_id = released_next(&self.released, NIL)
        while node_id != NIL:
            count += 1
            if not node_at(self.table, node_id).flags & RESIDENT:
                return b"released blocks are resident"
            node_id = released_next(&self.released, node_id)
        if count != self.released.count:
            return b"released blocks are counted"
        return NULL

    cdef void c_park(self, uint64_t most) noexcept:
        pass

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        pass

    cdef bint c_search(self, uint64_t n) noexcept:
        return False

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, victim.hashed)

    cdef void c_removed(self, uint32_t node_id, Node* node) noexcept:
        pass

    cdef void c_settled(self) noexcept:
        pass

    cdef uint64_t c_num_ghosts(self) noexcept:
        return 0

    cdef void c_clear(self) noexcept:
        pass

    cdef void c_unparked(self) noexcept:
        pass

    cdef const char* c_check(self) noexcept:
        return NULL

    cdef list c_node_ids(self, int ring_index):
        return ring_node_ids(self.table, &self.rings[ring_index])
