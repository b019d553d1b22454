"""Counts of a policy at a capacity: hits, stores, evictions, refusals."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one policy at one capacity.

    Attributes
    ----------
    requests, blocks : int
        Requests replayed, and the blocks of all of them.
    asked : int
        Blocks that the manager was asked for: those from the first one of each request that the
        accelerator's own cache did not have. Without one, `blocks`.
    hits : int
        Blocks of those that the manager had.
    stored, evicted, refused, not_admitted : int
        As in `ReplayResult`. For a ceiling only `stored` is known; the others are 0.
    """

    requests: int
    blocks: int
    asked: int
    hits: int
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    not_admitted: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked for that were hits; 0 if there are none."""
        return self.hits / self.asked if self.asked else 0.0
