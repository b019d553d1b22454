"""A grid of policies and capacities over one trace, in parallel, and what is known of it already.

Structure
    The trace is decoded once and its arrays lie in files that all processes map; each process
    computes the keys once. A result is a line of a JSON Lines file as soon as it is there, under
    everything that it depends on, so that an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, __version__

from .decoded import DecodedTrace
from .device import device_hits
from .processes import mapped_arrays, shared_arrays, spread
from .simulate import BELADY, Counts, simulate


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One point of the grid.

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


class ResultsFile:
    """Results of finished cells, one JSON object a line, kept for the next sweep.

    Lines of other traces or other versions stay in the file and are not used; a line that was cut
    off, as by a crash, is passed over.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is made if it is not there.
    fingerprint : str
        Of the trace.

    Raises
    ------
    OSError
        If the file can be neither read nor written.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str) -> None:
        self._path = Path(path)
        self._about = {"trace": fingerprint, "version": __version__}
        self._ends_in_newline = True

    def read(self) -> dict[Cell, Counts]:
        """Return the results of this trace and version."""
        known: dict[Cell, Counts] = {}
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as lines:
            for line in lines:
                self._ends_in_newline = line.endswith(b"\n")
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    row = json.loads(line)
                    if all(row[name] == value for name, value in self._about.items()):
                        known[_of(Cell, row["cell"])] = _of(Counts, row["counts"])
        return known

    def add(self, cell: Cell, counts: Counts) -> None:
        """Append one result."""
        line = json.dumps({**self._about, "cell": asdict(cell), "counts": asdict(counts)})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n" if self._ends_in_newline else f"\n{line}\n")
        self._ends_in_newline = True


def _of(kind: type[Any], values: dict[str, Any]) -> Any:
    """Build a dataclass from what a file says, which must be its fields and of their types."""
    for field in fields(kind):
        wanted = str if field.type == "str" else int
        if type(values[field.name]) is not wanted:
            raise TypeError(f"{field.name} must be {wanted.__name__}")
    return kind(**values)


@dataclass(slots=True)
class _Work:
    """What a process holds to compute any cell of a trace."""

    trace: DecodedTrace
    keys: list[BlockHash]
    on_device: dict[int, npt.NDArray[np.int64]]

    @classmethod
    def of(cls, trace: DecodedTrace) -> _Work:
        return cls(trace, trace.keys(), {})

    def counts(self, cell: Cell) -> Counts:
        """Compute one cell."""
        front = self.on_device.get(cell.device_blocks)
        if front is None:
            front = self.on_device[cell.device_blocks] = device_hits(self.trace, cell.device_blocks)
        return simulate(
            self.trace,
            self.keys,
            cell.policy,
            cell.capacity,
            device_hits=front,
            pending=cell.pending,
        )


def run(trace: DecodedTrace, cells: Iterable[Cell], jobs: int) -> Iterator[tuple[Cell, Counts]]:
    """Compute cells in parallel; yield each with its result as soon as it is there.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    cells : iterable of Cell
        What to compute; the long ones are begun first, whatever their order.
    jobs : int
        Number of processes, >= 1; 1 computes in this one.

    Raises
    ------
    ChildProcessError
        If a process is killed.
    """
    # Knowing the future takes longest; what is begun last should be short.
    ordered = sorted(set(cells), key=lambda cell: (cell.policy != BELADY, cell))
    if jobs == 1 or len(ordered) < 2:
        work = _Work.of(trace)
        for cell in ordered:
            yield cell, work.counts(cell)
        return
    with shared_arrays(trace.arrays()) as paths:
        yield from spread(ordered, _compute, jobs, _begin, (paths,))


_work: _Work


def _begin(paths: dict[str, str]) -> None:
    """Load the trace in a new process."""
    global _work  # noqa: PLW0603 - what a pool's process keeps between its tasks
    _work = _Work.of(DecodedTrace(**mapped_arrays(paths)))


def _compute(cell: Cell) -> Counts:
    return _work.counts(cell)
