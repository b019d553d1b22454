"""S3-FIFO (Yang, Zhang, Qiu, Yue & Rashmi, SOSP'23), on blocks that form chains.

Structure
    Two queues, oldest first: *small*, for new blocks, meant to hold the share `small` of the
    capacity, and *main*. *Ghosts*: hashes that left small, at most as many as main is meant to
    hold. A block has a count of uses, 0 ... 3.
How it works
    `insert` puts a ghost at the newest end of main, any other block at that of small, with the
    count 0; the eviction before it, for the same batch, does not forget that ghost. `touch` adds 1
    to the count of a ready block and moves nothing. Small yields the victim if it holds its share,
    else main does. Small's oldest moves to main, with the count 0, if it was used more than once;
    else it leaves and becomes a ghost. Main's oldest returns to the newest end and its count drops
    by 1, or it leaves if its count is 0. Room for a batch is made as if its blocks came one by one:
    each victim makes small larger by one.
One request, one access
    The end of a request counts no use. Neither does the touch of a pending block, which only moves
    to the newest end of its queue, so that blocks stored together are ordered tail first.
Differs from the paper
    A pinned, pending or protected block is skipped and keeps its place. A block with a resident
    block behind it in its chain (see ``_chains_py``) does not leave. An eviction of several blocks
    continues the scan of each queue from victim to victim; the paper begins at the oldest for each.
    A scan examines once each block that its queue had when it began; it begins again if something
    has changed since. If one queue has no victim, the other yields; if neither has one, the blocks
    behind are in use, and the deepest leave first.
Invariants
    A hash is in at most one of the three queues; ``_resident`` is the union of small and main.
Cost
    insert, remove, get O(1); touch O(n); evict O(n + blocks skipped): those in use, each
    scan, and those that wait, once. O(resident) if all idle blocks wait.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import nsmallest
from itertools import chain, islice

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus, Hints

from . import registry
from ._chains_py import Chains
from ._twin_py import PythonPolicy, Victims, evictable, require
from ._views import BlocksView, GhostsView

_Queue = OrderedDict[BlockHash, BlockStatus]
MOST_COUNTED = 3

# Rings, from 0.
SMALL, MAIN, GHOSTS = range(3)


class S3FIFOCachePolicy(PythonPolicy):
    """A policy that evicts new blocks not used soon, then the oldest unused ones.

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

    __slots__ = ("_chains", "_counts", "_ghosts", "_main", "_most_ghosts", "_small", "_small_size")

    def __init__(self, cache_capacity: int, *, small: float = 0.1) -> None:
        capacity = check_cache_capacity(cache_capacity)
        share = registry.entry("s3fifo").option("small").check(small)
        self._require_free("__init__")
        self._small_size = int(share * capacity)
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._most_ghosts = 0  # after the last eviction
        self._counts: dict[BlockHash, int] = {}
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

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        return (self._small, self._main, self._ghosts)[ring_index]

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self._finish_alone(hashes, hints)

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            queue = self._small
            if block_hash in self._ghosts:
                del self._ghosts[block_hash]
                queue = self._main
            queue[block_hash] = status
            self._resident[block_hash] = status
            self._counts[block_hash] = 0
        self._chains.insert(blocks)

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            del self._queue_of(block_hash)[block_hash]
            self._drop(block_hash)
            del self._counts[block_hash]
        self._chains.remove(hashes)

    def _queue_of(self, block_hash: BlockHash) -> _Queue:
        return self._small if block_hash in self._small else self._main

    def _touch(self, batch: list[BlockHash]) -> None:
        self._use(batch, counts=True)

    def _finished(self, batch: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        del hints, now
        self._use(batch, counts=False)

    def _use(self, batch: list[BlockHash], *, counts: bool) -> None:
        """Link the batch's chain, count a use of its ready blocks and renew the pending ones."""
        self._chains.link(batch)
        for block_hash in reversed(batch):
            status = self._resident.get(block_hash)
            if status is None:
                continue
            if status.ref_cnt < 0:
                self._queue_of(block_hash).move_to_end(block_hash)
            elif counts:
                self._chains.waiting.discard(block_hash)
                self._counts[block_hash] = min(self._counts[block_hash] + 1, MOST_COUNTED)

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        if n == 0:
            return []
        search = _Search(self, protected)
        if not search.can_find(n):
            return None
        # Small's length, including the blocks that replace the victims so far.
        small_length = len(self._small)
        for block_hash in self._choose_released(n, protected):
            search.choose(block_hash)
            small_length += block_hash in self._main
        while len(search.victims) < n:
            scans = [search.small, search.main]
            if small_length < self._small_size:
                scans.reverse()
            found, any_promoted = False, False
            for scan in scans:
                found, promoted = search.next_victim(scan)
                small_length -= promoted
                any_promoted = any_promoted or promoted > 0
                if found:
                    small_length += scan.is_main
                    break
            if not found and not any_promoted:
                small, main = search.small.blocks(self._small), search.main.blocks(self._main)
                search.take_deepest(n, chain(small, main))
        self._move(search.moved)
        self._let_go(search.victims, protected)
        return list(search.victims.items())

    def _move(self, moved: Mapping[BlockHash, int]) -> None:
        """Give blocks new counts, at the newest end of main."""
        for block_hash, count in moved.items():
            self._main[block_hash] = self._queue_of(block_hash).pop(block_hash)
            self._counts[block_hash] = count

    def _let_go(self, victims: Collection[BlockHash], asked: Collection[BlockHash]) -> None:
        """Evict victims; those of small become ghosts, at most as many as main is meant to hold.

        The ghosts that are asked for are about to leave: they are neither counted nor forgotten.
        """
        returning = {block_hash for block_hash in asked if block_hash in self._ghosts}
        for block_hash in victims:
            if block_hash in self._small:
                self._ghosts[block_hash] = None
        self._remove(victims)
        self._most_ghosts = self._cache_capacity - self._small_size + len(returning)
        others = (block_hash for block_hash in self._ghosts if block_hash not in returning)
        for block_hash in [*islice(others, max(0, len(self._ghosts) - self._most_ghosts))]:
            del self._ghosts[block_hash]

    def _clear(self) -> None:
        super()._clear()
        self._small.clear()
        self._main.clear()
        self._ghosts.clear()
        self._counts.clear()
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
        require(len(self._ghosts) <= self._most_ghosts, "ghosts are within main")
        self._chains.check(self._resident.keys())
        for block_hash in self._chains.waiting:
            count = self._counts[block_hash]
            require(count <= (block_hash in self._small), "a block that waits would not move")


class _Search:
    """A search for victims in both queues of a policy, which it does not change.

    A block may leave if it is idle, not protected and not chosen yet. It waits while a block behind
    it in its chain stays. If all evictable blocks wait, the blocks behind them are in use, and the
    deepest leave first.
    """

    def __init__(self, policy: S3FIFOCachePolicy, protected: Collection[BlockHash]) -> None:
        self.victims: dict[BlockHash, BlockStatus] = {}  # in eviction order
        self.counts = policy._counts
        self.chains = policy._chains
        self.moved: dict[BlockHash, int] = {}  # to the newest end of main, in order: their counts
        self.small = _Scan(self, policy._small, is_main=False)
        self.main = _Scan(self, policy._main, is_main=True)
        self._resident = policy._resident
        self._protected = protected
        self._num_gone: Counter[BlockHash] = Counter()  # blocks behind each that leave

    def can_find(self, n: int) -> bool:
        """Return whether there are `n` blocks that may leave."""
        return sum(1 for _ in islice(evictable(self._resident, self._protected), n)) == n

    def may_leave(self, block_hash: BlockHash) -> bool:
        """Return whether a block is idle, not protected and not chosen yet."""
        return (
            self._resident[block_hash].ref_cnt == 0
            and block_hash not in self._protected
            and block_hash not in self.victims
        )

    def waits(self, block_hash: BlockHash) -> bool:
        """Return whether a block behind this one stays."""
        return self.chains.num_behind(block_hash) > self._num_gone[block_hash]

    def idle(self, queue: Mapping[BlockHash, BlockStatus]) -> Iterator[BlockHash]:
        """Yield the blocks that are idle and not known to wait."""
        waiting = self.chains.waiting
        for block_hash, status in queue.items():
            if status.ref_cnt == 0 and block_hash not in waiting:
                yield block_hash

    def choose(self, block_hash: BlockHash) -> None:
        """Make a block a victim."""
        self.victims[block_hash] = self._resident[block_hash]
        before = self.chains.before(block_hash)
        if before is not None:
            self.chains.waiting.discard(before)
            self._num_gone[before] += 1

    def take_deepest(self, n: int, blocks: Iterable[BlockHash]) -> None:
        """Choose the deepest of `blocks`, in the order of the queues, up to `n` victims."""
        may_leave = filter(self.may_leave, blocks)
        depth = self.chains.depth
        for block_hash in nsmallest(n - len(self.victims), may_leave, lambda block: -depth(block)):
            self.choose(block_hash)

    def next_victim(self, scan: _Scan) -> tuple[bool, int]:
        """Scan on to a victim; return whether one was found, and how many moved to main."""
        promoted = 0
        for block_hash in scan:
            if not self.may_leave(block_hash):
                continue
            count = self.moved.get(block_hash, self.counts[block_hash])
            if count > (0 if scan.is_main else 1):
                # To the newest end of main; this costs one use, or all of them from small.
                self.moved.pop(block_hash, None)
                self.moved[block_hash] = count - 1 if scan.is_main else 0
                promoted += not scan.is_main
                scan.has_changed = self.main.has_changed = True
            elif not self.waits(block_hash):
                self.choose(block_hash)
                self.small.has_changed = self.main.has_changed = True
                return True, promoted
            elif block_hash not in self.moved:
                self.chains.waiting.add(block_hash)
        return False, promoted


class _Scan:
    """Repeated passes over a queue, while something has changed since the last one began."""

    def __init__(self, search: _Search, queue: _Queue, *, is_main: bool) -> None:
        self.is_main = is_main
        self.has_changed = True  # so a skipped block may be a victim now
        self._search = search  # which moves blocks to the newest end of main
        self._queue = queue  # as it was when the search began
        self._rest: Iterator[BlockHash] = iter(())

    def blocks(self, queue: Iterable[BlockHash]) -> Iterator[BlockHash]:
        """Yield blocks of the queue in their present order."""
        moved = self._search.moved
        arrived = list(moved) if self.is_main else []
        return chain((block for block in queue if block not in moved), arrived)

    def __iter__(self) -> Iterator[BlockHash]:
        return self

    def __next__(self) -> BlockHash:
        block_hash = next(self._rest, None)
        if block_hash is None and self.has_changed:
            self.has_changed = False
            self._rest = self.blocks(self._search.idle(self._queue))
            block_hash = next(self._rest, None)
        if block_hash is None:
            raise StopIteration
        return block_hash
