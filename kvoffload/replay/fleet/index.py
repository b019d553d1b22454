"""What a router knows of where blocks are: what it sent, or what engines publish.

Which engines have a block is a set of bits, engine 0 the lowest, so one walk over a prompt finds
how much of it each engine has. Blocks that no engine has take no memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvoffload import BlockHash

from .engine import DEVICE, HOST, TIER, Change

__all__ = ["EventIndex", "History", "Leads"]


def _engines(bits: int) -> Iterator[int]:
    """Yield the engines of a set, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class _Holders(dict[BlockHash, int]):
    """Which engines have each block."""

    def add(self, blocks: Sequence[BlockHash], bit: int) -> None:
        """Note that engines have blocks."""
        get = self.get
        for block in blocks:
            self[block] = get(block, 0) | bit

    def remove(self, blocks: Sequence[BlockHash], bit: int) -> None:
        """Note that engines have blocks no more."""
        for block in blocks:
            rest = self.get(block, 0) & ~bit
            if rest:
                self[block] = rest
            else:
                self.pop(block, None)


class History:
    """The blocks that a router sent to each engine, at most so many each.

    Parameters
    ----------
    num_engines : int
        Engines.
    index_blocks : int
        Blocks of each that are remembered, those sent last, of a request the first; 0: all.
    """

    def __init__(self, num_engines: int, index_blocks: int = 0) -> None:
        self.sizes = [0] * num_engines
        """Blocks remembered of each engine."""
        self._all = (1 << num_engines) - 1
        self._holders = _Holders()
        self._last: dict[BlockHash, int] = {}  # the engine to which a block was sent last
        self._most = index_blocks
        self._recent = [OrderedDict[BlockHash, None]() for _ in range(num_engines)]

    def add(self, engine: int, blocks: Sequence[BlockHash]) -> None:
        """Note that a request was sent to an engine."""
        bit, holders, last = 1 << engine, self._holders, self._last
        get = holders.get
        if not self._most:
            for block in blocks:
                held = get(block, 0)
                if not held & bit:
                    holders[block] = held | bit
                    self.sizes[engine] += 1
                last[block] = engine
            return
        recent = self._recent[engine]
        for block in reversed(blocks):
            recent[block] = None
            recent.move_to_end(block)
            holders[block] = get(block, 0) | bit
            last[block] = engine
        forgotten = [recent.popitem(last=False)[0] for _ in range(len(recent) - self._most)]
        holders.remove(forgotten, bit)
        for block in forgotten:
            if block not in holders:
                last.pop(block, None)
        self.sizes[engine] = len(recent)

    def leads(self, blocks: Sequence[BlockHash]) -> list[int]:
        """Return how many leading blocks of a request were sent to each engine."""
        get, alive, found = self._holders.get, self._all, [len(blocks)] * len(self.sizes)
        for place, block in enumerate(blocks):
            gone = alive & ~get(block, 0)
            if gone:
                for engine in _engines(gone):
                    found[engine] = place
                alive ^= gone
                if not alive:
                    break
        return found

    def lead_and_engine(self, blocks: Sequence[BlockHash]) -> tuple[int, int]:
        """Return how many leading blocks were sent to any engine, and to which the last of them.

        To that it was sent last; if it is forgotten there, the lowest engine that has it; -1 where
        there are no such blocks.
        """
        lead = 0
        for block in blocks:
            if block not in self._holders:
                break
            lead += 1
        if not lead:
            return 0, -1
        last = blocks[lead - 1]
        engine, held = self._last[last], self._holders[last]
        return lead, engine if held >> engine & 1 else next(_engines(held))


class Leads(NamedTuple):
    """Leading blocks of a request that each engine has, by how near they are."""

    device: list[int]
    host: list[int]  # there or nearer
    tier: list[int]  # likewise


class EventIndex:
    """What engines have published of their caches, and what was sent to them.

    Parameters
    ----------
    num_engines : int
        Engines.
    sees : int
        The furthest place that is noted: `DEVICE`, `HOST` or `TIER`.
    shared_tier : bool
        Whether all engines reach the blocks of one tier.
    """

    def __init__(self, num_engines: int, sees: int, *, shared_tier: bool) -> None:
        self._num_engines = num_engines
        self._all = (1 << num_engines) - 1
        self._shared_tier = shared_tier
        self._held = [_Holders() for _ in range(sees + 1)]
        self._ahead = [Counter[BlockHash]() for _ in range(num_engines)]
        self._with_ahead = 0  # engines to which something is on its way

    def hear(self, engine: int, changes: Sequence[Change]) -> None:
        """Note what a request made enter and leave."""
        for place, entered, left in changes:
            if place >= len(self._held):
                continue
            bits = self._all if place == TIER and self._shared_tier else 1 << engine
            self._held[place].add(entered, bits)
            self._held[place].remove(left, bits)

    def send(self, engine: int, blocks: Sequence[BlockHash]) -> None:
        """Count the blocks of a request as on an engine's device, until `arrive`."""
        self._ahead[engine].update(blocks)
        self._with_ahead |= 1 << engine

    def arrive(self, engine: int, blocks: Sequence[BlockHash]) -> None:
        """End what `send` began."""
        ahead = self._ahead[engine]
        for block in blocks:
            count = ahead[block]
            if count == 1:
                del ahead[block]
            else:
                ahead[block] = count - 1
        if not ahead:
            self._with_ahead &= ~(1 << engine)

    def leads(self, blocks: Sequence[BlockHash]) -> Leads:
        """Return how many leading blocks of a request each engine has."""
        found = [[len(blocks)] * self._num_engines for _ in self._held]
        alive = [self._all for _ in self._held]
        furthest = len(self._held) - 1
        holders = [held.get for held in self._held]
        ahead, with_ahead = self._ahead, self._with_ahead
        for place, block in enumerate(blocks):
            there = 0
            for near, get in enumerate(holders):
                there |= get(block, 0)
                if near == 0 and (wanted := alive[furthest] & ~there & with_ahead):
                    for engine in _engines(wanted):
                        if block in ahead[engine]:
                            there |= 1 << engine
                gone = alive[near] & ~there
                if gone:
                    for engine in _engines(gone):
                        found[near][engine] = place
                    alive[near] ^= gone
            if not alive[furthest]:
                break
        while len(found) <= TIER:
            found.append(found[-1])
        return Leads(found[DEVICE], found[HOST], found[TIER])
