"""The four lists of ARC and its target, for both of its variants.

Structure
    T1, blocks seen once; T2, blocks seen again; B1 and B2, the ghosts of each; all least recent
    first. ``target_t1_size`` is the paper's p. A ghost records whether its return was counted.
Invariants
    A hash is in at most one of the four lists; ``_resident`` is the union of T1 and T2;
    ``0 <= target_t1_size <= cache_capacity``.
Source
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import ClassVar

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus

from ._twin_py import PythonPolicy, Victims, evictable, require
from ._views import BlocksView, GhostsView

Ring = OrderedDict[BlockHash, BlockStatus]
#: Ghost -> whether the target has already adapted to its return.
Ghosts = OrderedDict[BlockHash, bool]
#: Victims in eviction order: hash, status, and whether the block leaves T1.
Chosen = list[tuple[BlockHash, BlockStatus, bool]]

# Rings, from 0.
T1, T2, B1, B2 = range(4)


class ARCLists(PythonPolicy):
    """The lists T1, T2, B1 and B2, and the target size of T1."""

    __slots__ = ("_b1", "_b2", "_t1", "_t2", "_target")

    # Blocks per victim that enter T1, as counted by a search.
    _newcomers: ClassVar[int] = 0

    def __init__(self, cache_capacity: int) -> None:
        capacity = check_cache_capacity(cache_capacity)
        self._require_free("__init__")
        self._t1: Ring = OrderedDict()
        self._t2: Ring = OrderedDict()
        self._b1: Ghosts = OrderedDict()
        self._b2: Ghosts = OrderedDict()
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
        """Target size of T1 in blocks, ``0.0 ... cache_capacity``; adapts."""
        return self._target

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return len(self._b1) + len(self._b2)

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        return (self._t1, self._t2, self._b1, self._b2)[ring_index]

    def _raise_target(self) -> None:
        """Adapt to a ghost of B1 (case II): raise the target by max(1, |B2| / |B1|)."""
        step = max(1.0, len(self._b2) / len(self._b1))
        self._target = min(self._target + step, float(self._cache_capacity))

    def _lower_target(self) -> None:
        """Adapt to a ghost of B2 (case III): T2 was too small."""
        step = max(1.0, len(self._b1) / len(self._b2))
        self._target = max(self._target - step, 0.0)

    @abstractmethod
    def _t1_gives(self, t1_size: int) -> bool:
        """Return whether T1, at that size, yields the next victim."""

    def _choose(self, n: int, protected: Collection[BlockHash]) -> Chosen | None:
        """Choose victims by REPLACE of figure 4; an exhausted list stays exhausted."""
        released = self._choose_released(n, protected)
        lists = (
            evictable(self._t2, protected, released),
            evictable(self._t1, protected, released),
        )
        t1_size = len(self._t1)
        chosen: Chosen = []
        for block_hash, status in released.items():
            leaves_t1 = block_hash in self._t1
            t1_size += self._newcomers - leaves_t1
            chosen.append((block_hash, status, leaves_t1))
        for _ in range(n - len(released)):
            leaves_t1 = self._t1_gives(t1_size)
            victim = next(lists[leaves_t1], None)
            if victim is None:
                leaves_t1 = not leaves_t1
                victim = next(lists[leaves_t1], None)
            if victim is None:
                return None
            t1_size += self._newcomers - leaves_t1
            chosen.append((*victim, leaves_t1))
        return chosen

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            ring = self._t1 if block_hash in self._t1 else self._t2
            del ring[block_hash]
            self._drop(block_hash)

    def _renew_ghost(self, ghosts: Ghosts, block_hash: BlockHash) -> None:
        """Make a ghost whose return was counted the most recent of its list."""
        ghosts[block_hash] = True
        ghosts.move_to_end(block_hash)

    def _make_ghosts(self, chosen: Chosen) -> Victims:
        """Make each victim the most recent ghost of its list; return the victims."""
        for block_hash, _, leaves_t1 in chosen:
            ring, ghosts = (self._t1, self._b1) if leaves_t1 else (self._t2, self._b2)
            del ring[block_hash]
            self._drop(block_hash)
            ghosts[block_hash] = False
        return [(block_hash, status) for block_hash, status, _ in chosen]

    def _clear(self) -> None:
        super()._clear()
        for blocks in (self._t1, self._t2):
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
        require(0 <= self._target <= self._cache_capacity, "the target is within the capacity")
