"""The four lists of ARC and its target, for both of its variants.

Structure
    T1, blocks seen once; T2, blocks seen again; B1 and B2, the ghosts of each; all least recent
    first. ``target_t1_size`` is the paper's p. A ghost carries a number that rises in its list, and
    whether its return was counted, where a policy asks for that.
Invariants
    A hash is in one of the four lists at most; ``_resident`` is the union of T1 and T2;
    ``0 <= target_t1_size <= cache_capacity``.
Source
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain, count
from typing import ClassVar

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus

from ._twin_py import PythonPolicy, evictable, require
from ._undo import Undo, drop
from ._views import BlocksView, GhostsView

Ring = OrderedDict[BlockHash, BlockStatus]
#: Ghost -> its number, and whether the target has adapted to its return already.
Ghosts = OrderedDict[BlockHash, tuple[int, bool]]
#: A victim, its status, and whether it leaves T1.
Victims = list[tuple[BlockHash, BlockStatus, bool]]

# Rings, from 0.
T1, T2, B1, B2 = range(4)


class ARCLists(PythonPolicy):
    """Hold T1, T2, B1 and B2, and the size that T1 should have."""

    __slots__ = ("_b1", "_b2", "_numbers", "_t1", "_t2", "_target")

    # Blocks that enter T1 for each victim, as far as a search counts them.
    _newcomers: ClassVar[int] = 0

    def __init__(self, cache_capacity: int) -> None:
        capacity = check_cache_capacity(cache_capacity)
        self._require_free("__init__")
        self._t1: Ring = OrderedDict()
        self._t2: Ring = OrderedDict()
        self._b1: Ghosts = OrderedDict()
        self._b2: Ghosts = OrderedDict()
        self._numbers = count()
        self._target = 0.0
        super().__init__(capacity)

    @property
    def t1(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once and their live statuses, least recent first; read-only."""
        self._require_ready()
        return BlocksView(self, T1)

    @property
    def t2(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        self._require_ready()
        return BlocksView(self, T2)

    @property
    def b1(self) -> AbstractSet[BlockHash]:
        """Ghosts of T1, least recent first; read-only."""
        self._require_ready()
        return GhostsView(self, B1)

    @property
    def b2(self) -> AbstractSet[BlockHash]:
        """Ghosts of T2, least recent first; read-only."""
        self._require_ready()
        return GhostsView(self, B2)

    @property
    def target_t1_size(self) -> float:
        """Size that T1 should have, in blocks, ``0.0 ... cache_capacity``; adapts."""
        return self._target

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return len(self._b1) + len(self._b2)

    def _ring(self, number: int) -> Collection[BlockHash]:
        return (self._t1, self._t2, self._b1, self._b2)[number]

    def _raise_target(self) -> None:
        """Adapt to a ghost of B1 (case II): T1 was too small by the share that B2 exceeds B1."""
        step = max(1.0, len(self._b2) / len(self._b1))
        self._target = min(self._target + step, float(self._cache_capacity))

    def _lower_target(self) -> None:
        """Adapt to a ghost of B2 (case III): T2 was too small."""
        step = max(1.0, len(self._b1) / len(self._b2))
        self._target = max(self._target - step, 0.0)

    @abstractmethod
    def _t1_gives(self, t1_size: int) -> bool:
        """Tell whether T1, when it has that size, gives the next victim."""

    def _search(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        """Choose victims by REPLACE of figure 4; an exhausted list stays exhausted."""
        lists = evictable(self._t2, protected), evictable(self._t1, protected)
        t1_size = len(self._t1)
        victims: Victims = []
        for _ in range(n):
            leaves_t1 = self._t1_gives(t1_size)
            victim = next(lists[leaves_t1], None)
            if victim is None:
                leaves_t1 = not leaves_t1
                victim = next(lists[leaves_t1], None)
            if victim is None:
                return None
            t1_size += self._newcomers - leaves_t1
            victims.append((*victim, leaves_t1))
        return victims

    def _remove(self, hashes: Iterable[BlockHash]) -> None:
        for mapping in (self._t1, self._t2, self._resident):
            drop(mapping, hashes)

    def _renew_ghost(self, ghosts: Ghosts, block_hash: BlockHash, *, counted: bool) -> None:
        """Make a hash the most recent ghost of a list."""
        ghosts[block_hash] = next(self._numbers), counted
        ghosts.move_to_end(block_hash)

    def _make_ghosts(self, victims: Victims, undo: Undo) -> None:
        """Let victims go: each becomes the most recent ghost of its list."""
        for ring, ghosts, is_t1 in ((self._t1, self._b1, True), (self._t2, self._b2, False)):
            leaving = {block: status for block, status, leaves_t1 in victims if leaves_t1 is is_t1}
            undo.leaving(ring, leaving)
            undo.append((self._resident.update, leaving))
            undo.oldest(ghosts, len(victims))  # who may have to go
            undo.append((drop, ghosts, leaving))
            for block_hash in leaving:
                del ring[block_hash]
                del self._resident[block_hash]
                ghosts[block_hash] = next(self._numbers), False

    def _empty(self) -> None:
        for blocks in (self._resident, self._t1, self._t2):
            blocks.clear()
        for ghosts in (self._b1, self._b2):
            ghosts.clear()
        self._target = 0.0

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        return chain(self._t1.values(), self._t2.values())

    def _check(self) -> None:
        super()._check()
        lists = (self._t1, self._t2, self._b1, self._b2)
        distinct = set().union(*lists)
        require(len(distinct) == sum(len(one) for one in lists), "a hash is in one list at most")
        for ring in (self._t1, self._t2):
            for block_hash, status in ring.items():
                require(self._resident.get(block_hash) is status, "T1 and T2 hold live statuses")
        require(len(self._resident) == len(self._t1) + len(self._t2), "resident is T1 and T2")
        for ghosts in (self._b1, self._b2):
            numbers = [number for number, _ in ghosts.values()]
            require(numbers == sorted(set(numbers)), "the numbers of ghosts rise in their list")
        require(0 <= self._target <= self._cache_capacity, "the target is within the capacity")
