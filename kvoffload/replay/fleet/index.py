"""What a router knows of where blocks are: what it sent, or what engines publish.

Which engines have a block is a set of bits, engine 0 the lowest, so one walk over a prompt finds
how much of it each engine has. Blocks that no engine has take no memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import and_, or_
from typing import NamedTuple

from kvoffload import BlockHash

from .engine import DEVICE, HOST, TIER, Change

__all__ = ["EventIndex", "History", "Leads"]

_NOBODY = repeat(0)


def _engines(bits: int) -> Iterator[int]:
    """Yield the engines of a set, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _leads(holders: Iterable[int], length: int, num_engines: int) -> list[int]:
    """Return for how many leading blocks each engine is among those that hold a block.

    `holders` are those of each of `length` blocks. All but a few steps are made by iterators of the
    interpreter's own: a loop took three times as long.
    """
    found, alive, place = [length] * num_engines, (1 << num_engines) - 1, 0
    for left, blocks in Counter(accumulate(holders, and_)).items():  # they only get fewer
        for engine in _engines(alive & ~left):
            found[engine] = place
        alive, place = left, place + blocks
    return found


class _Holders(dict[BlockHash, int]):
    """Which engines have each block."""

    def of(self, blocks: Sequence[BlockHash]) -> Iterator[int]:
        """Return those of each block."""
        return map(self.get, blocks, _NOBODY)

    def add(self, blocks: Sequence[BlockHash], bits: int) -> None:
        """Note that engines have blocks."""
        get = self.get
        for block in blocks:
            self[block] = get(block, 0) | bits

    def remove(self, blocks: Sequence[BlockHash], bits: int) -> None:
        """Note that engines have blocks no more."""
        for block in blocks:
            rest = self.get(block, 0) & ~bits
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


class _Ahead:
    """The blocks of requests on their way to one engine, whose messages come in their order."""

    def __init__(self) -> None:
        self._sent = self._arrived = 0  # requests
        self._last: dict[BlockHash, int] = {}  # the request that has a block last, by number
        self._in_flight = deque[int]()  # blocks of each request

    def __bool__(self) -> bool:
        return self._sent > self._arrived

    def send(self, blocks: Sequence[BlockHash]) -> None:
        """Note that a request is on its way."""
        self._sent += 1
        self._last.update(dict.fromkeys(blocks, self._sent))
        self._in_flight.append(len(blocks))

    def arrive(self) -> None:
        """Note that the first request on its way has been heard of."""
        self._arrived += 1
        self._in_flight.popleft()
        if not self:
            self._last = {}
        elif len(self._last) > 2 * sum(self._in_flight):
            self._last = {block: last for block, last in self._last.items() if self.has(block)}

    def has(self, block: BlockHash) -> bool:
        """Return whether a block is on its way."""
        return self._last.get(block, 0) > self._arrived


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
        self._ahead = [_Ahead() for _ in range(num_engines)]

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
        self._ahead[engine].send(blocks)

    def arrive(self, engine: int) -> None:
        """End what the first `send` of those to an engine began that have not ended."""
        self._ahead[engine].arrive()

    def leads(self, blocks: Sequence[BlockHash]) -> Leads:
        """Return how many leading blocks of a request each engine has."""
        found: list[list[int]] = []
        with_ahead = [engine for engine, ahead in enumerate(self._ahead) if ahead]
        for furthest in range(1, len(self._held) + 1):
            held = [holders for holders in self._held[:furthest] if holders]
            every = held[0].of(blocks) if held else iter(())
            for holders in held[1:]:
                every = map(or_, every, holders.of(blocks))
            nearer = found[-1] if found else [0] * self._num_engines
            leads = _leads(every, len(blocks), self._num_engines) if held else [*nearer]
            for engine in with_ahead:
                leads[engine] = self._extended(
                    blocks, max(leads[engine], nearer[engine]), engine, held
                )
            found.append(leads)
        while len(found) <= TIER:
            found.append(found[-1])
        return Leads(found[DEVICE], found[HOST], found[TIER])

    def _extended(
        self, blocks: Sequence[BlockHash], lead: int, engine: int, held: list[_Holders]
    ) -> int:
        """Return a lead, as far as further blocks are held or on their way."""
        is_ahead: Callable[[BlockHash], bool] = self._ahead[engine].has
        while lead < len(blocks):
            block = blocks[lead]
            is_held = any(holders.get(block, 0) >> engine & 1 for holders in held)
            if not is_held and not is_ahead(block):
                break
            lead += 1
        return lead
