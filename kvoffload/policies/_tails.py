"""The order in which rings yield blocks from their old ends, by each rule of hit density.

A *tail* is an iterator over the evictable blocks of a ring, in the order in which the ring yields
them; it points at the next one. Heaps find the tail that yields next; an entry is valid while its
tail has not moved since the entry was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from kvoffload.types import BlockHash, BlockStatus

# Depart from LRU order only for a block that is sparser by a quarter: estimates are not more
# accurate.
_NEARLY = 1.25

#: Return the last use and the density of a block.
Measure = Callable[[BlockHash], tuple[int, float]]


class Tail:
    """The next block that a ring yields."""

    __slots__ = ("_blocks", "_measure", "block_hash", "density", "last", "place")

    block_hash: BlockHash | None  # None: the ring is exhausted
    last: int
    density: float

    def __init__(
        self, place: int, blocks: Iterator[tuple[BlockHash, BlockStatus]], measure: Measure
    ) -> None:
        self.place = place  # ties go to the lowest
        self._blocks = blocks
        self._measure = measure
        self.last, self.density = 0, 0.0
        self.advance()

    def advance(self) -> None:
        """Go on to the next block."""
        self.block_hash = next(self._blocks, (None,))[0]
        if self.block_hash is not None:
            self.last, self.density = self._measure(self.block_hash)


class _Heap:
    """Tails by a key, least first."""

    def __init__(self, tails: list[Tail], key: Callable[[Tail], tuple[float, ...]]) -> None:
        self._key = key
        self._entries: list[tuple[tuple[float, ...], int, BlockHash, Tail]] = []
        for tail in tails:
            self.add(tail)

    def add(self, tail: Tail) -> None:
        """Record a tail's position."""
        if tail.block_hash is not None:
            heappush(self._entries, (self._key(tail), tail.place, tail.block_hash, tail))

    def least(self) -> Tail | None:
        """Return the tail with the least key."""
        while self._entries:
            _, _, block_hash, tail = self._entries[0]
            if tail.block_hash is block_hash:
                return tail
            heappop(self._entries)
        return None


def _by_density(tail: Tail) -> tuple[float, ...]:
    return (tail.density,)


def _by_last(tail: Tail) -> tuple[float, ...]:
    return (tail.last,)


def _by_density_and_last(tail: Tail) -> tuple[float, ...]:
    return (tail.density, tail.last)


def by_density(tails: list[Tail], turns: list[Tail]) -> Iterator[tuple[BlockHash, float]]:
    """Yield the sparsest block of all, or the oldest of `tails` if it is nearly as sparse.

    `turns` has two tails per ring; if one of them points at the sparsest block, that block is
    yielded.
    """
    given: set[BlockHash] = set()
    densities, ages = _Heap(tails, _by_density), _Heap(tails, _by_last)
    of_turns = _Heap(turns, _by_density_and_last)
    while True:
        sparsest, oldest, turn = densities.least(), ages.least(), of_turns.least()
        while turn is not None and turn.block_hash in given:
            turn.advance()
            of_turns.add(turn)
            turn = of_turns.least()
        if turn is not None and (
            sparsest is None or (turn.density, turn.last) < (sparsest.density, sparsest.last)
        ):
            block_hash, density = _give(turn)
            given.add(block_hash)
            yield block_hash, density
            of_turns.add(turn)
            continue
        if sparsest is None or oldest is None:
            return
        tail = sparsest if oldest.density > _NEARLY * sparsest.density else oldest
        yield _give(tail)
        densities.add(tail)
        ages.add(tail)


def least_recent(tails: list[Tail]) -> Iterator[tuple[BlockHash, float]]:
    """Yield the oldest of all tails."""
    ages = _Heap(tails, _by_last)
    while (tail := ages.least()) is not None:
        yield _give(tail)
        ages.add(tail)


def by_arc(
    once: list[Tail], again: list[Tail], t1_size: int, target: float
) -> Iterator[tuple[BlockHash, float]]:
    """Yield the victims of ARC's REPLACE: the tails of `once` are T1, those of `again` T2."""
    t1, t2 = _Heap(once, _by_last), _Heap(again, _by_last)
    while True:
        one, two = t1.least(), t2.least()
        if one is not None and (two is None or t1_size > target or one.last == two.last):
            # The blocks of a request that were never used again are its tail.
            yield _give(one)
            t1.add(one)
        elif two is not None:
            # The block that replaces it enters T1.
            t1_size += 1
            yield _give(two)
            t2.add(two)
        else:
            return


def _give(tail: Tail) -> tuple[BlockHash, float]:
    """Return the block at which a tail points, and advance."""
    given = tail.block_hash, tail.density
    tail.advance()
    return given  # type: ignore[return-value]  # it points at one
