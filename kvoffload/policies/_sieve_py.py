"""SIEVE (Zhang, Yang, Yue, Vigfusson & Rashmi, NSDI'24).

Structure
    One queue, oldest first, a visited bit per block, and a hand, which points at the next block to
    examine. Two ordered dicts hold the queue: the blocks that the hand has passed in this lap and
    those ahead.
How it works
    `insert` puts a block at the newest end, not visited. `touch` marks a ready block visited and
    moves nothing. To evict, the hand moves from old to new and wraps from the newest to the oldest:
    a visited block loses its mark and stays, any other leaves. If the newest block leaves, the hand
    goes to the oldest, as in the paper, not to the next block to be inserted. When a request
    finishes, all its ready blocks are already marked.
Differs from the paper
    A pinned, pending or protected block is skipped and keeps its mark and place. The touch of a
    pending block, which has not been seen again, moves it to the newest end, so that blocks stored
    together are ordered tail first.
Invariants
    ``_resident`` is the union of the passed blocks and those ahead; a visited block is resident.
Cost
    insert, remove, get O(1); touch O(n); evict O(n + blocks in use), each lap.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, islice

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus

from ._twin_py import PythonPolicy, Victims, evictable, require
from ._views import BlocksView


class SieveCachePolicy(PythonPolicy):
    """A policy that evicts the oldest block not used since the hand last passed it.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.

    References
    ----------
    Zhang, Yang, Yue, Vigfusson & Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
    Algorithm for Web Caches", NSDI 2024.
    """

    __slots__ = ("_ahead", "_newest", "_passed", "_visited")

    def __init__(self, cache_capacity: int) -> None:
        capacity = check_cache_capacity(cache_capacity)
        self._require_free("__init__")
        self._passed: OrderedDict[BlockHash, BlockStatus] = OrderedDict()
        self._ahead: OrderedDict[BlockHash, BlockStatus] = OrderedDict()
        self._visited: set[BlockHash] = set()
        self._newest: BlockHash | None = None  # the block that joined the newest end last
        super().__init__(capacity)

    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]:
        """Resident blocks and their live statuses, oldest first; read-only."""
        self._require_ready()
        return BlocksView(self, 0)

    @property
    def hand(self) -> BlockHash | None:
        """The next block to examine; None if the queue ends at the hand."""
        return next(iter(self._ahead), None)

    def _ring(self, ring_index: int) -> Collection[BlockHash]:  # noqa: ARG002 - it has one
        return ChainMap(self._ahead, self._passed)  # which goes through the last first

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        self._ahead.update(blocks)
        self._resident.update(blocks)
        if blocks:
            self._newest = next(reversed(self._ahead))

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            del self._queue_of(block_hash)[block_hash]
            self._drop(block_hash)
        self._visited.difference_update(hashes)

    def _queue_of(self, block_hash: BlockHash) -> OrderedDict[BlockHash, BlockStatus]:
        return self._ahead if block_hash in self._ahead else self._passed

    def _touch(self, batch: list[BlockHash]) -> None:
        for block_hash in reversed(batch):
            status = self._resident.get(block_hash)
            if status is None:
                continue
            if status.ref_cnt >= 0:
                self._visited.add(block_hash)
            else:
                self._ahead[block_hash] = self._queue_of(block_hash).pop(block_hash)
                self._newest = block_hash

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        if sum(1 for _ in islice(evictable(self._resident, protected), n)) < n:
            return None
        victims = self._choose_released(n, protected)
        unmarked: set[BlockHash] = set()
        lap = evictable(self._ahead, protected, victims)
        last, has_lapped = None, False  # the last block that the hand has passed
        while len(victims) < n:
            found = next(lap, None)
            if found is None:
                last, has_lapped = None, True
                lap = chain(
                    evictable(self._passed, protected, victims),
                    evictable(self._ahead, protected, victims),
                )
                continue
            last, status = found
            if last in self._visited and last not in unmarked:
                unmarked.add(last)
            else:
                victims[last] = status
        self._visited -= unmarked
        if has_lapped:
            self._begin_lap()
        if last is not None:
            self._pass(last)
            if last == self._newest:
                self._begin_lap()
        self._remove(victims)
        return list(victims.items())

    def _begin_lap(self) -> None:
        """Put the hand before the oldest block."""
        self._passed.update(self._ahead)
        self._ahead, self._passed = self._passed, OrderedDict()

    def _pass(self, last: BlockHash) -> None:
        """Move the hand past the blocks ahead, up to and including a block."""
        block_hash = None
        while block_hash != last:
            block_hash, status = self._ahead.popitem(last=False)
            self._passed[block_hash] = status

    def _clear(self) -> None:
        super()._clear()
        for blocks in (self._passed, self._ahead, self._visited):
            blocks.clear()
        self._newest = None

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        return chain(self._passed.values(), self._ahead.values())

    def _check(self) -> None:
        super()._check()
        require(self._passed.keys().isdisjoint(self._ahead), "a hash is in one part of the queue")
        for queue in (self._passed, self._ahead):
            for block_hash, status in queue.items():
                require(self._resident.get(block_hash) is status, "the queue holds live statuses")
        require(
            len(self._resident) == len(self._passed) + len(self._ahead),
            "resident is what was passed and what lies ahead",
        )
        require(self._visited <= self._resident.keys(), "a visited block is resident")
