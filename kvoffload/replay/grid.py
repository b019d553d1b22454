"""Many replays of one trace, divided among processes.

The trace is decoded once into files that all processes map. Each process computes the keys once,
and the hits of the accelerator's own cache once per size of that cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash

from .device import device_hits_and_junctions
from .groups import GroupChunks
from .offline import BELADY
from .processes import mapped_arrays, shared_arrays, spread
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
    if jobs == 1 or len(ordered) < 2:
        bench = _Bench.of(work)
        for cell in ordered:
            yield cell, bench.compute(cell)
        return
    with shared_arrays(work.trace.arrays()) as paths:
        yield from spread(ordered, _compute, jobs, _begin, (paths, work.parts, work.groups))


@dataclass(slots=True)
class _Bench:
    """The state of a process that computes cells of a trace."""

    work: GridWork
    keys: list[BlockHash]
    on_device: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

    @classmethod
    def of(cls, work: GridWork) -> _Bench:
        return cls(work, work.trace.keys(), {})

    def compute(self, cell: Cell) -> list[ReplayResult]:
        """Compute one cell."""
        work, size = self.work, cell.device_blocks
        if size not in self.on_device:
            self.on_device[size] = device_hits_and_junctions(work.trace, size, work.groups)
        hits, junctions = self.on_device[size]
        return simulate_in_parts(
            work.trace,
            self.keys,
            cell.policy,
            cell.capacity,
            device_hits=hits,
            junctions=junctions,
            pending=cell.pending,
            parts=work.parts,
            groups=work.groups,
        )


_bench: _Bench


def _begin(paths: dict[str, str], parts: int, groups: GroupChunks) -> None:
    """Load the trace in a new process."""
    global _bench  # noqa: PLW0603 - what a pool's process keeps between its cells
    _bench = _Bench.of(GridWork(DecodedTrace(**mapped_arrays(paths)), (), parts, groups))


def _compute(cell: Cell) -> list[ReplayResult]:
    return _bench.compute(cell)
