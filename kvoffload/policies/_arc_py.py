"""ARC (Megiddo & Modha, FAST'03, fig. 4), as vLLM adapts it to blocks that may not leave.

Structure
    T1, blocks seen once; T2, blocks seen again; B1 and B2, the ghosts of each; all least recent
    first. ``target_t1_size`` is the paper's p.
Differs from the paper
    A miss is inserted into T1 always, also on a ghost hit (the paper's cases II and III move it to
    T2); the target adapts in `touch`, once for each touch of a ghost, not in the replacement of
    one page; replacement is asked for many blocks at once; pinned, pending and protected blocks
    are passed over, and where the list that should give has none, the other gives; both ghost
    lists are trimmed to the capacity, not to the paper's 2c in all.
Invariants
    A hash is in one of the four lists at most; ``_resident`` is the union of T1 and T2;
    ``0 <= target_t1_size <= cache_capacity``.
Cost
    insert, remove, get O(1); touch O(n); evict O(n + blocks passed over): one scan of each list,
    however many victims.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, KeysView, Mapping
from itertools import chain
from types import MappingProxyType

from kvoffload.types import BlockHash, BlockStatus

from ._twin_py import PythonPolicy, evictable, require

_Ring = OrderedDict[BlockHash, BlockStatus]
_Ghosts = OrderedDict[BlockHash, None]


class ARCCachePolicy(PythonPolicy):
    """Balance recency and frequency by adaptive replacement, as vLLM has it.

    Parameters
    ----------
    cache_capacity : int
        Upper bound of the target size of T1, and of each ghost list.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ("_b1", "_b2", "_t1", "_t2", "_target")

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._t1: _Ring = OrderedDict()
        self._t2: _Ring = OrderedDict()
        self._b1: _Ghosts = OrderedDict()
        self._b2: _Ghosts = OrderedDict()
        self._target = 0.0

    @property
    def t1(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once and their live statuses, least recent first; read-only."""
        return MappingProxyType(self._t1)

    @property
    def t2(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        return MappingProxyType(self._t2)

    @property
    def b1(self) -> KeysView[BlockHash]:
        """Ghosts of T1, least recent first; read-only."""
        return self._b1.keys()

    @property
    def b2(self) -> KeysView[BlockHash]:
        """Ghosts of T2, least recent first; read-only."""
        return self._b2.keys()

    @property
    def target_t1_size(self) -> float:
        """Size that T1 should have, in blocks, ``0.0 ... cache_capacity``; adapts."""
        return self._target

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return len(self._b1) + len(self._b2)

    def _insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        self._b1.pop(block_hash, None)
        self._b2.pop(block_hash, None)
        self._t1[block_hash] = status
        self._resident[block_hash] = status

    def _remove(self, block_hash: BlockHash) -> None:
        del self._resident[block_hash]
        ring = self._t1 if block_hash in self._t1 else self._t2
        del ring[block_hash]

    def _touch(self, batch: list[BlockHash]) -> None:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        for block_hash in reversed(batch):
            if block_hash in t1:
                if t1[block_hash].ref_cnt < 0:
                    # A block that is being stored has not been seen twice.
                    t1.move_to_end(block_hash)
                else:
                    t2[block_hash] = t1.pop(block_hash)
            elif block_hash in t2:
                t2.move_to_end(block_hash)
            elif block_hash in b1:
                # Case II: T1 was too small by the share that B2 exceeds B1.
                step = max(1.0, len(b2) / len(b1))
                self._target = min(self._target + step, float(self._cache_capacity))
                b1.move_to_end(block_hash)
            elif block_hash in b2:
                # Case III: T2 was too small.
                step = max(1.0, len(b1) / len(b2))
                self._target = max(self._target - step, 0.0)
                b2.move_to_end(block_hash)

    def _evict(
        self, n: int, protected: Collection[BlockHash]
    ) -> list[tuple[BlockHash, BlockStatus]] | None:
        from_t1 = evictable(self._t1, protected)
        from_t2 = evictable(self._t2, protected)
        target = int(self._target)
        t1_size = len(self._t1)
        victims: list[tuple[BlockHash, BlockStatus, bool]] = []
        for _ in range(n):
            # REPLACE of figure 4; an exhausted list stays exhausted, so each is scanned once.
            if t1_size >= target:
                victim = next(from_t1, None)
                seen_once = victim is not None
                if victim is None:
                    victim = next(from_t2, None)
            else:
                victim = next(from_t2, None)
                seen_once = victim is None
                if victim is None:
                    victim = next(from_t1, None)
            if victim is None:
                return None
            t1_size -= seen_once
            victims.append((*victim, seen_once))
        for block_hash, _status, seen_once in victims:
            ring, ghosts = (self._t1, self._b1) if seen_once else (self._t2, self._b2)
            del ring[block_hash]
            del self._resident[block_hash]
            ghosts[block_hash] = None
        if victims:
            for ghosts in (self._b1, self._b2):
                while len(ghosts) > self._cache_capacity:
                    ghosts.popitem(last=False)
        return [(block_hash, status) for block_hash, status, _ in victims]

    def _clear(self) -> None:
        for blocks in (self._resident, self._t1, self._t2, self._b1, self._b2):
            blocks.clear()
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
        require(len(self._b1) <= self._cache_capacity, "B1 is within the capacity")
        require(len(self._b2) <= self._cache_capacity, "B2 is within the capacity")
