"""LRU that ranks by returns: ``lru?hints=1``.

Structure
    The structures of hit density with hints (see ``_hit_density_py``): records, ghosts, turns and
    the statistics of returns. The blocks without a turn are in one order, least recent first,
    regardless of their classes.
Differs from hit density
    A block without a turn has the density 1 / (age + 1), with the age in requests, so LRU's choice
    is the only candidate among them. It stores all blocks, or none if too few blocks may leave, and
    has no guard. Until a client says when its session returns, it evicts the same blocks as LRU.
Invariants
    As for hit density, with one order of the blocks without a turn, the first of its rings.
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
    """A policy that evicts by LRU, or by the sessions' return times if clients announce them.

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
        """The policy that ranks blocks without a turn: ``lru``."""
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
        """Return a block's last use, and the density that follows from it."""
        last = self._records[block_hash].last
        return last, 1.0 / (self._request - last + 1.0)
