"""ARC (Megiddo & Modha, FAST'03, fig. 4), as vLLM adapts it to blocks in use.

Structure
    T1, blocks seen once; T2, blocks seen again; B1 and B2, the ghosts of each (see
    ``_arc_lists_py``). ``target_t1_size`` is the paper's p.
Differs from the paper
    A miss is always inserted into T1, even on a ghost hit (the paper's cases II and III move it to
    T2). The target adapts in `touch`, once for each touch of a ghost, not in the replacement of one
    page. One call replaces many blocks. Pinned, pending and protected blocks are skipped, and if
    the chosen list has no victim, the other yields one. Each ghost list is trimmed to the capacity;
    the paper limits all lists together to 2c.
Invariants
    B1 and B2 hold no more than the capacity each.
Cost
    insert, remove, get O(1); touch O(n); evict O(n + blocks skipped): one scan of each list,
    however many victims.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvoffload.types import BlockHash, BlockStatus

from ._arc_lists_py import ARCLists
from ._twin_py import Victims, require


class ARCCachePolicy(ARCLists):
    """A policy that balances recency and frequency by adaptive replacement, in vLLM's variant.

    Parameters
    ----------
    cache_capacity : int
        Upper bound of the target size of T1, and of each ghost list.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ()

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            self._b1.pop(block_hash, None)
            self._b2.pop(block_hash, None)
            self._t1[block_hash] = status
            self._resident[block_hash] = status

    def _touch(self, batch: list[BlockHash]) -> None:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        for block_hash in reversed(batch):
            if block_hash in t1:
                if t1[block_hash].ref_cnt < 0:
                    # A block that is being stored has not been seen twice.
                    t1.move_to_end(block_hash)
                else:
                    t2[block_hash] = t1.pop(block_hash)
            elif block_hash in t2:
                t2.move_to_end(block_hash)
            elif block_hash in b1:
                self._raise_target()
                self._renew_ghost(b1, block_hash)
            elif block_hash in b2:
                self._lower_target()
                self._renew_ghost(b2, block_hash)

    def _t1_gives(self, t1_size: int) -> bool:
        return t1_size >= int(self._target)

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        chosen = self._choose(n, protected)
        if chosen is None:
            return None
        victims = self._make_ghosts(chosen)
        if victims:
            for ghosts in (self._b1, self._b2):
                while len(ghosts) > self._cache_capacity:
                    ghosts.popitem(last=False)
        return victims

    def _check(self) -> None:
        super()._check()
        require(len(self._b1) <= self._cache_capacity, "B1 is within the capacity")
        require(len(self._b2) <= self._cache_capacity, "B2 is within the capacity")
