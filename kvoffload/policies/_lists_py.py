"""Policies that keep their blocks on lists: LRU, SLRU, LFU, ARC and ARC as published.

Structure
    A policy has one or more lists of blocks, and for each of them one of ghosts, or none; all of
    them least recent first. It says which list a block joins when it is stored and when it is
    used, which list yields the next victim, and what follows an eviction. The rest is common.
    Pinned, pending and protected blocks keep their place; a search for victims skips them.
LRU: the least recently used idle block leaves first
    One list.
SLRU: segmented LRU (Karedla, Love & Wherry, IEEE Computer 27(3), 1994)
    Two lists: *probation*, blocks seen once or demoted, and *protected*, blocks seen again, meant
    to hold the share `protected` of the capacity. A stored block joins probation. The use of a
    ready block moves it to protected; a pending one has not been seen again and becomes its list's
    most recent. After each touch, the excess of protected moves, least recent first, to the most
    recent end of probation. Probation yields the victims, then protected.
    Differs from the paper: demotion runs once per batch; it skips a block that is not idle, so
    protected can exceed its share while blocks are in use. A pending block moves to protected if a
    block touched before it in the same batch, a later one of its chain, is there: a use of a block
    is also a use of its prefix. So a chain's protected blocks are a prefix of it, and it leaves
    tail first.
LFU with dynamic aging, LFU-DA (Arlitt, Cherkasova, Dilley, Friedrich & Jin, 1999)
    Each block has a count of accesses F, 1 ... 15, and a priority K; the cache has an age L, 0 at
    first. K is set to L + F whenever a block is stored (F = 1) or used, so no K is less than L or
    more than L + 15, and list number K mod 16 holds the blocks of priority K. The victim is the
    least recent block of the least K, and L becomes its K: a formerly popular block stays until L
    has caught up with it. The end of a request sets K again but does not count as a use. Neither
    does the touch of a pending block, which has not been seen again.
    Differs from the paper: F stops at 15, so formerly popular blocks leave within 15 steps of age.
    A batch of victims ages the cache once, to the K of the last that leaves in its turn, and not
    beyond the least K of a block that was skipped.
    Order in a chain: a block's prefix is used whenever the block is, so it has no smaller F, was
    given its K at no smaller L, and with the same K it is the more recent: it leaves tail first.
ARC (Megiddo & Modha, FAST'03, fig. 4), as vLLM adapts it to blocks in use
    T1, blocks seen once, T2, blocks seen again, and their ghosts B1 and B2; ``target_t1_size`` is
    the paper's p. A use moves a ready block to T2. REPLACE chooses victim by victim, with the sizes
    as if those so far were gone; if the chosen list has none, the other yields one.
    Differs from the paper: a stored block joins T1 even if it was a ghost (the paper's cases II and
    III move it to T2). The target adapts once for each touch of a ghost, not in the replacement of
    one page. Each ghost list is trimmed to the capacity; the paper limits all lists together to 2c.
ARC as published, for batches of blocks that may be in use
    How the paper's request x maps to calls. Case I, x in T1 or T2: as above. Cases II and III, x in
    B1 or B2: the target adapts **once for each return of a ghost**, at the first `touch` or,
    without one before, when the block is stored; that puts it into T2. Case IV, x nowhere: it joins
    T1. REPLACE runs as if the new blocks came one by one, with a new block in T1 for each victim.
    Differs from the paper: the tie rule of REPLACE (|T1| = p and x in B2) is omitted, since a batch
    has no single x. A touched ghost becomes its list's most recent, so that the batch that brings
    it back does not push it out first. A pending block of T1 moves to T2 as it does in SLRU.
    Invariants: |T1| + |B1| <= c or B1 is empty, all four <= 2c or B2 is empty.
    Order in a chain: within each list a chain leaves tail first. Across the lists REPLACE decides,
    as published: it can take the last block of a chain in T2 while blocks behind it are in T1.
Cost
    insert, remove, get O(1); touch O(n + blocks demoted); evict O(n + blocks skipped).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from typing import Any, ClassVar

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus, Hints

from . import registry
from ._twin_py import PythonPolicy, Victims, evictable, require
from ._views import BlocksView, GhostsView

MOST_COUNTED = 15  # by LFU

_Blocks = Iterator[tuple[BlockHash, BlockStatus]]

# Lists of SLRU and of ARC, from 0.
PROBATION, PROTECTED = range(2)
T1, T2, B1, B2 = range(4)


class Lists(PythonPolicy):
    """The lists of a policy, and what most of them do: to begin with, LRU."""

    __slots__ = ("_at", "_lists")

    #: Lists of blocks; those of ghosts follow.
    _num_lists: ClassVar[int] = 1
    _num_ghost_lists: ClassVar[int] = 0
    #: Whether a pending block has been seen again if a later one of its chain has.
    _prefix_joins: ClassVar[bool] = False

    def __init__(self, cache_capacity: int) -> None:
        capacity = check_cache_capacity(cache_capacity)
        self._require_free("__init__")
        self._reset()
        super().__init__(capacity)

    def _reset(self) -> None:
        """Empty the lists, and forget what was learned."""
        # The value is the live status of a block, and of a ghost whether its return was counted.
        self._lists: list[OrderedDict[BlockHash, Any]] = [
            OrderedDict() for _ in range(self._num_lists + self._num_ghost_lists)
        ]
        self._at: dict[BlockHash, int] = {}  # the list of each hash

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return sum(map(len, self._lists[self._num_lists :]))

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        return self._lists[ring_index]

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            self._put(block_hash, self._entry(block_hash), status)
            self._resident[block_hash] = status
            self._settle()

    def _entry(self, block_hash: BlockHash) -> int:  # noqa: ARG002 - for those that ask
        """Return the list that a block joins when it is stored."""
        return 0

    def _put(self, block_hash: BlockHash, index: int, value: object) -> None:
        """Make a hash the most recent of a list; it leaves its former one."""
        if block_hash in self._at:
            del self._lists[self._at[block_hash]][block_hash]
        self._at[block_hash] = index
        self._lists[index][block_hash] = value

    def _drop(self, block_hash: BlockHash) -> BlockStatus:
        del self._lists[self._at.pop(block_hash)][block_hash]
        return super()._drop(block_hash)

    def _touch(self, batch: list[BlockHash]) -> None:
        for block_hash in reversed(batch):
            if block_hash in self._at:
                self._lists[0].move_to_end(block_hash)

    def _use(self, batch: list[BlockHash]) -> None:
        """Touch the blocks and ghosts of a policy with two lists."""
        is_prefix = False
        for block_hash in reversed(batch):
            at = self._at.get(block_hash)
            if at is None:
                continue
            status = self._resident.get(block_hash)
            if status is None:
                self._adapt(block_hash, at)
            elif at == PROBATION and (status.ref_cnt >= 0 or is_prefix):
                self._put(block_hash, PROTECTED, status)
                is_prefix = self._prefix_joins
                continue
            elif at == PROTECTED:
                is_prefix = self._prefix_joins
            self._lists[at].move_to_end(block_hash)

    def _adapt(self, ghost: BlockHash, at: int) -> None:
        """Adapt to the return of a ghost of a list."""

    def _in_turn(self) -> list[int]:
        """Return the lists in the order in which they yield victims."""
        return [*range(self._num_lists)]

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        released = self._choose_released(n, protected)
        rest = [evictable(blocks, protected, released) for blocks in self._lists]
        victims = released | dict(islice(self._others(released, rest), n - len(released)))
        if len(victims) < n:
            return None
        at = 0
        for block_hash in victims:
            at = self._at[block_hash]
            self._drop(block_hash)
            if self._num_ghost_lists:
                self._put(block_hash, at + self._num_lists, value=False)
        self._settle(at if n > len(released) else None)
        return list(victims.items())

    def _others(self, released: Collection[BlockHash], rest: list[_Blocks]) -> _Blocks:  # noqa: ARG002
        """Yield victims from the rest of each list."""
        return chain.from_iterable(rest[at] for at in self._in_turn())

    def _settle(self, last: int | None = None) -> None:
        """Follow a store or an eviction; `last` is the list of its last victim, if in its turn."""

    def _clear(self) -> None:
        super()._clear()
        self._reset()

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        for index in self._in_turn():
            yield from self._lists[index].values()

    def _check(self) -> None:
        super()._check()
        at = {block_hash: index for index, one in enumerate(self._lists) for block_hash in one}
        require(at == self._at, "a hash knows its list")
        require(len(at) == sum(map(len, self._lists)), "a hash is in one list at most")
        blocks = chain.from_iterable(one.items() for one in self._lists[: self._num_lists])
        require(dict(blocks) == self._resident, "resident is the union of the lists of blocks")


class LRUCachePolicy(Lists):
    """A policy that evicts the least recently used idle block.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.
    """

    __slots__ = ()

    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]:
        """Resident blocks and their live statuses, least recent first; read-only."""
        return BlocksView(self, 0)


class SLRUCachePolicy(Lists):
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

    __slots__ = ("_protected_size",)

    _num_lists = 2
    _prefix_joins = True

    def __init__(self, cache_capacity: int, *, protected: float = 0.5) -> None:
        capacity = check_cache_capacity(cache_capacity)
        share = registry.entry("slru").option("protected").check(protected)
        super().__init__(capacity)
        self._protected_size = int(share * capacity)

    @property
    def probation(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once or demoted and their live statuses, least recent first; read-only."""
        return BlocksView(self, PROBATION)

    @property
    def protected(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        return BlocksView(self, PROTECTED)

    @property
    def protected_size(self) -> int:
        """Number of blocks that protected should hold at most."""
        return self._protected_size

    def _touch(self, batch: list[BlockHash]) -> None:
        self._use(batch)
        excess = max(0, len(self._lists[PROTECTED]) - self._protected_size)
        for block_hash, status in [*islice(evictable(self._lists[PROTECTED], ()), excess)]:
            self._put(block_hash, PROBATION, status)


class LFUCachePolicy(Lists):
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

    __slots__ = ("_age", "_counts")

    _num_lists = MOST_COUNTED + 1

    @property
    def age(self) -> int:
        """The least priority that a block can have."""
        return self._age

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self._finish_alone(hashes, hints)

    def _entry(self, block_hash: BlockHash) -> int:
        self._counts[block_hash] = 1
        return (self._age + 1) % self._num_lists

    def _drop(self, block_hash: BlockHash) -> BlockStatus:
        status = super()._drop(block_hash)
        del self._counts[block_hash]
        return status

    def _touch(self, batch: list[BlockHash]) -> None:
        self._set_priorities(batch, counts=True)

    def _finished(self, batch: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        del hints, now
        self._set_priorities(batch, counts=False)

    def _set_priorities(self, batch: list[BlockHash], *, counts: bool) -> None:
        """Set K of resident blocks, last hash first, with a higher F if the use counts."""
        for block_hash in reversed(batch):
            status = self._resident.get(block_hash)
            if status is not None:
                if counts and status.ref_cnt >= 0:
                    self._counts[block_hash] = min(self._counts[block_hash] + 1, MOST_COUNTED)
                priority = self._age + self._counts[block_hash]
                self._put(block_hash, priority % self._num_lists, status)

    def _in_turn(self) -> list[int]:
        return [(self._age + later) % self._num_lists for later in range(self._num_lists)]

    def _settle(self, last: int | None = None) -> None:
        while last not in (None, at := self._age % self._num_lists) and not self._lists[at]:
            self._age += 1

    def _reset(self) -> None:
        super()._reset()
        self._age = 0
        self._counts: dict[BlockHash, int] = {}

    def _check(self) -> None:
        super()._check()
        require(self._counts.keys() == self._resident.keys(), "every block has one count")
        counts = self._counts.values()
        require(all(1 <= count <= MOST_COUNTED for count in counts), "F is 1 ... 15")


class _ARC(Lists):
    """The lists T1, T2, B1 and B2, and the target size of T1; vLLM's variant."""

    __slots__ = ("_target",)

    _target: float
    _num_lists = 2
    _num_ghost_lists = 2
    #: Whether only the first touch of a ghost counts.
    _adapts_once: ClassVar[bool] = False
    #: Blocks per victim that join T1, as counted by a search.
    _newcomers: ClassVar[int] = 0

    @property
    def t1(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once and their live statuses, least recent first; read-only."""
        return BlocksView(self, T1)

    @property
    def t2(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        return BlocksView(self, T2)

    @property
    def b1(self) -> AbstractSet[BlockHash]:
        """Ghosts of T1, least recent first; read-only."""
        return GhostsView(self, B1)

    @property
    def b2(self) -> AbstractSet[BlockHash]:
        """Ghosts of T2, least recent first; read-only."""
        return GhostsView(self, B2)

    @property
    def target_t1_size(self) -> float:
        """Target size of T1 in blocks, ``0.0 ... cache_capacity``; adapts."""
        return self._target

    def _adapt(self, ghost: BlockHash, at: int) -> None:
        """Raise the target for a ghost of B1 (case II), lower it for one of B2 (case III)."""
        own, other = self._lists[at], self._lists[B1 + B2 - at]
        if own[ghost]:
            return
        own[ghost] = self._adapts_once
        step = max(1.0, len(other) / len(own))
        if at == B1:
            self._target = min(self._target + step, float(self._cache_capacity))
        else:
            self._target = max(self._target - step, 0.0)

    def _touch(self, batch: list[BlockHash]) -> None:
        self._use(batch)

    def _t1_yields(self, t1_size: int) -> bool:
        """Return whether T1, at that size, yields the next victim."""
        return t1_size >= int(self._target)

    def _others(self, released: Collection[BlockHash], rest: list[_Blocks]) -> _Blocks:
        t1_size = len(self._lists[T1])
        t1_size += sum(self._newcomers - (self._at[block_hash] == T1) for block_hash in released)
        while True:
            first, second = (T1, T2) if self._t1_yields(t1_size) else (T2, T1)
            victim = next(rest[first], None) or next(rest[second], None)
            if victim is None:
                return
            t1_size += self._newcomers - (self._at[victim[0]] == T1)
            yield victim

    def _settle(self, last: int | None = None) -> None:
        del last
        self._forget(B1, self._cache_capacity)
        self._forget(B2, self._cache_capacity)

    def _forget(self, at: int, most: int) -> None:
        """Forget the oldest ghosts of a list beyond `most`."""
        ghosts = self._lists[at]
        while len(ghosts) > max(most, 0):
            del self._at[ghosts.popitem(last=False)[0]]

    def _reset(self) -> None:
        super()._reset()
        self._target = 0.0

    def _check(self) -> None:
        super()._check()
        require(0 <= self._target <= self._cache_capacity, "the target is within the capacity")
        before = [*map(len, self._lists)]
        self._settle()
        require(before == [*map(len, self._lists)], "the ghosts are within their bounds")


class ARCCachePolicy(_ARC):
    """A policy that balances recency and frequency by adaptive replacement, in vLLM's variant.

    Parameters
    ----------
    cache_capacity : int
        Upper bound of the target size of T1, and of each ghost list.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ()


class ARCClassicCachePolicy(_ARC):
    """A policy that balances recency and frequency by adaptive replacement, as published.

    Parameters
    ----------
    cache_capacity : int
        The paper's c: upper bound of the target size of T1, and of T1 and its ghosts together.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ()

    _prefix_joins = True
    _adapts_once = True
    _newcomers = 1

    def _entry(self, block_hash: BlockHash) -> int:
        at = self._at.get(block_hash)
        if at is None:
            return T1
        self._adapt(block_hash, at)
        return T2

    def _t1_yields(self, t1_size: int) -> bool:
        return t1_size > self._target

    def _settle(self, last: int | None = None) -> None:
        del last
        self._forget(B1, self._cache_capacity - len(self._lists[T1]))
        length = len(self._resident) + len(self._lists[B1])
        self._forget(B2, 2 * self._cache_capacity - length)
