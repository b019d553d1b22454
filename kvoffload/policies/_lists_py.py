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
from itertools import chain, islice
from typing import Any, ClassVar

from kvoffload.types import BlockHash, BlockStatus, Hints

from ._lists import ARC, B1, B2, LFU, LRU, PROBATION, PROTECTED, SLRU, T1, T2, ARCClassic
from ._twin_py import PythonPolicy, Victims, evictable, require

MOST_COUNTED = 15  # by LFU

_Blocks = Iterator[tuple[BlockHash, BlockStatus]]


class Lists(PythonPolicy):
    """The lists of a policy, and what most of them do."""

    __slots__ = ("_at", "_lists")

    #: Lists of blocks; those of ghosts follow.
    _num_lists: ClassVar[int] = 1
    _num_ghost_lists: ClassVar[int] = 0
    #: Whether a pending block has been seen again if a later one of its chain has.
    _prefix_joins: ClassVar[bool] = False

    def _open(self, cache_capacity: int) -> None:
        """Construct the policy."""
        super().__init__(cache_capacity)

    def _reset(self) -> None:
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
        last = self._num_lists - 1
        is_prefix = False
        for block_hash in reversed(batch):
            at = self._at.get(block_hash)
            if at is None:
                continue
            if at > last:
                self._adapt(block_hash, at)
            elif at < last and (self._resident[block_hash].ref_cnt >= 0 or is_prefix):
                at = last
                self._put(block_hash, at, self._resident[block_hash])
            if at == last:
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


class LRUCachePolicy(LRU, Lists):
    __doc__ = LRU.__doc__
    __slots__ = ()


class SLRUCachePolicy(SLRU, Lists):
    __doc__ = SLRU.__doc__
    __slots__ = ("_protected_size",)

    _num_lists = 2
    _prefix_joins = True

    def _open(self, cache_capacity: int, protected_size: int = 0) -> None:
        super()._open(cache_capacity)
        self._protected_size = protected_size

    def _touch(self, batch: list[BlockHash]) -> None:
        super()._touch(batch)
        excess = max(0, len(self._lists[PROTECTED]) - self._protected_size)
        for block_hash, status in [*islice(evictable(self._lists[PROTECTED], ()), excess)]:
            self._put(block_hash, PROBATION, status)


class LFUCachePolicy(LFU, Lists):
    __doc__ = LFU.__doc__
    __slots__ = ("_age", "_counts")

    _num_lists = MOST_COUNTED + 1

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

    def _finished(self, batch: list[BlockHash], hints: Hints | None) -> None:
        del hints
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
    """The lists T1, T2, B1 and B2, and the target size of T1."""

    __slots__ = ("_target",)

    _target: float
    _num_lists = 2
    _num_ghost_lists = 2
    #: Whether the policy is the paper's, not vLLM's variant.
    _as_published: ClassVar[bool] = False

    def _entry(self, block_hash: BlockHash) -> int:
        at = self._at.get(block_hash)
        if at is None or not self._as_published:
            return T1
        self._adapt(block_hash, at)
        return T2

    def _adapt(self, ghost: BlockHash, at: int) -> None:
        """Raise the target for a ghost of B1 (case II), lower it for one of B2 (case III)."""
        own, other = self._lists[at], self._lists[B1 + B2 - at]
        if own[ghost]:
            return
        own[ghost] = self._as_published
        step = max(1.0, len(other) / len(own))
        if at == B1:
            self._target = min(self._target + step, float(self._cache_capacity))
        else:
            self._target = max(self._target - step, 0.0)

    def _others(self, released: Collection[BlockHash], rest: list[_Blocks]) -> _Blocks:
        # T1 yields while |T1| > target as published, while |T1| >= int(target) in vLLM's variant.
        t1_size = len(self._lists[T1]) + (not self._as_published)
        t1_size += sum(self._as_published - (self._at[block_hash] == T1) for block_hash in released)
        while True:
            first, second = (T1, T2) if t1_size > self._target else (T2, T1)
            victim = next(rest[first], None) or next(rest[second], None)
            if victim is None:
                return
            t1_size += self._as_published - (self._at[victim[0]] == T1)
            yield victim

    def _settle(self, last: int | None = None) -> None:
        del last
        most = self._cache_capacity
        self._forget(B1, most - self._as_published * len(self._lists[T1]))
        if self._as_published:
            most = 2 * most - len(self._resident) - len(self._lists[B1])
        self._forget(B2, most)

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


class ARCCachePolicy(ARC, _ARC):
    __doc__ = ARC.__doc__
    __slots__ = ()


class ARCClassicCachePolicy(ARCClassic, _ARC):
    __doc__ = ARCClassic.__doc__
    __slots__ = ()

    _prefix_joins = True
    _as_published = True
