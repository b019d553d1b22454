"""Policies that keep their blocks on lists, compiled: LRU, SLRU, LFU, ARC and ARC as published.

Structure
    Rings of one table: the lists of blocks, then as many of ghosts, or none. A block's count in LFU
    is its node's ``note``; a ghost's ``note`` is 1 once its return was counted. See ``_lists_py``
    for the Python twin, the policies, and the differences from their papers.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n), regardless of pinned blocks.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.ring cimport Ring, ring_append, ring_park_in_use, ring_remove, ring_renew
from kvoffload._core.table cimport (
    NIL,
    Node,
    drop_block,
    drop_hashed_key,
    hash_ahead,
    node_at,
    table_new_epoch,
)
from kvoffload._core.victims cimport (
    Cursor,
    Victim,
    victims_cancel,
    victims_find,
    victims_next,
    victims_settle,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

from kvoffload._checks import check_cache_capacity
from kvoffload.policies import registry
from kvoffload.policies._views import BlocksView, GhostsView
from kvoffload.policies.base import CachePolicy

cdef enum:
    MOST_COUNTED = 15   # by LFU
    MOST_LISTS = 16
    FORGET_GROUP = 16   # ghosts forgotten together, their cache misses overlapped

# Lists of SLRU and of ARC, from 0.
cdef enum:
    PROBATION = 0
    PROTECTED = 1
    T1 = 0
    T2 = 1
    B1 = 2
    B2 = 3


cdef class Lists(CompiledPolicy):
    """The lists of a policy, and what most of them do: to begin with, LRU."""

    cdef int open(self, object cache_capacity, int num_lists, int ghosts_a_block=0) except -1:
        self.set_up(cache_capacity, 1 + ghosts_a_block, num_lists << (ghosts_a_block > 0))
        self.num_lists = num_lists
        self.c_clear()
        self.publish()
        return 0

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        ring_append(self.table, &self.rings[0], node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t node_id
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id != NIL:
                ring_renew(self.table, &self.rings[0], node_id, node_at(self.table, node_id))

    cdef void use(self, Batch* batch) noexcept:
        cdef bint is_prefix = False
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if node.ring == PROTECTED + 1:
                ring_renew(self.table, &self.rings[PROTECTED], node_id, node)
            elif node.ring == PROBATION + 1 and (node.block.ref_cnt >= 0 or is_prefix):
                ring_remove(self.table, &self.rings[PROBATION], node)
                ring_append(self.table, &self.rings[PROTECTED], node_id, node)
            else:
                if node.ring > PROTECTED + 1:
                    self.adapt(node)
                ring_renew(self.table, &self.rings[node.ring - 1], node_id, node)
                continue
            is_prefix = self.prefix_joins

    cdef void adapt(self, Node* ghost) noexcept:
        pass

    cdef int first_list(self) noexcept:
        return 0

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef int first = self.first_list(), later
        cdef Cursor cursor
        cdef Ring* ring
        cdef Victim* victim
        if not self.take_released(n):
            victims_cancel(&self.victims, self.table)
            return False
        self.num_early = self.victims.size
        for later in range(self.num_lists):
            ring = &self.rings[(first + later) % self.num_lists]
            cursor.started = False
            while self.victims.size < n:
                if not victims_next(&self.victims, self.table, ring, &cursor):
                    break
                victim = &self.victims.items[self.victims.size - 1]
                victim.hashed = hash_ahead(self.table, node_at(self.table, victim.node_id))
            if self.victims.size == n:
                return True
            if self.victims.no_memory:
                break
        victims_cancel(&self.victims, self.table)
        return False

    cdef void c_park(self, uint64_t most) noexcept:
        cdef int index
        for index in range(self.num_lists):
            ring_park_in_use(self.table, &self.rings[index], most)

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        self.take_off(victim.node_id, node)
        drop_hashed_key(self.table, victim.node_id, node, victim.hashed)

    cdef const char* c_check(self) noexcept:
        cdef uint64_t total = 0
        cdef int index
        for index in range(self.num_lists):
            total += self.rings[index].size
        if total != self.num_resident:
            return b"resident is the union of the lists of blocks"
        return NULL


cdef class _LRU(Lists):
    @property
    def blocks(self):
        """Resident blocks and their live statuses, least recent first; read-only."""
        return BlocksView(self, 0)


cdef class _SLRU(Lists):
    cdef int64_t _protected_size    # most blocks that protected should hold

    @property
    def probation(self):
        """Blocks seen once or demoted and their live statuses, least recent first; read-only."""
        return BlocksView(self, PROBATION)

    @property
    def protected(self):
        """Blocks seen again and their live statuses, least recent first; read-only."""
        return BlocksView(self, PROTECTED)

    @property
    def protected_size(self):
        """Number of blocks that protected should hold at most."""
        self.require_ready()
        return self._protected_size

    cdef void c_touch(self, Batch* batch) noexcept:
        cdef Cursor cursor
        cdef uint32_t node_id = 0
        cdef Node* node
        self.use(batch)
        if self.rings[PROTECTED].size <= <uint64_t>self._protected_size:
            return
        cursor.started = False
        table_new_epoch(self.table)
        while self.rings[PROTECTED].size > <uint64_t>self._protected_size:
            node_id = victims_find(&self.victims, self.table, &self.rings[PROTECTED], &cursor)
            if node_id == NIL:
                break
            node = node_at(self.table, node_id)
            ring_remove(self.table, &self.rings[PROTECTED], node)
            ring_append(self.table, &self.rings[PROBATION], node_id, node)
        victims_settle(&self.victims, self.table)
        # If there was no memory to skip a block, the next touch demotes.
        self.victims.no_memory = False


cdef class _LFU(Lists):
    cdef int64_t _age       # the age L
    cdef int last           # list of the last victim that left in its turn, or that of the age

    @property
    def age(self):
        """The least priority that a block can have."""
        self.require_ready()
        return self._age

    def finished(self, hashes, hints=None):
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self.finish_alone(hashes)

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        node.note = 1
        ring_append(self.table, &self.rings[(self._age + 1) % MOST_LISTS], node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        self.set_priorities(batch, True)

    cdef void c_finished(self, Batch* batch, const Hint* hint) noexcept:
        self.set_priorities(batch, False)

    cdef void set_priorities(self, Batch* batch, bint counts) noexcept:
        """Set K of resident blocks, last key first, with a higher F if the use counts."""
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef int at
        cdef Node* node
        for index in range(batch.size - 1, -1, -1):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(self.table, node_id)
            if counts and node.block.ref_cnt >= 0 and node.note < MOST_COUNTED:
                node.note += 1
            at = (self._age + node.note) % MOST_LISTS
            if node.ring == at + 1:
                ring_renew(self.table, &self.rings[at], node_id, node)
            else:
                ring_remove(self.table, &self.rings[node.ring - 1], node)
                ring_append(self.table, &self.rings[at], node_id, node)

    cdef int first_list(self) noexcept:
        return self._age % MOST_LISTS

    cdef void c_evicted(self, const Victim* victim) noexcept:
        if <uint64_t>(victim - self.victims.items) >= self.num_early:
            self.last = node_at(self.table, victim.node_id).ring - 1
        Lists.c_evicted(self, victim)

    cdef void c_settled(self) noexcept:
        while self._age % MOST_LISTS != self.last and not self.rings[self._age % MOST_LISTS].size:
            self._age += 1
        self.last = self._age % MOST_LISTS

    cdef void c_clear(self) noexcept:
        self._age = self.last = 0

    cdef const char* c_check(self) noexcept:
        cdef uint32_t node_id
        cdef Node* node
        for node_id in range(self.table.num_used):
            node = node_at(self.table, node_id)
            if node.ring and not 1 <= node.note <= MOST_COUNTED:
                return b"F is 1 ... 15"
        return Lists.c_check(self)


cdef class _ARC(Lists):
    """The lists T1, T2, B1 and B2, and the target size of T1; vLLM's variant."""

    cdef double target      # target size of T1, in blocks: the paper's p
    cdef int newcomers      # blocks per victim that join T1, as counted by a search
    cdef bint adapts_once   # only the first touch of a ghost counts

    @property
    def t1(self):
        """Blocks seen once and their live statuses, least recent first; read-only."""
        return BlocksView(self, T1)

    @property
    def t2(self):
        """Blocks seen again and their live statuses, least recent first; read-only."""
        return BlocksView(self, T2)

    @property
    def b1(self):
        """Ghosts of T1, least recent first; read-only."""
        return GhostsView(self, B1)

    @property
    def b2(self):
        """Ghosts of T2, least recent first; read-only."""
        return GhostsView(self, B2)

    @property
    def target_t1_size(self):
        """Target size of T1 in blocks, ``0.0 ... cache_capacity``; adapts."""
        self.require_ready()
        return self.target

    def _set_target(self, double target):
        """Set the target, as a manager of vLLM can."""
        self.target = target

    cdef uint64_t c_num_ghosts(self) noexcept:
        return self.rings[B1].size + self.rings[B2].size

    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        if node.ring:
            ring_remove(self.table, &self.rings[node.ring - 1], node)
        ring_append(self.table, &self.rings[T1], node_id, node)

    cdef void c_touch(self, Batch* batch) noexcept:
        self.use(batch)

    cdef void adapt(self, Node* ghost) noexcept:
        """Raise the target for a ghost of B1 (case II), lower it for one of B2 (case III)."""
        cdef int at = ghost.ring - 1
        cdef double step
        if ghost.note:
            return
        step = <double>self.rings[B1 + B2 - at].size / <double>self.rings[at].size
        if at == B1:
            self.target = min(self.target + max(1.0, step), <double>self.capacity)
        else:
            self.target = max(self.target - max(1.0, step), 0.0)
        ghost.note = self.adapts_once

    cdef bint t1_yields(self, uint64_t t1_size) noexcept:
        """Return whether T1, at that size, yields the next victim."""
        return t1_size >= <uint64_t>self.target

    cdef bint c_search(self, uint64_t n) noexcept:
        cdef Cursor cursors[2]
        cdef uint64_t t1_size = self.rings[T1].size, index
        cdef int at
        if not self.take_released(n):
            victims_cancel(&self.victims, self.table)
            return False
        for index in range(self.victims.size):
            t1_size += self.newcomers
            t1_size -= self.victims.items[index].ring == &self.rings[T1]
        cursors[T1].started = cursors[T2].started = False
        while self.victims.size < n:
            at = T1 if self.t1_yields(t1_size) else T2
            if not victims_next(&self.victims, self.table, &self.rings[at], &cursors[at]):
                at = T1 + T2 - at
                if self.victims.no_memory or not victims_next(
                    &self.victims, self.table, &self.rings[at], &cursors[at]
                ):
                    victims_cancel(&self.victims, self.table)
                    return False
            t1_size += self.newcomers
            t1_size -= at == T1
        return True

    cdef void c_evicted(self, const Victim* victim) noexcept:
        cdef Node* node = node_at(self.table, victim.node_id)
        cdef int ghosts = B1 if node.ring == T1 + 1 else B2
        cdef uint32_t node_id
        self.take_off(victim.node_id, node)
        node_id = drop_block(self.table, victim.node_id, node)
        ring_append(self.table, &self.rings[ghosts], node_id, node_at(self.table, node_id))

    cdef void c_settled(self) noexcept:
        self.forget(&self.rings[B1], self.capacity)
        self.forget(&self.rings[B2], self.capacity)

    cdef void forget(self, Ring* ghosts, int64_t most) noexcept:
        """Forget the oldest ghosts of a list beyond `most`."""
        cdef uint64_t hashes[FORGET_GROUP]
        cdef uint64_t index, count, least = <uint64_t>max(most, 0)
        cdef uint32_t node_id
        cdef Node* node
        while ghosts.size > least:
            count = min(ghosts.size - least, <uint64_t>FORGET_GROUP)
            node_id = ghosts.oldest
            for index in range(count):
                node = node_at(self.table, node_id)
                hashes[index] = hash_ahead(self.table, node)
                node_id = node.next
            for index in range(count):
                node_id = ghosts.oldest
                node = node_at(self.table, node_id)
                ring_remove(self.table, ghosts, node)
                node.note = 0
                # A ghost of the batch at work is about to be inserted: its key stays.
                if node.block.mark != self.table.epoch:
                    drop_hashed_key(self.table, node_id, node, hashes[index])

    cdef void c_clear(self) noexcept:
        self.target = 0.0

    cdef const char* c_check(self) noexcept:
        cdef uint64_t before = self.c_num_ghosts()
        if not 0.0 <= self.target <= <double>self.capacity:
            return b"the target is within the capacity"
        self.c_settled()
        if before != self.c_num_ghosts():
            return b"the ghosts are within their bounds"
        return Lists.c_check(self)


cdef class _ARCClassic(_ARC):
    cdef void c_insert(self, uint32_t node_id, Node* node) noexcept:
        cdef int at = T1
        if node.ring:
            at = T2
            self.adapt(node)
            ring_remove(self.table, &self.rings[node.ring - 1], node)
        ring_append(self.table, &self.rings[at], node_id, node)
        node.note = 0
        self.c_settled()

    cdef bint t1_yields(self, uint64_t t1_size) noexcept:
        return <double>t1_size > self.target

    cdef void c_settled(self) noexcept:
        cdef int64_t most = self.capacity - <int64_t>self.rings[T1].size
        if <int64_t>self.rings[B1].size > most:
            self.forget(&self.rings[B1], most)
        most += self.capacity - <int64_t>(self.rings[T2].size + self.rings[B1].size)
        if <int64_t>self.rings[B2].size > most:
            self.forget(&self.rings[B2], most)


# Not one __init__ for all: a Python function shows its signature, a slot of a C type does not.


class LRUCachePolicy(_LRU, CachePolicy):
    """A policy that evicts the least recently used idle block.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        (<_LRU?>self).open(cache_capacity, 1)


class SLRUCachePolicy(_SLRU, CachePolicy):
    """A policy that evicts the least recently used block that was not seen again.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    protected : float
        Share of the capacity for blocks that were seen again, ``0.0 ... 1.0``; 0 is LRU.

    References
    ----------
    Karedla, Love & Wherry, "Caching Strategies to Improve Disk System Performance", IEEE Computer
    27(3), 1994.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity, *, protected=0.5):
        cdef _SLRU policy = <_SLRU?>self
        cdef int64_t capacity = check_cache_capacity(cache_capacity)
        cdef double share = registry.entry("slru").option("protected").check(protected)
        cdef int64_t size = int(share * capacity)
        policy.open(capacity, 2)  # nothing after it can fail
        policy._protected_size = size
        policy.prefix_joins = True


class LFUCachePolicy(_LFU, CachePolicy):
    """A policy that evicts the least frequently used block; old counts fade as the cache ages.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.

    References
    ----------
    Arlitt, Cherkasova, Dilley, Friedrich & Jin, "Evaluating Content Management Techniques for Web
    Proxy Caches", Workshop on Internet Server Performance, 1999.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        (<_LFU?>self).open(cache_capacity, MOST_LISTS)


class ARCCachePolicy(_ARC, CachePolicy):
    """A policy that balances recency and frequency by adaptive replacement, in vLLM's variant.

    Parameters
    ----------
    cache_capacity : int
        Upper bound of the target size of T1, and of each ghost list.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        (<_ARC?>self).open(cache_capacity, 2, ghosts_a_block=2)


class ARCClassicCachePolicy(_ARCClassic, CachePolicy):
    """A policy that balances recency and frequency by adaptive replacement, as published.

    Parameters
    ----------
    cache_capacity : int
        The paper's c: upper bound of the target size of T1, and of T1 and its ghosts together.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, cache_capacity):
        cdef _ARCClassic policy = <_ARCClassic?>self
        policy.open(cache_capacity, 2, ghosts_a_block=1)
        policy.prefix_joins = policy.adapts_once = True
        policy.newcomers = 1
