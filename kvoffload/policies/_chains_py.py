"""Who stands behind whom: which resident blocks follow a block in a prompt.

A queue that use does not reorder cannot tell a prompt's head from its tail by position. Policies
with such a queue ask here, and let no block leave while one behind it is resident.

Rule
    In a touched batch each resident block stands behind the resident one just before it. It is
    linked once: while it has no block before it and none behind it. So the links never form a
    circle, whatever batches are touched.
Invariants
    ``num_behind`` of a block is the number of blocks linked to it. A block that outlived the one
    before it, because it was in use, has none before it; its depth stays.
Cost
    O(1) a block, but O(resident) where a block leaves before those behind it.
"""

from __future__ import annotations

from itertools import pairwise

from kvoffload.types import BlockHash

from ._twin_py import require


class Chains:
    """Link resident blocks to the ones before them."""

    __slots__ = ("_before", "_depths", "_num_behind")

    def __init__(self) -> None:
        self._before: dict[BlockHash, BlockHash] = {}
        self._num_behind: dict[BlockHash, int] = {}
        self._depths: dict[BlockHash, int] = {}

    def insert(self, block_hash: BlockHash) -> None:
        """Take in a block that is linked to none."""
        self._num_behind[block_hash] = 0
        self._depths[block_hash] = 0

    def link(self, batch: list[BlockHash]) -> None:
        """Learn from a touched batch."""
        known = self._num_behind
        for before, block in pairwise(batch):
            if before in known and known.get(block) == 0 and block not in self._before:
                if before == block:
                    continue
                self._before[block] = before
                known[before] += 1
                self._depths[block] = self._depths[before] + 1

    def remove(self, block_hash: BlockHash) -> None:
        """Forget a block that leaves."""
        before = self._before.pop(block_hash, None)
        if before is not None:
            self._num_behind[before] -= 1
        if self._num_behind.pop(block_hash):
            for block, parent in list(self._before.items()):
                if parent == block_hash:
                    del self._before[block]
        del self._depths[block_hash]

    def is_tail(self, block_hash: BlockHash) -> bool:
        """Tell whether no resident block stands behind this one."""
        return self._num_behind[block_hash] == 0

    def depth(self, block_hash: BlockHash) -> int:
        """Return how many blocks stood before this one when it was linked."""
        return self._depths[block_hash]

    def clear(self) -> None:
        """Forget everything."""
        self._before.clear()
        self._num_behind.clear()
        self._depths.clear()

    def check(self, resident: object) -> None:
        """Verify the invariants; raise AssertionError with the broken one."""
        require(self._num_behind.keys() == resident, "every resident block is in the chains")
        require(self._depths.keys() == resident, "every resident block has a depth")
        counted = dict.fromkeys(self._num_behind, 0)
        for block, before in self._before.items():
            require(block in counted and before in counted, "links join resident blocks")
            require(self._depths[before] < self._depths[block], "depth rises behind")
            counted[before] += 1
        require(counted == self._num_behind, "the blocks behind are counted")
