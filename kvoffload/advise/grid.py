"""Every policy at every capacity, each replay in parts that can be compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from kvoffload.replay import DecodedTrace, Result, replay_all
from kvoffload.replay.processes import Elsewhere

from .setup import Setup

__all__ = ["PARTS", "evicts_early", "part_seconds", "replay_grid"]

PARTS = 10
"""Parts of a trace, of equally many requests, that are counted apart."""


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
    setup: Setup,
    policies: Iterable[str],
    capacities: Iterable[int],
    *,
    jobs: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[tuple[str, int], Result]:
    """Replay a trace through every policy at every capacity, slots; return the results by both.

    `jobs` processes share the replays; ChildProcessError if one is killed. With `elsewhere` other
    machines compute them. `progress` is called with the number of replays done.
    """
    cells = itertools.starmap(setup.configuration, itertools.product(policies, capacities))
    results = replay_all(
        trace, cells, parts=PARTS, jobs=jobs, elsewhere=elsewhere, progress=progress
    )
    return {(one.configuration.policy, one.configuration.host): one for one in results}
