"""Every policy at every capacity, each replay in parts that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.replay import Configuration, DecodedTrace, GroupChunks, Result, replay_all
from kvoffload.replay.offline import BELADY
from kvoffload.replay.processes import Elsewhere

__all__ = ["PARTS", "Grid", "evicts_early", "part_seconds", "replay_grid"]

PARTS = 10
"""Parts of a trace, of equally many requests, that are counted apart."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The results of all policies, in parts, and the ceilings."""

    results: dict[tuple[str, int], Result]  # by policy and capacity
    belady: dict[int, int]  # by capacity, the most tokens hit; empty where no group is full


def evicts_early(result: Result) -> bool:
    """Return whether anything is evicted in the first half of the trace."""
    return any(part.evicted for part in result.parts[: PARTS // 2])


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
        Configuration(policy=policy, host=capacity, device=device_blocks, groups=groups)
        for policy in (*ceilings, *policies)
        for capacity in capacities
    ]
    grid = Grid({}, {})
    for result in replay_all(
        trace, cells, parts=PARTS, jobs=jobs, elsewhere=elsewhere, progress=progress
    ):
        one = result.configuration
        if one.policy == BELADY:
            grid.belady[one.host] = result.host_tokens
        else:
            grid.results[one.policy, one.host] = result
    return grid
