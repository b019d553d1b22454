"""FIFO: the block that was stored first leaves first (Belady, IBM Systems Journal 5(2), 1966).

Structure
    One queue in the order of insertion. A use changes nothing: FIFO is LRU without `touch`.
Differs from the paper
    A block waits for those behind it in its chain (see ``_chained``), however long ago it came.
Cost
    get, insert O(1), remove O(log resident), touch O(n), evict O(n log resident), amortised.
"""

from __future__ import annotations

from ._chained import ChainedPolicy, MayLeave


class FIFO(ChainedPolicy):
    """A policy that evicts the block that was stored first.

    References
    ----------
    Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal
    5(2), 1966.
    """

    def _reset(self) -> None:
        self._queue = self._new_queue()

    def _added(self, block_hash: bytes) -> None:
        self._queue.put(block_hash, self._now())

    def _touched(self, block_hash: bytes, *, is_access: bool) -> None:
        pass

    def _gone(self, block_hash: bytes, *, evicted: bool) -> None:  # noqa: ARG002
        self._queue.drop(block_hash)

    def _choose(self, may_leave: MayLeave, arrivals: int) -> bytes | None:  # noqa: ARG002
        return self._queue.first(may_leave)
