"""Many replays of one trace, divided among processes.

The trace is decoded once into files that all processes map. Each process computes the keys once,
and the hits of the accelerator's own cache once per size of that cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .closed_loop import ClosedLoop, replay_closed
from .groups import GroupChunks
from .offline import BELADY, INFINITE
from .policies import new_manager
from .processes import Elsewhere, spread
from .requests import DecodedTrace
from .results import ReplayResult
from .simulate import Demand

__all__ = ["Cell", "GridWork", "run_grid"]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One point of a grid."""

    policy: str  # a policy string, or ``"belady"`` or ``"infinite"``
    capacity: int  # slots
    device_blocks: int = 0  # slots of the accelerator's own cache in front; 0 for none
    pending: int = 0  # requests during which a store is in flight


@dataclass(frozen=True, slots=True)
class GridWork:
    """The work of a grid.

    Each cell is computed once, and the longest cells start first, in whatever order they are given.
    The counts of a policy are divided into `parts` whose requests differ by at most one; those of a
    ceiling are never divided. With a `loop`, for a trace with arrivals, each cell is a separate
    closed loop, without parts and without stores in flight.
    """

    trace: DecodedTrace
    cells: Sequence[Cell]
    parts: int = 1
    groups: GroupChunks = field(default_factory=GroupChunks.of_blocks)
    loop: ClosedLoop | None = None


def run_grid(
    jobs: int, work: GridWork, elsewhere: Elsewhere | None = None
) -> Iterator[tuple[Cell, list[ReplayResult]]]:
    """Compute the cells of a grid; yield each with its counts, one per part, when it is done.

    `jobs` processes share them; 1 computes in this one. ChildProcessError if one is killed. With
    `elsewhere` other machines compute them.
    """
    # Belady takes longest; the cells that start last should be short.
    ordered = sorted(set(work.cells), key=lambda cell: (cell.policy != BELADY, cell))
    if work.loop is None:
        make = functools.partial(_computing, parts=work.parts, groups=work.groups)
    else:
        make = functools.partial(_looping, groups=work.groups, loop=work.loop)
    yield from spread(work.trace, ordered, make, jobs, elsewhere)


def _computing(
    trace: DecodedTrace, parts: int, groups: GroupChunks
) -> Callable[[Cell], list[ReplayResult]]:
    """Return a function that computes a cell of a trace."""
    keys = trace.keys()
    behind = functools.cache(lambda size: Demand.of(trace, groups, size))

    def compute(cell: Cell) -> list[ReplayResult]:
        demand: Demand = behind(cell.device_blocks)
        return demand.in_parts(cell.policy, cell.capacity, keys, cell.pending, parts)

    return compute


def _looping(
    trace: DecodedTrace, groups: GroupChunks, loop: ClosedLoop
) -> Callable[[Cell], list[ReplayResult]]:
    """Return a function that computes a cell of a trace as a closed loop."""
    keys = trace.keys()

    def compute(cell: Cell) -> list[ReplayResult]:
        policy, capacity = cell.policy, cell.capacity
        if policy == INFINITE:
            policy, capacity = "lru", trace.unique_blocks
        manager = new_manager(policy, capacity)
        device = cell.device_blocks
        return [replay_closed(trace, keys, manager, loop, groups=groups, device_blocks=device)]

    return compute
