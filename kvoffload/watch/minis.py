"""Miniature managers: the deployed classes at a fraction of the size, fed the sampled keys.

Source
    Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", ATC 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvoffload import BlockHash, CPUOffloadingManager
from kvoffload.policies import registry

__all__ = ["Miniature", "miniature_bias"]

BIAS = 0.0075
"""What a miniature of 512 slots may be off by beside what its quarters tell; with n slots, in
proportion to 1 / sqrt(n). Measured with `asv_benchmarks/watch.py policies`."""
BIASED = ("sieve",)
"""Policies whose miniatures are off by far more."""
LEARNING = ("hit-density",)
LEAST_LEARNED = 2048
"""Blocks that each miniature of those must have been asked for: they learn at the end of epochs of
1,024, however small the miniature is."""


def miniature_bias(slots: float) -> float:
    """Return what a miniature with so many slots, in four quarters, may be off by."""
    return BIAS * math.sqrt(512 / slots) if slots else math.inf


class Miniature:
    """One policy at one size, in as many miniature managers as the sample has quarters.

    Parameters
    ----------
    policy : str
        A policy string.
    memory : float
        Times the memory that there is.
    slots : float
        Sampled slots of all quarters together.
    quarters : int
        Number of quarters.
    """

    def __init__(self, policy: str, memory: float, slots: float, quarters: int) -> None:
        self.policy = policy
        self.memory = memory
        self.slots = slots
        self.managers = [
            CPUOffloadingManager(1, round(slots / quarters), policy) for _ in range(quarters)
        ]

    def feed(self, quarter: int, requests: Sequence[tuple[list[BlockHash], int]]) -> None:
        """Let a quarter's manager do what an engine would with these requests.

        Each is its keys, and how many of them it used without asking for them.
        """
        self.managers[quarter]._serve_at_once(requests)

    def totals(self) -> list[int]:
        """Return the misses of each quarter, then the stored blocks, then those asked for."""
        stats = [manager.stats() for manager in self.managers]
        missed = [each["lookup_blocks"] - each["hit_blocks"] for each in stats]
        stored = [each["stored_blocks"] for each in stats]
        return missed + stored + [each["lookup_blocks"] for each in stats]

    def marks(self, totals: Sequence[int]) -> tuple[str, ...]:
        """Return what may shift its points, beside what may shift any, given its `totals`."""
        stem = registry.parse(self.policy).entry.name
        if stem in BIASED:
            return ("biased",)
        if stem in LEARNING and min(totals[-len(self.managers) :]) < LEAST_LEARNED:
            return ("learning",)
        return ()
