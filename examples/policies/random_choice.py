"""Random: every block is an equally likely victim (Belady, IBM Systems Journal 5(2), 1966).

Structure
    A list of all resident blocks, from which one is drawn; the last takes the victim's place.
Differs from the paper
    A block waits for those behind it in its chain (see ``_chained``): only the ends of chains are
    drawn. A block that waits, or is in use, is drawn again; after `DRAWS` of these in a row the
    ends that may leave are listed, and one of them is drawn.
Random numbers
    Those of Python's Mersenne Twister from `seed`, so that equal calls choose equal victims.
Cost
    get, insert, remove O(1), touch O(n), evict O(n), expected; O(resident) per victim if hardly a
    block may leave.
"""

from __future__ import annotations

import random

from ._chained import ChainedPolicy, MayLeave

DRAWS = 200


class Random(ChainedPolicy):
    """A policy that evicts a random block.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    seed : int
        Start of the random numbers.

    References
    ----------
    Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal
    5(2), 1966.
    """

    def __init__(self, cache_capacity: int, *, seed: int = 0) -> None:
        if type(seed) is not int:
            raise TypeError(f"seed must be an int, got {seed!r}")
        self.seed = seed
        super().__init__(cache_capacity)

    def _reset(self) -> None:
        self._random = random.Random(self.seed)
        self._list: list[bytes] = []
        self._indexes: dict[bytes, int] = {}

    def _added(self, block_hash: bytes) -> None:
        self._indexes[block_hash] = len(self._list)
        self._list.append(block_hash)

    def _touched(self, block_hash: bytes, *, is_access: bool) -> None:
        pass

    def _gone(self, block_hash: bytes, *, evicted: bool) -> None:  # noqa: ARG002
        index, last = self._indexes.pop(block_hash), self._list.pop()
        if last != block_hash:
            self._list[index] = last
            self._indexes[last] = index

    def _choose(self, may_leave: MayLeave, arrivals: int) -> bytes | None:  # noqa: ARG002
        for _ in range(min(DRAWS, len(self._list))):
            block_hash = self._list[self._random.randrange(len(self._list))]
            if block_hash not in self._behind and may_leave(block_hash):
                return block_hash
        ends = [each for each in self._list if each not in self._behind and may_leave(each)]
        return self._random.choice(ends) if ends else None
