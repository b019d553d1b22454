"""Sets of engines by block, as `kvoffload.replay.index` keeps them.

A set is a sequence of 64-bit words, with engine 0 as the lowest bit of the first: one pass over a
prompt finds how much of it each engine has. This takes 8 bytes per distinct block of the trace and
64 engines.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .requests import Blocks

__all__ = ["Ahead", "Holders", "Recent", "leads"]

_WORD = 64

Words = npt.NDArray[np.uint64]


def _engines(words: list[int]) -> Iterator[int]:
    """Yield the engines of a set, the lowest first."""
    bits = sum(word << _WORD * place for place, word in enumerate(words))
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class Holders:
    """Sets of the engines that have each block."""

    def __init__(self, num_blocks: int, num_engines: int) -> None:
        self._words: Words = np.zeros((num_blocks, -(-num_engines // _WORD)), dtype=np.uint64)
        everyone = (1 << num_engines) - 1
        self._everyone = np.array(
            [everyone >> _WORD * word & 2**_WORD - 1 for word in range(self._words.shape[1])],
            dtype=np.uint64,
        )

    def add(self, blocks: Blocks, engine: int) -> int:
        """Note that an engine has blocks; return the number that are new to it."""
        word, bit = divmod(engine, _WORD)
        former = self._words[blocks, word]
        self._words[blocks, word] = former | np.uint64(1 << bit)
        return len(set(blocks[former >> np.uint64(bit) & np.uint64(1) == 0].tolist()))

    def remove(self, blocks: Blocks, engine: int) -> None:
        """Note that an engine no longer has blocks."""
        word, bit = divmod(engine, _WORD)
        self._words[blocks, word] &= ~np.uint64(1 << bit)

    def fill(self, blocks: Blocks, is_held: bool) -> None:
        """Note that all engines have blocks, or none."""
        self._words[blocks] = self._everyone if is_held else 0

    def has(self, block: int, engine: int) -> bool:
        """Return whether an engine has a block."""
        return engine in _engines(self._words[block].tolist())

    def first(self, block: int) -> int:
        """Return the lowest engine that has a block, -1 if none has it."""
        return next(_engines(self._words[block].tolist()), -1)

    def lead(self, blocks: Blocks) -> int:
        """Return the number of leading blocks that any engine has."""
        is_held = self._words[blocks].any(axis=1)
        return len(blocks) if is_held.all() else int(is_held.argmin())


def leads(sets: Sequence[Holders], blocks: Blocks, num_engines: int) -> list[int]:
    """Return the number of leading blocks for which each engine is in at least one of the sets.

    Complexity: O(blocks up to the first at which no engine has the whole prefix).
    """
    found = [len(blocks)] * num_engines
    if not len(blocks):
        return found
    held = sets[0]._words[blocks]
    for one in sets[1:]:
        held |= one._words[blocks]
    left = np.bitwise_and.accumulate(held, axis=0)  # they only get fewer
    changes = (left[1:] != left[:-1]).any(axis=1)
    alive = set(range(num_engines))
    for place in [0, *(np.flatnonzero(changes) + 1).tolist()]:
        still = set(_engines(left[place].tolist()))
        for engine in alive - still:
            found[engine] = place
        alive = still
    return found


class Recent:
    """The most recently used blocks, up to a limit; the first of a row is the most recent.

    A block repeated within a row counts at its first place.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = OrderedDict[int, None]()

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._used)

    def use(self, blocks: Blocks) -> tuple[int, Blocks, Blocks]:
        """Make a row's blocks the most recent.

        Return the number of leading blocks that were remembered, all that were not, and the blocks
        that are forgotten, in that order.
        """
        used, numbers = self._used, blocks.tolist()
        missing = [block for block in numbers if block not in used]
        lead = numbers.index(missing[0]) if missing else len(numbers)
        for block in reversed(numbers):
            used[block] = None
            used.move_to_end(block)
        num_forgotten = max(0, len(used) - self._most)
        forgotten = [used.popitem(last=False)[0] for _ in range(num_forgotten)]
        return lead, np.array(missing, np.uint32), np.array(forgotten, np.uint32)


class Ahead(Holders):
    """Sets of engines by block for rows on their way, which arrive in order."""

    def __init__(self, num_blocks: int, num_engines: int) -> None:
        super().__init__(num_blocks, num_engines)
        self._sent = 0
        self._last: list[dict[int, int]] = [{} for _ in range(num_engines)]  # row with a block
        self._rows = [deque[tuple[int, Blocks]]() for _ in range(num_engines)]

    def send(self, engine: int, blocks: Blocks) -> None:
        """Note that a row is on its way to an engine."""
        self._sent += 1
        self._last[engine].update(dict.fromkeys(blocks.tolist(), self._sent))
        self._rows[engine].append((self._sent, blocks))
        self.add(blocks, engine)

    def arrive(self, engine: int) -> None:
        """Note that the events of the first row on its way to an engine have arrived."""
        row, blocks = self._rows[engine].popleft()
        last = self._last[engine]
        gone = [block for block in dict.fromkeys(blocks.tolist()) if last[block] == row]
        for block in gone:
            del last[block]
        self.remove(np.array(gone, np.uint32), engine)
