# cython: annotation_typing=False, boundscheck=True
"""Sets of engines by block, and the blocks used last, as `kvoffload.replay.index` keeps them.

This is the source of both implementations: plain Python, and compiled with ``_index.pxd``.

A set is a sequence of 64-bit words, with engine 0 as the lowest bit of the first: one pass over a
prompt finds how much of it each engine has. This takes 8 bytes per distinct block of the trace and
64 engines. Blocks are given as a memoryview of uint32.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from .requests import Blocks

__all__ = ["Ahead", "Holders", "Recent", "leads"]

# Of C where this is compiled.
_WORD = 64
_ONE = 1
_EVERYONE = 2**64 - 1


class Holders:
    """Sets of the engines that have each block."""

    def __init__(self, num_blocks: int, num_engines: int) -> None:
        self.num_engines = num_engines
        self.num_words = -(-num_engines // _WORD)
        self.words = np.zeros(num_blocks * self.num_words, dtype=np.uint64).data

    def put(self, blocks: memoryview, engine: int, is_held: bool) -> int:
        """Note that an engine, or each one for -1, has blocks or not; return how often that is new.

        That counts only for one engine.
        """
        words, size, num_new = self.words, self.num_words, 0
        first = max(0, engine) // _WORD
        bits = _ONE << max(0, engine) % _WORD
        for word in range(first, size if engine < 0 else first + 1):
            if engine < 0:
                bits = _EVERYONE >> max(0, (word + 1) * _WORD - self.num_engines)
            for index in range(len(blocks)):
                place = blocks[index] * size + word
                before = words[place]
                words[place] = before | bits if is_held else before & ~bits
                num_new += words[place] != before
        return num_new

    def of(self, block: int) -> list[int]:
        """Return the engines that have a block, the lowest first."""
        words, first = self.words, block * self.num_words
        every = range(self.num_engines)
        return [each for each in every if words[first + each // _WORD] >> each % _WORD & 1]

    def lead(self, blocks: memoryview) -> int:
        """Return the number of leading blocks that any engine has."""
        words, size = self.words, self.num_words
        for index in range(len(blocks)):
            held = 0
            for word in range(size):
                held |= words[blocks[index] * size + word]
            if not held:
                return index
        return len(blocks)


def leads(sets: list[Holders], blocks: memoryview) -> list[int]:
    """Return the number of leading blocks for which each engine is in at least one of the sets.

    Complexity: O(blocks up to the first at which no engine has the whole prefix).
    """
    holders = sets[0]
    size, num_engines = holders.num_words, holders.num_engines
    found = [len(blocks)] * num_engines
    for word in range(size):
        alive = _EVERYONE
        for index in range(len(blocks)):
            held = 0
            for holders in sets:
                held |= holders.words[blocks[index] * size + word]
            gone = alive & ~held
            if gone:
                for engine in range(word * _WORD, min(num_engines, (word + 1) * _WORD)):
                    if gone >> engine % _WORD & 1:
                        found[engine] = index
                alive &= held
                if not alive:
                    break
    return found


class Ahead(Holders):
    """Sets of engines by block for rows on their way."""

    def __init__(self, num_blocks: int, num_engines: int) -> None:
        Holders.__init__(self, num_blocks, num_engines)
        # How many more times than once a block is on its way.
        self._more: list[dict[int, int]] = [{} for _ in range(num_engines)]

    def send(self, blocks: memoryview, engine: int) -> None:
        """Note that a row is on its way to an engine."""
        words, size = self.words, self.num_words
        word, bit, more = engine // _WORD, _ONE << engine % _WORD, self._more[engine]
        for index in range(len(blocks)):
            place = blocks[index] * size + word
            if words[place] & bit:
                more[blocks[index]] = more.get(blocks[index], 0) + 1
            words[place] |= bit

    def arrive(self, blocks: memoryview, engine: int) -> None:
        """Note that the events of a row on its way to an engine have arrived."""
        words, size = self.words, self.num_words
        word, others = engine // _WORD, _EVERYONE ^ (_ONE << engine % _WORD)
        more = self._more[engine]
        for index in range(len(blocks)):
            again = more.pop(blocks[index], 0) if more else 0
            if again > 1:
                more[blocks[index]] = again - 1
            elif not again:
                words[blocks[index] * size + word] &= others


class Recent:
    """The most recently used blocks, up to a limit; the first of a row is the most recent.

    A block repeated within a row counts at its first place.

    Each use has a number, from 1 on: 8 bytes per distinct block of the trace. The rows that were
    used are kept until their uses are the least recent.
    """

    def __init__(self, num_blocks: int, most: int) -> None:
        self._most = most
        self._size = 0
        self._last = np.zeros(num_blocks, dtype=np.uint64).data  # use of each block
        self._used = 0  # uses so far
        self._passed = 0  # of these, those that are forgotten, or that a later one followed
        self._rows = deque[memoryview]()
        self._ahead = 0  # uses of the first of these rows that are not passed

    def use(self, blocks: memoryview) -> tuple[int, Blocks, Blocks]:
        """Make a row's blocks the most recent.

        Return the number of leading blocks that were remembered, all that were not, and the blocks
        that are forgotten, in that order.
        """
        row = blocks
        last, size = self._last, len(row)
        lead, num_missing = size, 0
        missing = np.empty(size, dtype=np.uint32)
        entering = missing.data
        for index in range(size):
            if last[row[index]] <= self._passed:
                lead = min(lead, index)
                entering[num_missing] = row[index]
                num_missing += 1
        for index in range(size):
            block = row[size - 1 - index]
            self._size += last[block] <= self._passed
            self._used += 1
            last[block] = self._used
        if not self._rows:
            self._ahead = size
        self._rows.append(blocks)
        forgotten = np.empty(max(0, self._size - self._most), dtype=np.uint32)
        if len(forgotten):
            self._size -= self._forget(forgotten.data)
        return lead, missing[:num_missing], forgotten

    def _forget(self, forgotten: memoryview) -> int:
        """Fill an array with the least recent blocks, and forget them; return their number."""
        last, count, most = self._last, 0, len(forgotten)
        while count < most:
            row = self._rows[0]
            while self._ahead and count < most:
                self._ahead -= 1
                self._passed += 1
                if last[row[self._ahead]] == self._passed:
                    forgotten[count] = row[self._ahead]
                    count += 1
            if not self._ahead:
                self._rows.popleft()
                self._ahead = len(self._rows[0]) if self._rows else 0
        return most
