"""LRU that ranks by returns: ``lru?hints=1``.

Structure
    What hit density has for hints (see ``_hit_density_py``): records, ghosts, turns, and what is
    learned of returns. The blocks of no turn stand in one order, least recent first, whatever
    their classes.
Differs from hit density
    A block of no turn has the density 1 / (age + 1), the age in requests: of those LRU's choice is
    the only candidate. Everything is stored, or nothing where too few blocks may leave; no guard.
    Until a client says when its session returns, the same blocks leave as by LRU.
Invariants
    Those of hit density, with one order of the blocks of no turn, the first of its rings.
Cost
    As hit density.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, islice

from kvoffload.types import BlockHash, BlockStatus

from ._guard_py import LRU
from ._hit_density_py import HitDensityCachePolicy, _Record, _Ring
from ._tails import Tail, by_density
from ._twin_py import Victims, evictable


class LRUByReturnCachePolicy(HitDensityCachePolicy):
    """A policy that evicts by LRU, but by when sessions return where their clients say it.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    """

    __slots__ = ()

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity, guard=0)

    @property
    def rule(self) -> str:
        """The policy that blocks of no turn are ranked by: ``lru``."""
        self._require_ready()
        return LRU

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        records = self._records
        others = (block for block in self._rings[0] if records[block].ring == ring_index)
        of_turns = (block_hash for block_hash, _ in self._turns.of_class(ring_index))
        return dict.fromkeys(chain(others, of_turns))

    # -- residence -------------------------------------------------------------------------

    def _place(self, record: _Record) -> _Ring:
        return self._rings[0] if record.part is None else record.part.blocks

    def _take_off(self, block_hash: BlockHash, record: _Record) -> BlockStatus:
        if record.part is not None:
            return self._turns.take(record.part, block_hash)
        return self._rings[0].pop(block_hash)

    def _put_on(self, block_hash: BlockHash, record: _Record, status: BlockStatus) -> None:
        if record.part is not None:
            self._turns.add(record.part, block_hash, status)
        else:
            self._rings[0][block_hash] = status

    # -- searches --------------------------------------------------------------------------

    def _make_room(  # type: ignore[override]  # it may refuse
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, Victims] | None:
        need = max(0, len(hashes) - num_free)
        victims = [victim for victim, _ in islice(self._in_order_of_leaving(protected), need)]
        if len(victims) < need:
            self._take_in(hashes, 0, [])
            return None
        return self._take_in(hashes, len(hashes), victims)

    def _in_order_of_leaving(
        self, protected: Collection[BlockHash]
    ) -> Iterator[tuple[BlockHash, float]]:
        released = self._choose_released(len(self._resident), protected)
        for block_hash in released:
            yield block_hash, 0.0
        others = Tail(0, evictable(self._rings[0], protected, released), self._measure_by_use)
        yield from by_density([others], self._tails_of_turns(protected, released))

    def _measure_by_use(self, block_hash: BlockHash) -> tuple[int, float]:
        """Return a block's last use, and the density that follows from that alone."""
        last = self._records[block_hash].last
        return last, 1.0 / (self._request - last + 1.0)
