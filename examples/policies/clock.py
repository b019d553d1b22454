"""CLOCK: first in, first out, with a second chance for used blocks (Corbató, 1968).

Structure
    A queue, the oldest at the hand, and a mark on each block that was used.
How it works
    An access marks a block. If the hand meets a mark, it clears it and the block goes to the back
    of the queue; the first block without a mark leaves. This is equivalent to a hand on a circle.
Differs from the paper
    A block waits for those behind it in its chain (see ``_chained``). The hand passes over blocks
    that wait or are in use, and leaves their marks. The paper has one or several mark bits; this
    version has one.
Cost
    get, insert O(1), remove O(log resident), touch O(n), evict O((n + marks cleared) log resident),
    amortised.
"""

from __future__ import annotations

from ._chained import ChainedPolicy, MayLeave


class CLOCK(ChainedPolicy):
    """A policy that evicts the oldest block that was not used since the hand last met it.

    References
    ----------
    Corbató, "A Paging Experiment with the Multics System", MIT Project MAC Report MAC-M-384, 1968.
    """

    def _reset(self) -> None:
        self._queue = self._new_queue()
        self._marked: set[bytes] = set()

    def _added(self, block_hash: bytes) -> None:
        self._queue.put(block_hash, self._now())

    def _touched(self, block_hash: bytes, *, is_access: bool) -> None:
        if is_access:
            self._marked.add(block_hash)

    def _gone(self, block_hash: bytes, *, evicted: bool) -> None:  # noqa: ARG002
        self._queue.drop(block_hash)
        self._marked.discard(block_hash)

    def _choose(self, may_leave: MayLeave, arrivals: int) -> bytes | None:  # noqa: ARG002
        while (block_hash := self._queue.first(may_leave)) in self._marked:
            self._marked.remove(block_hash)
            self._queue.put(block_hash, self._now())
        return block_hash
