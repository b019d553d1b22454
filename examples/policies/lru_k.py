"""LRU-K (O'Neil, O'Neil & Weikum, SIGMOD'93).

Structure
    The times of the last `k` accesses of each block. Those of evicted blocks are kept too, for up
    to the share `history` of the capacity, the latest at the end.
How it works
    The block whose k-th last access is the longest ago leaves. Blocks with fewer than k accesses
    leave first, the least recently used of them before the others.
Differs from the paper
    A block waits for those behind it in its chain (see ``_chained``). The paper's *correlated
    reference period* is the request here: its finish is not an access. Its *retained information
    period* is a number of blocks, so that memory is bounded.
Cost
    get O(1), insert O(k + log resident), remove O(log resident), touch O(n (k + log resident)),
    evict O(n log resident), amortised.
"""

from __future__ import annotations

from ._chained import ChainedPolicy, Ghosts, MayLeave


class LRUK(ChainedPolicy):
    """A policy that evicts the block whose k-th last access is the longest ago.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    k : int
        Accesses to remember, >= 1; 1 is LRU.
    history : float
        Blocks that left with their accesses remembered, as a share of the capacity, >= 0.

    References
    ----------
    O'Neil, O'Neil & Weikum, "The LRU-K Page Replacement Algorithm For Database Disk Buffering",
    SIGMOD 1993.
    """

    def __init__(self, cache_capacity: int, *, k: int = 2, history: float = 1.0) -> None:
        if type(k) is not int:
            raise TypeError(f"k must be an int, got {k!r}")
        if k < 1:
            raise ValueError(f"k must be >= 1, got {k}")
        if not 0.0 <= history < float("inf"):
            raise ValueError(f"history must be >= 0 and finite, got {history!r}")
        self.k, self.history = k, history
        super().__init__(cache_capacity)

    def _reset(self) -> None:
        self._queue = self._new_queue()
        self._accesses: dict[bytes, tuple[int, ...]] = {}  # of resident blocks, the last one last
        self._past = Ghosts(int(self.history * self.cache_capacity))

    @property
    def num_ghosts(self) -> int:
        """Number of blocks that left with their accesses remembered."""
        return len(self._past)

    def _added(self, block_hash: bytes) -> None:
        self._accesses[block_hash] = self._past.arrive(block_hash) or ()
        self._touched(block_hash, is_access=True)

    def _touched(self, block_hash: bytes, *, is_access: bool) -> None:
        if is_access:
            accesses = (*self._accesses[block_hash], self._now())[-self.k :]
            self._accesses[block_hash] = accesses
            kth = accesses[0] if len(accesses) == self.k else 0
            self._queue.put(block_hash, (kth, accesses[-1]))

    def _gone(self, block_hash: bytes, *, evicted: bool) -> None:
        self._queue.drop(block_hash)
        accesses = self._accesses.pop(block_hash)
        if evicted:
            self._past.add(block_hash, accesses)

    def _choose(self, may_leave: MayLeave, arrivals: int) -> bytes | None:  # noqa: ARG002
        return self._queue.first(may_leave)
