"""Indexes of routers, of the engines that have a block: by history, or by their events.

Which engines have a block is a set of bits, 64 to a word, engine 0 the lowest: one pass over a
prompt finds how much of it each engine has. That takes 8 bytes for each distinct block of the
trace, 64 engines and place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash

from .engine import DEVICE, HOST, TIER, Change
from .rows import Blocks

__all__ = ["EventIndex", "History", "Leads"]

_WORD = 64
_SPARE = 4096
"""Blocks by which notes of what has passed may outgrow what they are needed for."""

Words = npt.NDArray[np.uint64]
Numbers: TypeAlias = Blocks | list[int]


def _engines(bits: int) -> Iterator[int]:
    """Yield the engines of a set, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _as_bits(words: list[int]) -> int:
    """Return words, the lowest first, as one set."""
    return sum(word << _WORD * place for place, word in enumerate(words))


def _leads(held: Words, num_engines: int) -> list[int]:
    """Return for how many leading blocks each engine is among those that hold a block.

    `held` is (blocks, words): a set for each block.
    """
    found = [len(held)] * num_engines
    if not len(held):
        return found
    left = np.bitwise_and.accumulate(held, axis=0)  # they only get fewer
    changes = left[1:, 0] != left[:-1, 0]
    if left.shape[1] > 1:
        changes = (left[1:] != left[:-1]).any(axis=1)
    places = [0, *(np.flatnonzero(changes) + 1).tolist()]
    alive = (1 << num_engines) - 1
    for place, words in zip(places, left[places].tolist(), strict=True):
        bits = _as_bits(words)
        for engine in _engines(alive & ~bits):
            found[engine] = place
        alive = bits
    return found


class _Holders:
    """Which engines have each block."""

    def __init__(self, num_blocks: int, num_engines: int) -> None:
        self.words: Words = np.zeros((num_blocks, -(-num_engines // _WORD)), dtype=np.uint64)
        self.is_used = False  # whether an engine ever had a block
        everyone = (1 << num_engines) - 1
        self._everyone = np.array(
            [everyone >> _WORD * word & 2**_WORD - 1 for word in range(self.words.shape[1])],
            dtype=np.uint64,
        )

    def add(self, blocks: Numbers, engine: int) -> None:
        """Note that an engine has blocks."""
        word, bit = divmod(engine, _WORD)
        self.words[blocks, word] |= np.uint64(1 << bit)
        self.is_used = True

    def remove(self, blocks: Numbers, engine: int) -> None:
        """Note that an engine has blocks no more."""
        word, bit = divmod(engine, _WORD)
        self.words[blocks, word] &= ~np.uint64(1 << bit)

    def fill(self, blocks: Numbers, *, held: bool) -> None:
        """Note that all engines have blocks, or none."""
        self.words[blocks] = self._everyone if held else 0
        self.is_used = True

    def has(self, block: int, engine: int) -> bool:
        """Return whether an engine has a block."""
        word, bit = divmod(engine, _WORD)
        return bool(int(self.words[block, word]) >> bit & 1)


class History:
    """The blocks that a router sent to each engine, at most so many each.

    Parameters
    ----------
    num_blocks : int
        Distinct blocks of the trace.
    num_engines : int
        Engines.
    index_blocks : int
        Blocks of each that are remembered, those sent last, of a request the first; 0: all.
    """

    def __init__(self, num_blocks: int, num_engines: int, index_blocks: int = 0) -> None:
        self.sizes = [0] * num_engines
        """Blocks remembered of each engine."""
        self._num_engines = num_engines
        self._holders = _Holders(num_blocks, num_engines)
        self._last = np.zeros(num_blocks, dtype=np.int16)  # the engine that got a block last
        self._recent = [_Recent(index_blocks) for _ in range(num_engines)] if index_blocks else []

    def add(self, engine: int, blocks: Blocks) -> None:
        """Note that a request was sent to an engine."""
        self._last[blocks] = engine
        if self._recent:
            forgotten = self._recent[engine].use(blocks.tolist())
            self._holders.add(blocks, engine)
            self._holders.remove(forgotten, engine)
            self.sizes[engine] = len(self._recent[engine])
            return
        word, bit = divmod(engine, _WORD)
        is_new = (self._holders.words[blocks, word] >> np.uint64(bit) & np.uint64(1)) == 0
        new = blocks[is_new]
        if len(new):
            self._holders.add(new, engine)
            self.sizes[engine] += len(set(new.tolist()))

    def leads(self, blocks: Blocks) -> list[int]:
        """Return how many leading blocks of a request were sent to each engine."""
        return _leads(self._holders.words[blocks], self._num_engines)

    def lead_and_engine(self, blocks: Blocks) -> tuple[int, int]:
        """Return how many leading blocks were sent to any engine, and to which the last of them.

        To that it was sent last; if it is forgotten there, the lowest engine that has it; -1 where
        there are no such blocks.
        """
        is_known = self._holders.words[blocks].any(axis=1)
        lead = len(blocks) if is_known.all() else int(is_known.argmin())
        if not lead:
            return 0, -1
        last = int(blocks[lead - 1])
        engine = int(self._last[last])
        if not self._holders.has(last, engine):
            engine = next(_engines(_as_bits(self._holders.words[last].tolist())))
        return lead, engine


class _Recent:
    """The blocks that were sent to one engine last, at most so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests = 0
        self._used: dict[int, int] = {}  # by block, the request that has it last, by number
        self._log = deque[tuple[int, list[int]]]()  # requests by number, and their blocks
        self._logged = 0  # blocks of these

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._used)

    def use(self, blocks: list[int]) -> list[int]:
        """Make a request's blocks the most recent, the first last; return what is forgotten."""
        self._requests += 1
        used = dict.fromkeys(blocks, self._requests)
        self._used.update(used)
        self._log.append((self._requests, list(used)))
        self._logged += len(used)
        forgotten = []
        while len(self._used) > self._most:
            request, oldest = self._log[0]
            if not oldest:
                self._log.popleft()
                continue
            block = oldest.pop()
            self._logged -= 1
            if self._used.get(block) == request:
                del self._used[block]
                forgotten.append(block)
        if self._logged > 8 * len(self._used) + _SPARE:
            self._log = deque(
                (request, [block for block in log if self._used.get(block) == request])
                for request, log in self._log
            )
            self._logged = len(self._used)
        return forgotten


class Leads(NamedTuple):
    """Leading blocks of a request that each engine has, by how near they are."""

    device: list[int]
    host: list[int]  # there or nearer
    tier: list[int]  # likewise


class _Ahead:
    """The blocks of requests on their way to one engine, whose messages come in their order."""

    def __init__(self) -> None:
        self._sent = self._arrived = 0  # requests
        self._last: dict[int, int] = {}  # by block, the request that has it last, by number
        self._in_flight = deque[int]()  # blocks of each request
        self._num_in_flight = 0  # of all

    def __bool__(self) -> bool:
        """Return whether any request is on its way."""
        return self._sent > self._arrived

    def send(self, blocks: list[int]) -> None:
        """Note that a request is on its way."""
        self._sent += 1
        self._last.update(dict.fromkeys(blocks, self._sent))
        self._in_flight.append(len(blocks))
        self._num_in_flight += len(blocks)

    def arrive(self) -> None:
        """Note that the first request on its way has been heard of."""
        self._arrived += 1
        self._num_in_flight -= self._in_flight.popleft()
        if not self:
            self._last = {}
        elif len(self._last) > 2 * self._num_in_flight + _SPARE:
            self._last = {block: last for block, last in self._last.items() if self.has(block)}

    def has(self, block: int) -> bool:
        """Return whether a block is on its way."""
        return self._last.get(block, 0) > self._arrived


class EventIndex:
    """What engines have published of their caches, and what was sent to them.

    Parameters
    ----------
    numbers : mapping of BlockHash to int
        The number of each block of the trace.
    num_engines : int
        Engines.
    sees : int
        The furthest place that is noted: `DEVICE`, `HOST` or `TIER`.
    shared_tier : bool
        Whether all engines reach the blocks of one tier.
    """

    def __init__(
        self, numbers: Mapping[BlockHash, int], num_engines: int, sees: int, *, shared_tier: bool
    ) -> None:
        self._numbers = numbers
        self._num_engines = num_engines
        self._shared_tier = shared_tier
        self._held = [_Holders(len(numbers), num_engines) for _ in range(sees + 1)]
        self._ahead = [_Ahead() for _ in range(num_engines)]

    def hear(self, engine: int, changes: Sequence[Change]) -> None:
        """Note what a request made enter and leave."""
        for place, entered, left in changes:
            if place >= len(self._held):
                continue
            held = self._held[place]
            for hashes, is_held in ((entered, True), (left, False)):
                blocks = list(map(self._numbers.__getitem__, hashes))
                if place == TIER and self._shared_tier:
                    held.fill(blocks, held=is_held)
                elif is_held:
                    held.add(blocks, engine)
                else:
                    held.remove(blocks, engine)

    def send(self, engine: int, blocks: Blocks) -> None:
        """Count the blocks of a request as on an engine's device, until `arrive`."""
        self._ahead[engine].send(blocks.tolist())

    def arrive(self, engine: int) -> None:
        """End what the first `send` of those to an engine began that have not ended."""
        self._ahead[engine].arrive()

    def leads(self, blocks: Blocks) -> Leads:
        """Return how many leading blocks of a request each engine has."""
        with_ahead = [engine for engine, ahead in enumerate(self._ahead) if ahead]
        numbers = blocks.tolist() if with_ahead else []
        found: list[list[int]] = []
        every: Words = np.zeros((len(blocks), self._held[0].words.shape[1]), dtype=np.uint64)
        for held in self._held:
            leads = [*found[-1]] if found else [0] * self._num_engines
            if held.is_used:
                every |= held.words[blocks]
                leads = _leads(every, self._num_engines)
            for engine in with_ahead:
                lead = max(leads[engine], found[-1][engine] if found else 0)
                leads[engine] = self._extended(every, numbers, lead, engine)
            found.append(leads)
        while len(found) <= TIER:
            found.append(found[-1])
        return Leads(found[DEVICE], found[HOST], found[TIER])

    def _extended(self, held: Words, blocks: list[int], lead: int, engine: int) -> int:
        """Return a lead, as far as further blocks are held or on their way."""
        word, bit = divmod(engine, _WORD)
        has = self._ahead[engine].has
        while lead < len(blocks) and (has(blocks[lead]) or int(held[lead, word]) >> bit & 1):
            lead += 1
        return lead
