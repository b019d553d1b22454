"""Many replays of one trace, divided among processes.

The trace is decoded once into files that all processes map. Each process computes the keys once,
and the hits of the accelerator's own cache once per size of that cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash

from .counts import Counts
from .decoded import DecodedTrace
from .device import device_hits
from .group_replay import group_device_tokens
from .groups import GroupChunks
from .offline import BELADY
from .processes import mapped_arrays, shared_arrays, spread
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
        Number of blocks.
    device_blocks : int
        Blocks of the accelerator's own cache in front; 0 for none.
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
    block_tokens : int, optional
        Tokens per block, for the share of tokens that were hit.
    groups : GroupChunks, optional
        The KV groups of the model; capacities, the accelerator's included, are slots then.
    step_tokens : int, optional
        Tokens of a prompt that a scheduler step computes at most, as in `simulate`.
    """

    trace: DecodedTrace
    cells: Sequence[Cell]
    parts: int = 1
    block_tokens: int | None = None
    groups: GroupChunks | None = None
    step_tokens: int | None = None


def run_grid(jobs: int, work: GridWork) -> Iterator[tuple[Cell, list[Counts]]]:
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
        given = work.parts, work.block_tokens, work.groups, work.step_tokens
        yield from spread(ordered, _compute, jobs, _begin, (paths, *given))


@dataclass(slots=True)
class _Bench:
    """The state of a process that computes cells of a trace."""

    work: GridWork
    keys: list[BlockHash]
    on_device: dict[int, npt.NDArray[np.int64]]

    @classmethod
    def of(cls, work: GridWork) -> _Bench:
        return cls(work, work.trace.keys(), {})

    def compute(self, cell: Cell) -> list[Counts]:
        """Compute one cell."""
        front = self.on_device.get(cell.device_blocks)
        if front is None:
            front = self.on_device[cell.device_blocks] = self._front(cell.device_blocks)
        work = self.work
        return simulate_in_parts(
            work.trace,
            self.keys,
            cell.policy,
            cell.capacity,
            device_hits=front,
            pending=cell.pending,
            parts=work.parts,
            block_tokens=work.block_tokens,
            groups=work.groups,
            step_tokens=work.step_tokens,
        )

    def _front(self, num_blocks: int) -> npt.NDArray[np.int64]:
        trace, groups = self.work.trace, self.work.groups
        if groups is None:
            return device_hits(trace, num_blocks)
        return group_device_tokens(trace, groups, num_blocks)


_bench: _Bench


def _begin(
    paths: dict[str, str],
    parts: int,
    block_tokens: int | None,
    groups: GroupChunks | None,
    step_tokens: int | None,
) -> None:
    """Load the trace in a new process."""
    global _bench  # noqa: PLW0603 - what a pool's process keeps between its cells
    trace = DecodedTrace(**mapped_arrays(paths))
    _bench = _Bench.of(GridWork(trace, (), parts, block_tokens, groups, step_tokens))


def _compute(cell: Cell) -> list[Counts]:
    return _bench.compute(cell)
