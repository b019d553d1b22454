"""Many replays of one trace, by caches and by fleets, divided among processes.

The trace is decoded once into files that all processes map. Each process computes the keys once,
and the hits of the accelerator's own cache once per size of that cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .closed_loop import ClosedLoop, replay_closed
from .fleet.fleet import Fleet, replay_rows
from .fleet.rows import FleetRows
from .groups import GroupChunks
from .offline import BELADY, INFINITE
from .policies import new_manager
from .processes import Elsewhere, spread
from .requests import DecodedTrace
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
    """The work of a grid: caches, and fleets of one block size.

    Each cell is computed once, and the longest cells start first, in whatever order they are given.
    The counts of a policy are divided into `parts` whose requests differ by at most one; those of a
    ceiling are never divided. With a `loop`, for a trace with arrivals, each cell is a separate
    closed loop, without parts and without stores in flight.
    """

    trace: DecodedTrace
    cells: Sequence[Any]  # Cell, or Fleet
    parts: int = 1
    groups: GroupChunks = field(default_factory=GroupChunks.of_blocks)
    loop: ClosedLoop | None = None


def run_grid(
    jobs: int, work: GridWork, elsewhere: Elsewhere | None = None
) -> Iterator[tuple[Any, list[Any]]]:
    """Compute the cells of a grid; yield each with its results when it is done.

    These are a `ReplayResult` per part of a `Cell`, and one `FleetResult` of a `Fleet`.
    `jobs` processes share them; 1 computes in this one. ChildProcessError if one is killed. With
    `elsewhere` other machines compute them.
    """
    ordered = sorted(dict.fromkeys(work.cells), key=_shortness)
    if work.loop is None:
        make = functools.partial(_computing, parts=work.parts, groups=work.groups)
    else:
        make = functools.partial(_looping, groups=work.groups, loop=work.loop)
    yield from spread(work.trace, ordered, make, jobs, elsewhere)


def _shortness(cell: Cell | Fleet) -> tuple[Any, ...]:
    """Return a rank, the lower the longer a cell takes; those that start last should be short."""
    if isinstance(cell, Cell):
        return 0 if cell.policy == BELADY else 4, cell
    return 1 if cell.spec.sees is not None else 2 if cell.tier is not None else 3, 0


def _computing(trace: DecodedTrace, parts: int, groups: GroupChunks) -> Callable[[Any], list[Any]]:
    """Return a function that computes a cell of a trace."""
    keys = trace.keys()
    behind = functools.cache(lambda size: Demand.of(trace, groups, size))
    numbered = functools.cache(lambda size: FleetRows(trace, keys, size))

    def compute(cell: Cell | Fleet) -> list[Any]:
        if isinstance(cell, Fleet):
            cell.check_trace(trace)
            return [replay_rows(trace, numbered(cell.block_tokens), cell)]
        demand: Demand = behind(cell.device_blocks)
        return demand.in_parts(cell.policy, cell.capacity, keys, cell.pending, parts)

    return compute


def _looping(
    trace: DecodedTrace, groups: GroupChunks, loop: ClosedLoop
) -> Callable[[Any], list[Any]]:
    """Return a function that computes a cell of a trace as a closed loop."""
    keys = trace.keys()

    def compute(cell: Cell) -> list[Any]:
        policy, capacity = cell.policy, cell.capacity
        if policy == INFINITE:
            policy, capacity = "lru", trace.unique_blocks
        manager = new_manager(policy, capacity)
        device = cell.device_blocks
        return [replay_closed(trace, keys, manager, loop, groups=groups, device_blocks=device)]

    return compute
