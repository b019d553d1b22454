"""ARC as published (Megiddo & Modha, FAST'03, fig. 4), for batches of blocks that may be in use.

Structure
    T1, blocks seen once; T2, blocks seen again; B1 and B2, the ghosts of each (see
    ``_arc_lists_py``). ``target_t1_size`` is the paper's p. A ghost records whether its return was
    counted.
How the paper's request x maps to calls
    Case I, x in T1 or T2: `touch` moves a ready block to T2. A pending block has not been seen
    again, so it stays in its list and becomes the most recent there. A request may touch its blocks
    twice, before and after its store; the second time the block is already in T2.
    Cases II and III, x in B1 or B2: the target adapts **once for each return of a ghost**, at the
    first `touch` or, without one before, at `insert`; `insert` then puts the block into T2.
    Case IV, x nowhere: `insert` puts the block into T1.
    REPLACE: `evict`, victim by victim, as if the new blocks came one by one: it uses the sizes as
    if the victims so far were gone, with a new block in T1 for each.
Differs from the paper
    Pinned, pending and protected blocks are skipped, and if the chosen list has no victim, the
    other yields one. The tie rule of REPLACE (|T1| = p and x in B2) is omitted: a batch has no
    single x. A touched ghost becomes its list's most recent, so that the batch that brings it back
    does not push it out first. A pending block of T1 moves to T2 if a block touched before it in
    the same batch, a later one of its chain, is in T2: a use of a block is also a use of its
    prefix.
Invariants
    A ghost list is empty if the paper's bounds leave it no room: |T1| + |B1| <= c or B1 is empty,
    all four <= 2c or B2 is empty.
Order in a chain
    Within each list a chain leaves tail first. Across the lists REPLACE decides, as published: it
    can take the last block of a chain in T2 while blocks behind it are still in T1.
Cost
    insert, remove, get O(1); touch O(n); evict O(n + blocks skipped): one scan of each list,
    however many victims.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvoffload.types import BlockHash, BlockStatus

from ._arc_lists_py import ARCLists
from ._twin_py import Victims, require


class ARCClassicCachePolicy(ARCLists):
    """A policy that balances recency and frequency by adaptive replacement, as published.

    Parameters
    ----------
    cache_capacity : int
        The paper's c: upper bound of the target size of T1, and of T1 and its ghosts together.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ()

    _newcomers = 1

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            if self._adapt(block_hash):
                self._b1.pop(block_hash, None)
                self._b2.pop(block_hash, None)
                self._t2[block_hash] = status
            else:
                self._t1[block_hash] = status
            self._resident[block_hash] = status
            self._trim_ghosts()

    def _touch(self, batch: list[BlockHash]) -> None:
        t1, t2 = self._t1, self._t2
        later_is_in_t2 = False
        for block_hash in reversed(batch):
            if block_hash in t1:
                if t1[block_hash].ref_cnt >= 0 or later_is_in_t2:
                    t2[block_hash] = t1.pop(block_hash)
                    later_is_in_t2 = True
                else:
                    t1.move_to_end(block_hash)
            elif block_hash in t2:
                t2.move_to_end(block_hash)
                later_is_in_t2 = True
            elif self._adapt(block_hash):
                ghosts = self._b1 if block_hash in self._b1 else self._b2
                self._renew_ghost(ghosts, block_hash)

    def _adapt(self, block_hash: BlockHash) -> bool:
        """Adapt the target to the return of a ghost, once; return whether the hash is a ghost."""
        if block_hash in self._b1:
            if not self._b1[block_hash]:
                self._raise_target()
            return True
        if block_hash in self._b2:
            if not self._b2[block_hash]:
                self._lower_target()
            return True
        return False

    def _t1_gives(self, t1_size: int) -> bool:
        return t1_size > self._target

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        chosen = self._choose(n, protected)
        if chosen is None:
            return None
        victims = self._make_ghosts(chosen)
        self._trim_ghosts()
        return victims

    def _trim_ghosts(self) -> None:
        """Drop the oldest ghosts that the paper's bounds leave no room for (case IV)."""
        b1, b2 = self._b1, self._b2
        while b1 and len(self._t1) + len(b1) > self._cache_capacity:
            b1.popitem(last=False)
        while b2 and len(self._resident) + len(b1) + len(b2) > 2 * self._cache_capacity:
            b2.popitem(last=False)

    def _check(self) -> None:
        super()._check()
        length = len(self._resident) + len(self._b1) + len(self._b2)
        require(
            not self._b1 or len(self._t1) + len(self._b1) <= self._cache_capacity,
            "T1 and B1 are within the capacity",
        )
        require(
            not self._b2 or length <= 2 * self._cache_capacity,
            "all lists are within twice the capacity",
        )
