"""LRU: the least recently used idle block leaves first.

Structure
    One ordered dict, least recent first.
Invariants
    Pinned and pending blocks keep their place; a victim scan skips them.
Cost
    insert, remove, get O(1); touch O(n); evict O(n + blocks skipped).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from kvoffload.types import BlockHash, BlockStatus

from ._twin_py import PythonPolicy, Victims, evictable
from ._views import BlocksView


class LRUCachePolicy(PythonPolicy):
    """A policy that evicts the least recently used idle block.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.
    """

    __slots__ = ()

    _resident: OrderedDict[BlockHash, BlockStatus]
    _blocks_type = OrderedDict

    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]:
        """Resident blocks and their live statuses, least recent first; read-only."""
        self._require_ready()
        return BlocksView(self, 0)

    def _ring(self, ring_index: int) -> Collection[BlockHash]:  # noqa: ARG002 - it has one
        return self._resident

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        self._resident.update(blocks)

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            self._drop(block_hash)

    def _touch(self, batch: list[BlockHash]) -> None:
        blocks = self._resident
        for block_hash in reversed(batch):
            if block_hash in blocks:
                blocks.move_to_end(block_hash)

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        released = self._choose_released(n, protected)
        others = evictable(self._resident, protected, released)
        victims = released | dict(islice(others, n - len(released)))
        if len(victims) < n:
            return None
        self._remove(victims)
        return list(victims.items())

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        return self._resident.values()
