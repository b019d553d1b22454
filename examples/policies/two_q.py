"""2Q, the full version (Johnson & Shasha, VLDB'94).

Structure
    *A1in*: new blocks, first in, first out, meant to hold the share `kin` of the capacity. *A1out*:
    hashes that left A1in, up to the share `kout` of the capacity. *Am*: blocks that were asked
    for again after they had left A1in, least recently used first.
How it works
    `insert` puts a block of A1out into Am, any other into A1in. An access in A1in changes nothing;
    one in Am makes the block the most recent. A1in gives the victim if it holds more than its
    share, else Am.
Differs from the paper
    A block waits for those behind it in its chain (see ``_chained``). Room for a batch is made as
    if its blocks came one by one, into A1in. If a queue has no victim, the other gives one. The
    defaults are the paper's: a quarter of the capacity for A1in, hashes for half of it in A1out.
Cost
    get, insert O(1), remove O(log resident), touch, evict O(n log resident), amortised.
"""

from __future__ import annotations

from ._chained import ChainedPolicy, Ghosts, MayLeave


class TwoQ(ChainedPolicy):
    """A policy that keeps blocks that return soon after they left.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    kin : float
        Share of the capacity for new blocks, ``0.0 ... 1.0``.
    kout : float
        Hashes to remember, as a share of the capacity, ``0.0 ... 1.0``.

    References
    ----------
    Johnson & Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm",
    VLDB 1994.
    """

    def __init__(self, cache_capacity: int, *, kin: float = 0.25, kout: float = 0.5) -> None:
        for name, share in (("kin", kin), ("kout", kout)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} must be 0.0 ... 1.0, got {share!r}")
        self.kin, self.kout = kin, kout
        super().__init__(cache_capacity)

    def _reset(self) -> None:
        self._a1in = self._new_queue()
        self._am = self._new_queue()
        self._a1out = Ghosts(int(self.kout * self.cache_capacity))

    @property
    def num_ghosts(self) -> int:
        """Number of hashes in A1out."""
        return len(self._a1out)

    def _added(self, block_hash: bytes) -> None:
        queue = self._am if self._a1out.arrive(block_hash) else self._a1in
        queue.put(block_hash, self._now())

    def _touched(self, block_hash: bytes, *, is_access: bool) -> None:
        if is_access and block_hash in self._am:
            self._am.put(block_hash, self._now())

    def _gone(self, block_hash: bytes, *, evicted: bool) -> None:
        if block_hash in self._am:
            self._am.drop(block_hash)
            return
        self._a1in.drop(block_hash)
        if evicted:
            self._a1out.add(block_hash, remembered=True)

    def _choose(self, may_leave: MayLeave, arrivals: int) -> bytes | None:
        if len(self._a1in) + arrivals > int(self.kin * self.cache_capacity):
            return self._a1in.first(may_leave) or self._am.first(may_leave)
        return self._am.first(may_leave) or self._a1in.first(may_leave)
