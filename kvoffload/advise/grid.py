"""Every policy at every capacity, each replay in parts that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.replay import DecodedTrace, GroupChunks, ReplayResult
from kvoffload.replay.grid import Cell, GridWork, run_grid
from kvoffload.replay.offline import BELADY
from kvoffload.replay.processes import Elsewhere

__all__ = ["PARTS", "Grid", "Outcome", "part_seconds", "replay_grid"]

PARTS = 10
"""Parts of a trace, of equally many requests, that are counted apart."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy at one capacity."""

    policy: str  # policy string
    parts: tuple[ReplayResult, ...]  # of the trace; the cache is kept between them

    @property
    def asked_tokens(self) -> int:
        """Tokens that the manager was asked for."""
        return sum(part.asked_tokens or 0 for part in self.parts)

    @property
    def hit_tokens(self) -> int:
        """Those among them that it had."""
        return sum(part.loaded_tokens or 0 for part in self.parts)

    @property
    def stored(self) -> int:
        """Slots stored."""
        return sum(part.stored_slots for part in self.parts)

    @property
    def evicts_early(self) -> bool:
        """Whether anything is evicted in the first half of the trace."""
        return any(part.evicted_slots for part in self.parts[: PARTS // 2])

    @property
    def hit_ratio(self) -> float:
        """Share of the tokens asked for that are hits; 0 if none are asked for."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Grid:
    """All outcomes, and the ceilings."""

    outcomes: dict[tuple[str, int], Outcome]  # by policy and capacity
    belady: dict[int, int]  # by capacity, the most tokens hit; empty where no group is full


def part_seconds(times: Iterable[float]) -> list[float]:
    """Return how long each part lasts, from its first arrival to that of the next, seconds.

    `times` are the arrivals of all requests, milliseconds.
    """
    marks = np.maximum.accumulate(np.fromiter(times, dtype=np.float64))
    if not len(marks):
        return [0.0] * PARTS
    ends = [min(len(marks) * part // PARTS, len(marks) - 1) for part in range(PARTS + 1)]
    return [float(seconds) for seconds in np.diff(marks[ends]) / 1000]


def replay_grid(
    trace: DecodedTrace,
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    groups: GroupChunks,
    device_blocks: int = 0,
    jobs: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Callable[[int], object] | None = None,
) -> Grid:
    """Replay a trace through every policy at every capacity, slots, and find the ceilings.

    `jobs` processes share the replays; ChildProcessError if one is killed. With `elsewhere` other
    machines compute them. `progress` is called with the number of replays done.
    """
    ceilings = (BELADY,) if groups.num_full else ()
    cells = [
        Cell(policy, capacity, device_blocks)
        for policy in (*ceilings, *policies)
        for capacity in capacities
    ]
    grid = Grid({}, {})
    work = GridWork(trace, cells, PARTS, groups)
    for done, (cell, parts) in enumerate(run_grid(jobs, work, elsewhere), start=1):
        if cell.policy == BELADY:
            grid.belady[cell.capacity] = parts[0].loaded_tokens or 0
        else:
            grid.outcomes[cell.policy, cell.capacity] = Outcome(cell.policy, tuple(parts))
        if progress is not None:
            progress(done)
    return grid
