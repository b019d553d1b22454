"""SLRU: segmented LRU (Karedla, Love & Wherry, IEEE Computer 27(3), 1994).

Structure
    Two ordered dicts, least recent first: *probation*, blocks seen once or demoted, and
    *protected*, blocks seen again. Protected should hold at most the share `protected` of the
    capacity.
How it works
    `insert` puts a block at the most recent end of probation. `touch` puts a ready block at the
    most recent end of protected; a pending one has not been seen again and becomes its segment's
    most recent. After each touch, the excess of protected moves, least recent first, to the most
    recent end of probation. Victims: probation's least recent first, then protected's. A request
    uses its blocks when it begins and when it finishes; the second use changes only the order.
Differs from the paper
    Demotion runs once per batch. Both demotion and eviction skip a block that is not idle, and it
    keeps its place; so protected can exceed its share while blocks are in use. A pending block
    moves to protected if a block touched before it in the same batch, a later one of its chain, is
    there: a use of a block is also a use of its prefix. So a chain's protected blocks are a prefix
    of it, and it leaves tail first.
Invariants
    A hash is in at most one segment; ``_resident`` is the union of both.
Cost
    insert, remove, get O(1); touch O(n + blocks demoted or skipped); evict O(n + blocks skipped).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, islice

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus

from . import registry
from ._twin_py import PythonPolicy, Victims, evictable, require
from ._views import BlocksView

_Segment = OrderedDict[BlockHash, BlockStatus]

# Rings, from 0.
PROBATION, PROTECTED = range(2)


class SLRUCachePolicy(PythonPolicy):
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

    __slots__ = ("_probation", "_protected", "_protected_size")

    def __init__(self, cache_capacity: int, *, protected: float = 0.5) -> None:
        capacity = check_cache_capacity(cache_capacity)
        share = registry.entry("slru").option("protected").check(protected)
        self._require_free("__init__")
        self._protected_size = int(share * capacity)
        self._probation: _Segment = OrderedDict()
        self._protected: _Segment = OrderedDict()
        super().__init__(capacity)

    @property
    def probation(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once or demoted and their live statuses, least recent first; read-only."""
        self._require_ready()
        return BlocksView(self, PROBATION)

    @property
    def protected(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        self._require_ready()
        return BlocksView(self, PROTECTED)

    @property
    def protected_size(self) -> int:
        """Number of blocks that protected should hold at most."""
        return self._protected_size

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        return (self._probation, self._protected)[ring_index]

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        self._probation.update(blocks)
        self._resident.update(blocks)

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            segment = self._probation if block_hash in self._probation else self._protected
            del segment[block_hash]
            self._drop(block_hash)

    def _touch(self, batch: list[BlockHash]) -> None:
        probation, protected = self._probation, self._protected
        later_is_protected = False
        for block_hash in reversed(batch):
            if block_hash in protected:
                protected.move_to_end(block_hash)
                later_is_protected = True
            elif block_hash in probation:
                if probation[block_hash].ref_cnt >= 0 or later_is_protected:
                    protected[block_hash] = probation.pop(block_hash)
                    later_is_protected = True
                else:
                    probation.move_to_end(block_hash)
        self._demote()

    def _demote(self) -> None:
        """Move the excess of protected to probation."""
        excess = len(self._protected) - self._protected_size
        if excess > 0:
            for block_hash, status in list(islice(evictable(self._protected, ()), excess)):
                del self._protected[block_hash]
                self._probation[block_hash] = status

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        released = self._choose_released(n, protected)
        segments = (evictable(s, protected, released) for s in (self._probation, self._protected))
        victims = released | dict(islice(chain.from_iterable(segments), n - len(released)))
        if len(victims) < n:
            return None
        self._remove(victims)
        return list(victims.items())

    def _clear(self) -> None:
        super()._clear()
        self._probation.clear()
        self._protected.clear()

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        return chain(self._probation.values(), self._protected.values())

    def _check(self) -> None:
        super()._check()
        require(self._probation.keys().isdisjoint(self._protected), "a hash is in one segment")
        for segment in (self._probation, self._protected):
            for block_hash, status in segment.items():
                require(self._resident.get(block_hash) is status, "segments hold live statuses")
        require(
            len(self._resident) == len(self._probation) + len(self._protected),
            "resident is probation and protected",
        )
