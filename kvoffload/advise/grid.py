"""Every policy at every capacity, over processes, each replay in parts that can be compared.

The trace is decoded once; its arrays lie in files that all processes map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash
from kvoffload.replay import Counts, DecodedTrace, belady, simulate_in_parts
from kvoffload.replay.processes import mapped_arrays, shared_arrays, spread

__all__ = ["PARTS", "Grid", "Outcome", "part_seconds", "replay_grid"]

PARTS = 10
"""Parts of a trace, of equally many requests, over which results are compared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy at one capacity.

    Attributes
    ----------
    policy : str
        Policy string.
    parts : tuple of Counts
        What came of each part of the trace; the cache is not emptied between them.
    """

    policy: str
    parts: tuple[Counts, ...]

    @property
    def asked(self) -> int:
        """Blocks that the manager was asked for."""
        return sum(part.asked for part in self.parts)

    @property
    def hits(self) -> int:
        """Blocks of those that it had."""
        return sum(part.hits for part in self.parts)

    @property
    def stored(self) -> int:
        """Blocks stored."""
        return sum(part.stored for part in self.parts)

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked for that were hits; 0 if there are none."""
        return self.hits / self.asked if self.asked else 0.0


@dataclass(frozen=True, slots=True)
class Grid:
    """All outcomes, and the ceilings.

    Attributes
    ----------
    outcomes : dict of (str, int) to Outcome
        By policy and capacity.
    belady : dict of int to int
        By capacity, the blocks that no policy can hit more of.
    """

    outcomes: dict[tuple[str, int], Outcome]
    belady: dict[int, int]


ON_DEVICE = "on_device"
"""Name, beside those of the trace's arrays, of what the accelerator's own cache has."""

Job = tuple[str | None, int]
"""A policy, None for the ceiling, and a capacity, blocks."""


def part_seconds(times: Iterable[float]) -> list[float]:
    """Return how long each part lasts, from its first arrival to that of the next, seconds.

    Parameters
    ----------
    times : iterable of float, milliseconds
        Arrival of each request.
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
    on_device: npt.NDArray[np.int64],
    processes: int = 1,
    progress: Callable[[int], object] | None = None,
) -> Grid:
    """Replay a trace through every policy at every capacity, and find the ceilings.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    policies : sequence of str
        Policy strings.
    capacities : sequence of int
        Capacities, blocks.
    on_device : (requests,) int64
        Leading blocks of each request that the accelerator's own cache has.
    processes : int
        How many to divide the work among; with 1 it is done in this one.
    progress : callable, optional
        Called with the number of replays done.

    Raises
    ------
    ChildProcessError
        If a process is killed.
    """
    jobs: list[Job] = [(None, capacity) for capacity in capacities]
    jobs += [(policy, capacity) for policy in policies for capacity in capacities]
    grid = Grid({}, {})
    for done, (job, found) in enumerate(_run_all(trace, jobs, on_device, processes), start=1):
        capacity = job[1]
        if isinstance(found, Outcome):
            grid.outcomes[found.policy, capacity] = found
        else:
            grid.belady[capacity] = found
        if progress is not None:
            progress(done)
    return grid


@dataclass(frozen=True, slots=True)
class _Work:
    """What a process holds to do any job of a trace."""

    trace: DecodedTrace
    keys: list[BlockHash]
    on_device: npt.NDArray[np.int64]

    def do(self, job: Job) -> Outcome | int:
        """Do one job: an outcome, or the hits of the ceiling."""
        policy, capacity = job
        if policy is None:
            return belady(self.trace, capacity, self.on_device)[0]
        parts = simulate_in_parts(
            self.trace, self.keys, policy, capacity, device_hits=self.on_device, parts=PARTS
        )
        return Outcome(policy, tuple(parts))


def _run_all(
    trace: DecodedTrace, jobs: list[Job], on_device: npt.NDArray[np.int64], processes: int
) -> Iterator[tuple[Job, Outcome | int]]:
    if processes == 1:
        work = _Work(trace, trace.keys(), on_device)
        for job in jobs:
            yield job, work.do(job)
        return
    with shared_arrays({**trace.arrays(), ON_DEVICE: on_device}) as paths:
        yield from spread(jobs, _do, processes, _begin, (paths,))


_work: _Work


def _begin(paths: dict[str, str]) -> None:
    """Load the trace in a new process."""
    global _work  # noqa: PLW0603 - what a pool's process keeps between its jobs
    arrays = mapped_arrays(paths)
    on_device = arrays.pop(ON_DEVICE)
    trace = DecodedTrace(**arrays)
    _work = _Work(trace, trace.keys(), on_device)


def _do(job: Job) -> Outcome | int:
    return _work.do(job)
