"""SIEVE (Zhang, Yang, Yue, Vigfusson & Rashmi, NSDI'24), on blocks that form chains.

Structure
    One queue, oldest first, a visited bit a block, and a hand, the next block to look at. The queue
    is held in two ordered dicts: what the hand has passed in this lap and what lies ahead.
How it works
    `insert` puts a block at the newest end, not visited. `touch` marks a ready block visited and
    moves nothing. To evict, the hand goes from old to new and from the newest to the oldest again:
    a visited block loses its mark and stays, any other leaves. A request may touch its blocks
    twice: the second time all of them bear the mark already.
Differs from the paper
    A pinned, pending or protected block is passed over, its mark and place kept. So is a block with
    a resident block behind it in its chain (see ``_chains_py``): SIEVE's order says nothing about
    chains, and a tail without its head is lost. Where the hand finds nothing but such blocks in a
    whole lap, those behind them are in use: then the deepest leave first, and the hand goes back to
    the oldest. The touch of a pending block, which has not been seen again, moves it to the newest
    end, so that what was stored together stands tail first.
Invariants
    ``_resident`` is what was passed and what lies ahead; a visited block is resident.
Cost
    insert, remove, get O(1); touch O(n); evict amortised O(n) where few blocks are in use, visited
    or have others behind them, O(resident) for two laps at worst.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, islice

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus

from ._chains_py import Chains
from ._twin_py import PythonPolicy, evictable, require
from ._views import BlocksView

_Victims = list[tuple[BlockHash, BlockStatus]]


class SieveCachePolicy(PythonPolicy):
    """Evict the oldest block that was not used since the hand last passed it.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. SIEVE keeps it for the reader only.

    References
    ----------
    Zhang, Yang, Yue, Vigfusson & Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
    Algorithm for Web Caches", NSDI 2024.
    """

    __slots__ = ("_ahead", "_chains", "_passed", "_visited")

    def __init__(self, cache_capacity: int) -> None:
        capacity = check_cache_capacity(cache_capacity)
        self._require_free("__init__")
        self._passed: OrderedDict[BlockHash, BlockStatus] = OrderedDict()
        self._ahead: OrderedDict[BlockHash, BlockStatus] = OrderedDict()
        self._visited: set[BlockHash] = set()
        self._chains = Chains()
        super().__init__(capacity)

    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]:
        """Resident blocks and their live statuses, oldest first; read-only."""
        self._require_ready()
        return BlocksView(self, 0)

    @property
    def hand(self) -> BlockHash | None:
        """The next block to look at; None where a lap has ended."""
        return next(iter(self._ahead), None)

    def _ring(self, number: int) -> Collection[BlockHash]:  # noqa: ARG002 - it has one
        return ChainMap(self._ahead, self._passed)  # which goes through the last first

    def _insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        self._resident[block_hash] = status
        self._ahead[block_hash] = status
        self._chains.insert(block_hash)

    def _remove(self, block_hash: BlockHash) -> None:
        del self._resident[block_hash]
        queue = self._ahead if block_hash in self._ahead else self._passed
        del queue[block_hash]
        self._visited.discard(block_hash)
        self._chains.remove(block_hash)

    def _touch(self, batch: list[BlockHash]) -> None:
        self._chains.link(batch)
        for block_hash in reversed(batch):
            status = self._resident.get(block_hash)
            if status is None:
                continue
            if status.ref_cnt >= 0:
                self._visited.add(block_hash)
            else:
                queue = self._ahead if block_hash in self._ahead else self._passed
                del queue[block_hash]
                self._ahead[block_hash] = status

    def _evict(self, n: int, protected: Collection[BlockHash]) -> _Victims | None:
        if sum(1 for _ in islice(evictable(self._resident, protected), n)) < n:
            return None
        victims: _Victims = []
        passed_unchanged = 0
        while len(victims) < n:
            if passed_unchanged == len(self._resident):
                self._passed.update(self._ahead)
                self._ahead, self._passed = self._passed, OrderedDict()
                victims += self._deepest(n - len(victims), protected)
                break
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
            block_hash, status = self._ahead.popitem(last=False)
            self._passed[block_hash] = status
            passed_unchanged += 1
            if status.ref_cnt != 0 or block_hash in protected:
                continue
            if block_hash in self._visited:
                self._visited.remove(block_hash)
                passed_unchanged = 0
            elif self._chains.is_tail(block_hash):
                victims.append((block_hash, status))
                self._remove(block_hash)
                passed_unchanged = 0
        return victims

    def _deepest(self, n: int, protected: Collection[BlockHash]) -> _Victims:
        """Let the `n` deepest blocks go, whatever is behind them."""
        may_leave = evictable(self._ahead, protected)
        by_depth = sorted(may_leave, key=lambda block: -self._chains.depth(block[0]))
        for block_hash, _ in by_depth[:n]:
            self._remove(block_hash)
        return by_depth[:n]

    def _clear(self) -> None:
        for blocks in (self._resident, self._passed, self._ahead, self._visited, self._chains):
            blocks.clear()

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
        self._chains.check(self._resident.keys())
