"""GDSF, greedy dual by size and frequency (Cherkasova, HP Laboratories, 1998).

Structure
    Each block has a count of accesses F and a priority H; the cache has an age L, 0 at first.
How it works
    H is set to L + F · C / S at each access, with the cost C of a miss and the size S. The block of
    the least H leaves, the least recently used among equals, and L becomes its H.
Differs from the paper
    A block waits for those behind it in its chain (see ``_chained``). All blocks have one size and
    one cost here, C = S = 1, so that H = L + F. The result is LFU with dynamic aging, like the
    built-in ``lfu``, but without an upper bound on the counts.
Cost
    get O(1), insert, remove O(log resident), touch, evict O(n log resident), amortised.
"""

from __future__ import annotations

from ._chained import ChainedPolicy, MayLeave


class GDSF(ChainedPolicy):
    """A policy that evicts the least used block, with counts that fade as the cache ages.

    References
    ----------
    Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
    HP Laboratories HPL-98-69, 1998.
    """

    def _reset(self) -> None:
        self._queue = self._new_queue()
        self._counts: dict[bytes, int] = {}
        self._age = 0

    def _added(self, block_hash: bytes) -> None:
        self._counts[block_hash] = 0
        self._touched(block_hash, is_access=True)

    def _touched(self, block_hash: bytes, *, is_access: bool) -> None:
        if is_access:
            self._counts[block_hash] += 1
            self._queue.put(block_hash, (self._age + self._counts[block_hash], self._now()))

    def _gone(self, block_hash: bytes, *, evicted: bool) -> None:
        priority, _ = self._queue.drop(block_hash)
        del self._counts[block_hash]
        if evicted:
            self._age = max(self._age, priority)  # a block that waited may have a lower one

    def _choose(self, may_leave: MayLeave, arrivals: int) -> bytes | None:  # noqa: ARG002
        return self._queue.first(may_leave)
