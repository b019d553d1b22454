"""A search for victims in queues that are not ordered by use, in Python.

How it works
    A search reads the queues and its choices so far, and changes nothing; the policy applies the
    result when the search ends. A block may leave if it is idle, not protected and not chosen yet.
    It waits while a block behind it in its chain stays (see ``_chains_py``). If all evictable
    blocks wait, the blocks behind them are in use, and the deepest leave first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import nsmallest
from itertools import islice

from kvoffload.types import BlockHash, BlockStatus

from ._chains_py import Chains
from ._twin_py import evictable


class QueueSearch:
    """A choice of victims from queues whose blocks form chains; protected ones must stay."""

    def __init__(
        self,
        resident: Mapping[BlockHash, BlockStatus],
        chains: Chains,
        protected: Collection[BlockHash],
    ) -> None:
        self.victims: dict[BlockHash, BlockStatus] = {}  # in eviction order
        self._resident = resident
        self.chains = chains
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
