"""Indexes of the engines that have a block, for routers: by history, or by engines' events.

The engines that have a block are a set of bits, 64 per word, engine 0 the lowest: one pass over a
prompt finds how much of it each engine has. This takes 8 bytes per distinct block of the trace, 64
engines and place; blocks on their way to an engine are a separate place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ._index import Ahead, Holders, Recent, leads
from .requests import Blocks

__all__ = ["DEVICE", "HOST", "TIER", "Change", "EventIndex", "History", "Leads", "Recent"]

DEVICE, HOST, TIER = range(3)
"""Places of an engine's blocks, the nearest first."""


class Change(NamedTuple):
    """The blocks that entered a place, and then others that left it."""

    place: int  # DEVICE, HOST or TIER
    entered: Blocks
    left: Blocks


class History:
    """The blocks that a router sent to each engine, up to a limit per engine.

    Parameters
    ----------
    num_blocks : int
        Distinct blocks of the trace.
    num_engines : int
        Engines.
    index_blocks : int
        Remembered blocks per engine: the last sent, and of a request the first; 0: all.
    """

    def __init__(self, num_blocks: int, num_engines: int, index_blocks: int = 0) -> None:
        self.sizes = [0] * num_engines
        """Number of remembered blocks per engine."""
        self._holders = Holders(num_blocks, num_engines)
        self._last = np.zeros(num_blocks, dtype=np.int16)  # the last engine that received a block
        each = range(num_engines if index_blocks else 0)
        self._recent = [Recent(num_blocks, index_blocks) for _ in each]

    def add(self, engine: int, blocks: Blocks) -> None:
        """Note that a request was sent to an engine."""
        self._last[blocks] = engine
        self.sizes[engine] += self._holders.put(blocks.data, engine, True)
        if self._recent:
            _, _, forgotten = self._recent[engine].use(blocks.data)
            self._holders.put(forgotten.data, engine, False)
            self.sizes[engine] -= len(forgotten)

    def leads(self, blocks: Blocks) -> list[int]:
        """Return the number of leading blocks of a request sent to each engine."""
        return leads([self._holders], blocks.data)

    def lead_and_engine(self, blocks: Blocks) -> tuple[int, int]:
        """Return the number of leading blocks sent to any engine, and the engine of the last one.

        That is the engine that last received it; if it is forgotten there, the lowest engine that
        has it; -1 without such blocks.
        """
        lead = self._holders.lead(blocks.data)
        if not lead:
            return 0, -1
        last = int(blocks[lead - 1])
        engine, holders = int(self._last[last]), self._holders.of(last)
        return lead, engine if engine in holders else holders[0]


class Leads(NamedTuple):
    """The leading blocks of a request that each engine has, by distance."""

    device: list[int]
    host: list[int]  # there or nearer
    tier: list[int]  # likewise


class EventIndex:
    """The caches' contents published by engines, and the requests sent to them.

    Parameters
    ----------
    num_blocks : int
        Distinct blocks of the trace.
    num_engines : int
        Engines.
    shared_tier : bool
        Whether all engines reach the blocks of one tier.
    """

    def __init__(self, num_blocks: int, num_engines: int, *, shared_tier: bool) -> None:
        self._num_blocks = num_blocks
        self._num_engines = num_engines
        self._shared_tier = shared_tier
        self._held: dict[int, Holders] = {}  # by place, if any engine had a block there
        self._ahead: Ahead | None = None
        self._sent = [deque[Blocks]() for _ in range(num_engines)]  # those that count as ahead

    def hear(self, engine: int, changes: Sequence[Change]) -> None:
        """Note the changes of the caches by a request."""
        for place, entered, left in changes:
            if place not in self._held:
                self._held[place] = Holders(self._num_blocks, self._num_engines)
            held = self._held[place]
            reached_by = -1 if place == TIER and self._shared_tier else engine
            held.put(entered.data, reached_by, True)
            held.put(left.data, reached_by, False)

    def send(self, engine: int, blocks: Blocks) -> None:
        """Count the blocks of a request as on an engine's device until `arrive`."""
        if self._ahead is None:
            self._ahead = Ahead(self._num_blocks, self._num_engines)
        self._ahead.send(blocks.data, engine)
        self._sent[engine].append(blocks)

    def arrive(self, engine: int) -> None:
        """End the effect of the earliest open `send` to an engine."""
        if self._ahead is not None:
            self._ahead.arrive(self._sent[engine].popleft().data, engine)

    def leads(self, blocks: Blocks) -> Leads:
        """Return how many leading blocks of a request each engine has."""
        sets: list[Holders] = [] if self._ahead is None else [self._ahead]
        found: list[list[int]] = []
        for place in (DEVICE, HOST, TIER):
            if place in self._held:
                sets.append(self._held[place])
            if sets and (place in self._held or not found):
                found.append(leads(sets, blocks.data))
            else:
                found.append(found[-1] if found else [0] * self._num_engines)
        return Leads(*found)
