"""Miniature managers: the deployed classes at a fraction of the size, fed the sampled keys.

Source
    Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", ATC 2017.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload import BlockHash, CPUOffloadingManager

__all__ = ["Miniature"]


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
        """Return the misses of each quarter, then the stored blocks of each."""
        stats = [manager.stats() for manager in self.managers]
        missed = [each["lookup_blocks"] - each["hit_blocks"] for each in stats]
        return missed + [each["stored_blocks"] for each in stats]
