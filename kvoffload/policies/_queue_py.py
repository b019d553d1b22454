"""Policies whose queues are not ordered by use: SIEVE and S3-FIFO.

Structure
    The resident blocks are in queues, oldest first, and have a count of uses. A use of a ready
    block raises its count, up to a limit, and moves nothing; one of a pending block, which has not
    been seen again, moves it to the newest end, so that blocks stored together are ordered tail
    first. A pinned, pending or protected block keeps its place and count; a search skips it.
SIEVE (Zhang, Yang, Yue, Vigfusson & Rashmi, NSDI'24)
    One queue and a hand, which points at the next block to examine: two ordered dicts hold the
    blocks that the hand has passed in this lap and those ahead. A count is 1 if the block was
    visited. The hand moves from old to new and wraps from the newest to the oldest: a visited block
    loses its mark and stays, any other leaves. If the newest block leaves, the hand goes to the
    oldest, as in the paper, not to the next block to be stored. When a request finishes, all its
    ready blocks are already marked.
S3-FIFO (Yang, Zhang, Qiu, Yue & Rashmi, SOSP'23), on blocks that form chains
    Two queues: *small*, for new blocks, meant to hold the share `small` of the capacity, and
    *main*. *Ghosts*: hashes that left small, at most as many as main is meant to hold. A count is
    0 ... 3. A stored block that is a ghost joins main, any other one small; the eviction before it,
    for the same batch, does not forget that ghost. Small yields the victim if it holds its share,
    else main does. Small's oldest moves to main, with the count 0, if it was used more than once;
    else it leaves and becomes a ghost. Main's oldest returns to the newest end and its count drops
    by 1, or it leaves if its count is 0. Room for a batch is made as if its blocks came one by one:
    each victim makes small larger by one. The end of a request counts no use, but moves the blocks
    that have none to the newest end of their queue, as if its stores had just begun.
    Differs from the paper: a block does not leave before a resident block behind it in its chain.
    An eviction of several blocks continues the scan of each queue from victim to victim; the paper
    begins at the oldest for each. A scan examines once each block that its queue had when it began;
    it begins again if something has changed since. If one queue has no victim, the other yields; if
    neither has one, the blocks behind are in use, and the deepest leave first.
Chains, for S3-FIFO
    In a queue that use does not reorder, position does not distinguish a prompt's head from its
    tail. In a touched batch each resident block is behind the resident one just before it. A block
    is linked only while it has no block before it and none behind it, so the links never form a
    circle, whatever batches are touched. A block that was in use when the one before it left has
    none before it; its depth stays. ``waiting`` holds blocks that a scan may skip: each has a block
    behind it, and is removed once it has none or is used. A missing one only costs another look.
Cost
    insert, remove, get O(1); touch O(n); evict O(n + blocks skipped): those in use, each lap or
    scan, and those that wait, once. O(resident) if all idle blocks wait.
"""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice, pairwise
from typing import ClassVar

from kvoffload.types import BlockHash, BlockStatus, Hints

from ._queue import GHOSTS, MAIN, S3FIFO, SMALL, Sieve
from ._twin_py import PythonPolicy, Victims, evictable, may_leave, require

# Queues of SIEVE, from 0.
PASSED, AHEAD = range(2)


class Queues(PythonPolicy):
    """One queue or two, oldest first, and the counts of their blocks."""

    __slots__ = ("_counts", "_queues")

    _most_counted: ClassVar[int]

    def _open(self, cache_capacity: int) -> None:
        """Construct the policy."""
        super().__init__(cache_capacity)

    def _reset(self) -> None:
        self._queues: list[OrderedDict[BlockHash, BlockStatus]] = [OrderedDict(), OrderedDict()]
        self._counts: dict[BlockHash, int] = {}

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        return self._queues[ring_index]

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            self._counts[block_hash] = 0
            self._renew(block_hash, status)
            self._resident[block_hash] = status

    def _put(self, block_hash: BlockHash, at: int, status: BlockStatus) -> None:
        """Put a block at the newest end of a queue."""
        for queue in self._queues:
            queue.pop(block_hash, None)
        self._queues[at][block_hash] = status

    def _drop(self, block_hash: BlockHash) -> BlockStatus:
        for queue in self._queues:
            queue.pop(block_hash, None)
        status = super()._drop(block_hash)
        self._counts.pop(block_hash, None)
        return status

    def _touch(self, batch: list[BlockHash]) -> None:
        self._use(batch, counts=True)

    def _use(self, batch: list[BlockHash], *, counts: bool) -> None:
        """Count a use of ready blocks, or renew the unused ones; renew the pending ones."""
        for block_hash in reversed(batch):
            status = self._resident.get(block_hash)
            if status is None:
                continue
            if status.ref_cnt < 0 or not (counts or self._counts[block_hash]):
                self._renew(block_hash, status)
            elif counts:
                self._counts[block_hash] = min(self._counts[block_hash] + 1, self._most_counted)

    def _renew(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Move a block to the newest end."""
        self._put(block_hash, int(block_hash in self._queues[1]), status)

    def _can_evict(self, n: int, protected: Collection[BlockHash]) -> bool:
        """Return whether there are `n` blocks that may leave."""
        return sum(1 for _ in islice(evictable(self._resident, protected), n)) == n

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        return chain.from_iterable(queue.values() for queue in self._queues)

    def _check(self) -> None:
        super()._check()
        blocks = [*chain.from_iterable(queue.items() for queue in self._queues)]
        require(dict(blocks) == self._resident, "resident is the union of the queues")
        require(len(blocks) == len(self._resident), "a hash is in one queue at most")
        require(self._counts.keys() == self._resident.keys(), "every block has one count")
        counts = self._counts.values()
        require(all(0 <= count <= self._most_counted for count in counts), "counts are in bounds")


class SieveCachePolicy(Sieve, Queues):
    __doc__ = Sieve.__doc__
    __slots__ = ("_newest",)

    _most_counted = 1

    def _at_hand(self) -> BlockHash | None:
        return next(iter(self._queues[AHEAD]), None)

    def _ring(self, ring_index: int) -> Collection[BlockHash]:  # noqa: ARG002 - it has one
        return ChainMap(*reversed(self._queues))  # which goes through the last first

    def _reset(self) -> None:
        super()._reset()
        self._newest: BlockHash | None = None  # the block that joined the newest end last

    def _renew(self, block_hash: BlockHash, status: BlockStatus) -> None:
        self._put(block_hash, AHEAD, status)
        self._newest = block_hash

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        if not self._can_evict(n, protected):
            return None
        victims = self._choose_released(n, protected)
        block_hash = None  # the last block that the hand has passed
        while len(victims) < n:
            passed, ahead = self._queues
            if not ahead:
                self._begin_lap()
                continue
            block_hash, status = ahead.popitem(last=False)
            passed[block_hash] = status
            if not may_leave(block_hash, status, protected) or block_hash in victims:
                continue
            if self._counts[block_hash]:
                self._counts[block_hash] = 0
            else:
                victims[block_hash] = status
        if block_hash is not None and block_hash == self._newest:
            self._begin_lap()
        self._remove(victims)
        return list(victims.items())

    def _begin_lap(self) -> None:
        """Put the hand before the oldest block."""
        passed, ahead = self._queues
        passed.update(ahead)
        self._queues = [OrderedDict(), passed]


@dataclass(slots=True, eq=False)
class _Link:
    """The place of a block in its chain."""

    block_hash: BlockHash
    before: _Link | None = None  # of the block before, which may have left
    depth: int = 0  # blocks before this one when it was linked
    num_behind: int = 0  # blocks linked to this one


class S3FIFOCachePolicy(S3FIFO, Queues):
    __doc__ = S3FIFO.__doc__
    __slots__ = ("_ghosts", "_links", "_most_ghosts", "_small_size", "_waiting")

    _most_counted = 3

    def _open(self, cache_capacity: int, small_size: int = 0) -> None:
        super()._open(cache_capacity)
        self._small_size = small_size

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return len(self._ghosts)

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self._finish_alone(hashes, hints)

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        return self._ghosts if ring_index == GHOSTS else super()._ring(ring_index)

    def _reset(self) -> None:
        super()._reset()
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._links: dict[BlockHash, _Link] = {}
        self._waiting: set[BlockHash] = set()
        self._most_ghosts = 0  # after the last eviction

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            self._put(block_hash, MAIN if block_hash in self._ghosts else SMALL, status)
            self._ghosts.pop(block_hash, None)
            self._counts[block_hash] = 0
            self._links[block_hash] = _Link(block_hash)
            self._resident[block_hash] = status

    def _drop(self, block_hash: BlockHash) -> BlockStatus:
        status = super()._drop(block_hash)
        self._leave_chain(block_hash)
        del self._links[block_hash]
        self._waiting.discard(block_hash)
        return status

    def _finished(self, batch: list[BlockHash], hints: Hints | None) -> None:
        del hints
        self._use(batch, counts=False)

    def _use(self, batch: list[BlockHash], *, counts: bool) -> None:
        self._link(batch)
        if counts:
            self._waiting.difference_update(batch)
        super()._use(batch, counts=counts)

    def _link(self, batch: list[BlockHash]) -> None:
        """Learn the chain of a touched batch."""
        for before, link in pairwise(map(self._links.get, batch)):
            if before is None or link is None or before is link:
                continue
            if not link.num_behind and self._before(link) is None:
                link.before, link.depth = before, before.depth + 1
                before.num_behind += 1

    def _leave_chain(self, block_hash: BlockHash) -> None:
        """Remove a block from its chain; the one before it no longer waits for it."""
        link = self._links[block_hash]
        before = self._before(link)
        if before is not None:
            link.before = None
            before.num_behind -= 1
            self._waiting.discard(before.block_hash)

    def _before(self, link: _Link) -> _Link | None:
        """Return the link of the block before, or None if it has left or never existed."""
        if link.before is not None and self._links.get(link.before.block_hash) is not link.before:
            link.before = None
        return link.before

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        if n == 0:
            return []
        if not self._can_evict(n, protected):
            return None
        search = _Search(self, protected)
        for block_hash in self._choose_released(n, protected):
            search.choose(block_hash)
        while len(search.victims) < n:
            length = search.small_length
            first = MAIN if length < self._small_size else SMALL
            found = search.next_victim(first) or search.next_victim(1 - first)
            if not found and search.small_length == length:  # none has moved from small
                search.take_deepest(n)
        for block_hash in search.moved:
            self._put(block_hash, MAIN, self._resident[block_hash])
        self._let_go(search.victims, protected)
        return list(search.victims.items())

    def _let_go(self, victims: Collection[BlockHash], asked: Collection[BlockHash]) -> None:
        """Evict victims; those of small become ghosts, at most as many as main is meant to hold.

        The ghosts that are asked for are about to leave: they are neither counted nor forgotten.
        """
        returning = {block_hash for block_hash in asked if block_hash in self._ghosts}
        for block_hash in victims:
            if block_hash in self._queues[SMALL]:
                self._ghosts[block_hash] = None
        self._remove(victims)
        self._most_ghosts = self._cache_capacity - self._small_size + len(returning)
        others = (block_hash for block_hash in self._ghosts if block_hash not in returning)
        for block_hash in [*islice(others, max(0, len(self._ghosts) - self._most_ghosts))]:
            del self._ghosts[block_hash]

    def _check(self) -> None:
        super()._check()
        require(self._resident.keys().isdisjoint(self._ghosts), "a ghost is not resident")
        require(len(self._ghosts) <= self._most_ghosts, "ghosts are within main")
        require(self._links.keys() == self._resident.keys(), "every block is in the chains")
        behind: Counter[BlockHash] = Counter()
        for link in self._links.values():
            before = self._before(link)
            if before is not None:
                require(before.depth < link.depth, "depth rises behind")
                behind[before.block_hash] += 1
        for block_hash, link in self._links.items():
            require(link.num_behind == behind[block_hash], "the blocks behind are counted")
        for block_hash in self._waiting:
            require(behind[block_hash] > 0, "what waits has a block behind it")
            is_new = block_hash in self._queues[SMALL]
            require(self._counts[block_hash] <= is_new, "a block that waits would not move")


class _Search:
    """A search for victims in both queues of a policy, which has enough of them.

    A block may leave if it is idle, not protected and not chosen yet. It waits while a block behind
    it in its chain stays. If all evictable blocks wait, the blocks behind them are in use, and the
    deepest leave first. The queues change only after the search.
    """

    def __init__(self, policy: S3FIFOCachePolicy, protected: Collection[BlockHash]) -> None:
        self.victims: dict[BlockHash, BlockStatus] = {}  # in eviction order
        self.moved: dict[BlockHash, None] = {}  # to the newest end of main, in order
        # Small's length, with the blocks that replace the victims so far.
        self.small_length = len(policy._queues[SMALL])
        self._policy = policy
        self._protected = protected
        self._has_changed = [True, True]  # of each queue, so a skipped block may be a victim now
        self._scans = (self._scan(SMALL), self._scan(MAIN))

    def may_leave(self, block_hash: BlockHash) -> bool:
        """Return whether a block is idle, not protected and not chosen yet."""
        status = self._policy._resident[block_hash]
        return may_leave(block_hash, status, self._protected) and block_hash not in self.victims

    def choose(self, block_hash: BlockHash) -> None:
        """Make a block a victim."""
        self.victims[block_hash] = self._policy._resident[block_hash]
        self.small_length += block_hash in self._policy._queues[MAIN] or block_hash in self.moved
        self._policy._leave_chain(block_hash)
        self._has_changed = [True, True]

    def take_deepest(self, n: int) -> None:
        """Choose the deepest blocks, in the order of the queues, up to `n` victims."""
        idle = filter(self.may_leave, chain(self._idle(SMALL), self._idle(MAIN)))
        links = self._policy._links
        num_missing = n - len(self.victims)
        for block_hash in nsmallest(num_missing, idle, lambda block: -links[block].depth):
            self.choose(block_hash)

    def next_victim(self, at: int) -> bool:
        """Scan on to a victim; False if there is none."""
        counts = self._policy._counts
        for block_hash in iter(self._scans[at].__next__, None):
            if not self.may_leave(block_hash):
                continue
            if counts[block_hash] > (at == SMALL):
                # To the newest end of main; this costs one use, or all of them from small.
                self.moved.pop(block_hash, None)
                self.moved[block_hash] = None
                counts[block_hash] = counts[block_hash] - 1 if at == MAIN else 0
                self.small_length -= at == SMALL
                self._has_changed[at] = self._has_changed[MAIN] = True
            elif not self._policy._links[block_hash].num_behind:
                self.choose(block_hash)
                return True
            else:
                self._policy._waiting.add(block_hash)
        return False

    def _scan(self, at: int) -> Iterator[BlockHash | None]:
        """Yield the blocks of a queue that may leave, again if something has changed; or None."""
        waiting = self._policy._waiting
        while True:
            while self._has_changed[at]:
                self._has_changed[at] = False
                yield from (block for block in self._idle(at) if block not in waiting)
            yield None

    def _idle(self, at: int) -> Iterator[BlockHash]:
        """Yield the idle blocks of a queue in their present order."""
        queue = self._policy._queues[at].items()
        arrived = list(self.moved) if at == MAIN else []
        return chain((b for b, s in queue if s.ref_cnt == 0 and b not in self.moved), arrived)
