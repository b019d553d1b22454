"""S3-FIFO (Yang, Zhang, Qiu, Yue & Rashmi, SOSP'23), on blocks that form chains.

Structure
    Two queues, oldest first: *small*, for new blocks, meant to hold the share `small` of the
    capacity, and *main*. *Ghosts*: hashes that left small, as many as main is meant to hold. A
    block has a count of uses, 0 ... 3.
How it works
    `insert` puts a ghost at the newest end of main, any other block at that of small, its count 0.
    `touch` adds 1 to the count of a ready block and moves nothing. Small gives if it holds its
    share, else main. Small's oldest moves to main, its count 0 again, if it was used more than
    once, else it leaves and is a ghost. Main's oldest goes to the newest end again at the price of
    1 from its count, or leaves if it has none. A batch is made room for as if its blocks came one
    by one: each victim makes small larger by one.
One request, one access
    The second touch of a request counts nothing (see ``_touch_pairs_py``), nor does that of a
    pending block, which only moves to the newest end of its queue, so that what was stored together
    stands tail first.
Differs from the paper
    A pinned, pending or protected block is passed over and keeps its place. A block with a resident
    block behind it in its chain (see ``_chains_py``) does not leave. A scan looks once at each
    block that its queue had when it began; it begins again where something has changed since. A
    queue that has no victim lets the other give; where neither has one, those behind are in use:
    then the deepest leave first.
Invariants
    A hash is in one of the three queues at most; ``_resident`` is small and main.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n) where few blocks are in use or have
    others behind them, O(resident) at worst.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain, islice

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus

from . import registry
from ._chains_py import Chains
from ._touch_pairs_py import TouchPairs
from ._twin_py import PythonPolicy, evictable, require
from ._views import BlocksView, GhostsView

_Queue = OrderedDict[BlockHash, BlockStatus]
_Victims = list[tuple[BlockHash, BlockStatus]]
MOST_COUNTED = 3

# Rings, from 0.
SMALL, MAIN, GHOSTS = range(3)


class S3FIFOCachePolicy(PythonPolicy):
    """Evict new blocks that are not used soon, and of the others the oldest without use.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    small : float
        Share of the capacity for new blocks, ``0.0 ... 1.0``.

    References
    ----------
    Yang, Zhang, Qiu, Yue & Rashmi, "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023.
    """

    __slots__ = ("_chains", "_counts", "_ghosts", "_main", "_small", "_small_size", "_touches")

    def __init__(self, cache_capacity: int, *, small: float = 0.1) -> None:
        capacity = check_cache_capacity(cache_capacity)
        share = registry.entry("s3fifo").option("small").check(small)
        self._require_free("__init__")
        self._small_size = int(share * capacity)
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._counts: dict[BlockHash, int] = {}
        self._touches = TouchPairs()
        self._chains = Chains()
        super().__init__(capacity)

    @property
    def small(self) -> Mapping[BlockHash, BlockStatus]:
        """New blocks and their live statuses, oldest first; read-only."""
        self._require_ready()
        return BlocksView(self, SMALL)

    @property
    def main(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks that were used again and their live statuses, oldest first; read-only."""
        self._require_ready()
        return BlocksView(self, MAIN)

    @property
    def ghosts(self) -> AbstractSet[BlockHash]:
        """Hashes that left the small queue, oldest first; read-only."""
        self._require_ready()
        return GhostsView(self, GHOSTS)

    @property
    def small_size(self) -> int:
        """Number of blocks that the small queue is meant to hold."""
        return self._small_size

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return len(self._ghosts)

    def _ring(self, number: int) -> Collection[BlockHash]:
        return (self._small, self._main, self._ghosts)[number]

    def _insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        returned = block_hash in self._ghosts
        if returned:
            del self._ghosts[block_hash]
        (self._main if returned else self._small)[block_hash] = status
        self._resident[block_hash] = status
        self._counts[block_hash] = 0
        self._chains.insert(block_hash)

    def _remove(self, block_hash: BlockHash) -> None:
        del self._queue_of(block_hash)[block_hash]
        del self._resident[block_hash]
        del self._counts[block_hash]
        self._chains.remove(block_hash)

    def _queue_of(self, block_hash: BlockHash) -> _Queue:
        return self._small if block_hash in self._small else self._main

    def _touch(self, batch: list[BlockHash]) -> None:
        self._chains.link(batch)
        is_access = not self._touches.repeats(batch)
        for block_hash in reversed(batch):
            status = self._resident.get(block_hash)
            if status is None:
                continue
            if status.ref_cnt < 0:
                self._queue_of(block_hash).move_to_end(block_hash)
            elif is_access:
                self._counts[block_hash] = min(self._counts[block_hash] + 1, MOST_COUNTED)

    def _evict(self, n: int, protected: Collection[BlockHash]) -> _Victims | None:
        if sum(1 for _ in islice(evictable(self._resident, protected), n)) < n:
            return None
        victims: _Victims = []
        small_scan, main_scan = _Scan(self._small), _Scan(self._main)
        # Small's length, with the blocks that come for the victims so far.
        small_length = len(self._small)
        while len(victims) < n:
            scans = [small_scan, main_scan]
            if small_length < self._small_size:
                scans.reverse()
            victim, any_promoted = None, False
            for scan in scans:
                victim, promoted = self._next_victim(scan, protected)
                if promoted:
                    any_promoted = True
                    small_length -= promoted
                    main_scan.changed()
                if victim is not None:
                    break
            if victim is None:
                if any_promoted:
                    continue
                victims += self._deepest(n - len(victims), protected)
                break
            small_scan.changed()
            main_scan.changed()
            victims.append((victim, self._resident[victim]))
            if scan is main_scan:
                small_length += 1
                self._remove(victim)
            else:
                self._remove(victim)
                self._ghosts[victim] = None
        while len(self._ghosts) > self._cache_capacity - self._small_size:
            self._ghosts.popitem(last=False)
        return victims

    def _next_victim(
        self, scan: _Scan, protected: Collection[BlockHash]
    ) -> tuple[BlockHash | None, int]:
        """Scan on to a victim; return it, and how many blocks moved from small to main."""
        promoted = 0
        for block_hash in scan:
            status = self._resident[block_hash]
            if status.ref_cnt != 0 or block_hash in protected:
                continue
            count = self._counts[block_hash]
            if scan.queue is self._small and count > 1:
                self._main[block_hash] = self._small.pop(block_hash)
                self._counts[block_hash] = 0
                promoted += 1
                scan.changed()
            elif scan.queue is self._main and count:
                self._main.move_to_end(block_hash)
                self._counts[block_hash] = count - 1
                scan.changed()
            elif self._chains.is_tail(block_hash):
                return block_hash, promoted
        return None, promoted

    def _deepest(self, n: int, protected: Collection[BlockHash]) -> _Victims:
        """Let the `n` deepest blocks go, whatever is behind them."""
        may_leave = chain(evictable(self._small, protected), evictable(self._main, protected))
        by_depth = sorted(may_leave, key=lambda block: -self._chains.depth(block[0]))[:n]
        for block_hash, _ in by_depth:
            is_new = block_hash in self._small
            self._remove(block_hash)
            if is_new:
                self._ghosts[block_hash] = None
        return by_depth

    def _clear(self) -> None:
        for blocks in (self._resident, self._small, self._main):
            blocks.clear()
        self._ghosts.clear()
        self._counts.clear()
        self._touches.clear()
        self._chains.clear()

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        return chain(self._small.values(), self._main.values())

    def _check(self) -> None:
        super()._check()
        distinct = {*self._small, *self._main, *self._ghosts}
        in_queues = len(self._small) + len(self._main) + len(self._ghosts)
        require(len(distinct) == in_queues, "a hash is in one queue at most")
        for queue in (self._small, self._main):
            for block_hash, status in queue.items():
                require(self._resident.get(block_hash) is status, "queues hold live statuses")
        require(
            len(self._resident) == len(self._small) + len(self._main), "resident is small and main"
        )
        require(self._counts.keys() == self._resident.keys(), "every block has one count")
        require(
            all(0 <= count <= MOST_COUNTED for count in self._counts.values()), "counts are 0 ... 3"
        )
        require(
            len(self._ghosts) <= self._cache_capacity - self._small_size, "ghosts are within main"
        )
        self._chains.check(self._resident.keys())


class _Scan:
    """Go over a queue again and again, as long as something has changed since the last beginning.

    Parameters
    ----------
    queue : OrderedDict
        The queue; blocks may leave it or move in it meanwhile.
    """

    def __init__(self, queue: _Queue) -> None:
        self.queue = queue
        self._rest: Iterator[BlockHash] = iter(())
        self._has_changed = True

    def changed(self) -> None:
        """Tell that something has changed that may make a victim of a block passed over."""
        self._has_changed = True

    def __iter__(self) -> Iterator[BlockHash]:
        while True:
            yield from self._rest
            if not self._has_changed:
                return
            self._has_changed = False
            self._rest = iter(list(self.queue))
