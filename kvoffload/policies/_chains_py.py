"""Chains: the resident blocks that follow each block in a prompt.

In a queue that use does not reorder, position does not distinguish a prompt's head from its tail.
Policies with such a queue use chains to keep a block while one behind it is resident.

Rule
    In a touched batch each resident block is behind the resident one just before it. A block is
    linked only while it has no block before it and none behind it, so the links never form a
    circle, whatever batches are touched.
Invariants
    A link holds the blocks behind, and names the block before and that block's link id. Ids are
    never reused, so a link to a block that has left, or has come back, is dead. A block that was in
    use when the one before it left has none before it; its depth stays. ``waiting`` holds blocks
    that a scan may skip: each has a block behind it.
Cost
    O(1) per block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise

from kvoffload.types import BlockHash

from ._twin_py import require


@dataclass(slots=True, eq=False)
class _Link:
    """The place of a block in its chain."""

    link_id: int  # of the block, from 1
    before: BlockHash | None = None
    before_id: int = 0  # of that block, when it was linked
    depth: int = 0  # blocks before this one when it was linked
    behind: set[BlockHash] = field(default_factory=set)  # blocks linked to this one


class Chains:
    """Links from resident blocks to the ones before them."""

    __slots__ = ("_link_ids", "_links", "waiting")

    def __init__(self) -> None:
        self._links: dict[BlockHash, _Link] = {}
        self._link_ids = count(1)
        # A scan adds the waiting blocks that it meets. They are removed here once no block is
        # behind them, and by the policy when a use may move or unmark them. A missing block only
        # costs another look.
        self.waiting: set[BlockHash] = set()

    def insert(self, hashes: Iterable[BlockHash]) -> None:
        """Add blocks without links."""
        for block_hash in hashes:
            self._links[block_hash] = _Link(next(self._link_ids))

    def before(self, block_hash: BlockHash) -> BlockHash | None:
        """Return the block before, or None if it has left or never existed."""
        link = self._links[block_hash]
        if link.before is None:
            return None
        before = self._links.get(link.before)
        return link.before if before and before.link_id == link.before_id else None

    def link(self, batch: list[BlockHash]) -> None:
        """Learn from a touched batch."""
        for before_hash, block_hash in pairwise(batch):
            before, link = self._links.get(before_hash), self._links.get(block_hash)
            if before is None or link is None or before is link:
                continue
            if not link.behind and self.before(block_hash) is None:
                link.before, link.before_id = before_hash, before.link_id
                link.depth = before.depth + 1
                before.behind.add(block_hash)

    def remove(self, hashes: Iterable[BlockHash]) -> None:
        """Forget blocks."""
        for block_hash in hashes:
            before = self.before(block_hash)
            if before is not None:
                self.waiting.discard(before)
                self._links[before].behind.discard(block_hash)
            self.waiting.discard(block_hash)
            del self._links[block_hash]

    def num_behind(self, block_hash: BlockHash) -> int:
        """Return how many resident blocks stand right behind this one."""
        return len(self._links[block_hash].behind)

    def depth(self, block_hash: BlockHash) -> int:
        """Return how many blocks stood before this one when it was linked."""
        return self._links[block_hash].depth

    def clear(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self._links.clear()

    def check(self, resident: Collection[BlockHash]) -> None:
        """Verify the invariants; raise AssertionError with the broken one."""
        require(self._links.keys() == set(resident), "every resident block is in the chains")
        behind: dict[BlockHash, set[BlockHash]] = {block_hash: set() for block_hash in self._links}
        for block_hash, link in self._links.items():
            before = self.before(block_hash)
            if before is not None:
                require(self._links[before].depth < link.depth, "depth rises behind")
                behind[before].add(block_hash)
        require(
            all(behind[block_hash] == link.behind for block_hash, link in self._links.items()),
            "the blocks behind are known",
        )
        require(all(map(self.num_behind, self.waiting)), "what waits has a block behind it")
