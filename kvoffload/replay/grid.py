"""Many replays of one trace, divided among processes.

The trace is decoded once into files that all processes map. Each process computes the keys once,
and the hits of the accelerator's own cache once per size of that cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .device import device_hits_and_junctions
from .groups import GroupChunks
from .offline import BELADY
from .processes import spread
from .requests import DecodedTrace
from .results import ReplayResult
from .simulate import simulate_in_parts

__all__ = ["Cell", "GridWork", "run_grid"]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One point of a grid.

    Attributes
    ----------
    policy : str
        A policy string, or ``"belady"`` or ``"infinite"``.
    capacity : int
        Number of slots.
    device_blocks : int
        Slots of the accelerator's own cache in front; 0 for none.
    pending : int
        Requests during which a store is in flight.
    """

    policy: str
    capacity: int
    device_blocks: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class GridWork:
    """The work of a grid.

    Attributes
    ----------
    trace : DecodedTrace
        The requests.
    cells : sequence of Cell
        The points; each is computed once, and the longest start first, whatever their order.
    parts : int
        Number of parts, of equally many requests give or take one, that a policy's counts are
        divided into. Those of a ceiling are never divided.
    groups : GroupChunks
        The KV groups of the model, and how prompts are offered, as in `simulate`.
    """

    trace: DecodedTrace
    cells: Sequence[Cell]
    parts: int = 1
    groups: GroupChunks = field(default_factory=GroupChunks.of_blocks)


def run_grid(jobs: int, work: GridWork) -> Iterator[tuple[Cell, list[ReplayResult]]]:
    """Compute the cells of a grid; yield each with its counts, one per part, when it is done.

    Parameters
    ----------
    jobs : int
        Number of processes, >= 1; 1 computes in this one.
    work : GridWork
        The cells to compute.

    Raises
    ------
    ChildProcessError
        If a process is killed.
    """
    # Belady takes longest; the cells that start last should be short.
    ordered = sorted(set(work.cells), key=lambda cell: (cell.policy != BELADY, cell))
    make = functools.partial(_computing, parts=work.parts, groups=work.groups)
    yield from spread(work.trace, ordered, make, jobs)


def _computing(
    trace: DecodedTrace, parts: int, groups: GroupChunks
) -> Callable[[Cell], list[ReplayResult]]:
    """Return a function that computes a cell of a trace."""
    keys = trace.keys()
    front = functools.cache(lambda size: device_hits_and_junctions(trace, size, groups))

    def compute(cell: Cell) -> list[ReplayResult]:
        hits, junctions = front(cell.device_blocks)
        return simulate_in_parts(
            trace,
            keys,
            cell.policy,
            cell.capacity,
            device_hits=hits,
            junctions=junctions,
            pending=cell.pending,
            parts=parts,
            groups=groups,
        )

    return compute
