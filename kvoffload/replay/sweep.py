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
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, __version__
from kvoffload.traces.outputs import open_output

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

    Lines of other traces or other versions stay in the file and are not used. What cannot be a
    result of this trace is passed over, whether it was cut off, as by a crash, or made up. What is
    no regular file is not read; it is written through.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is made if it is not there.
    trace : DecodedTrace
        The trace.

    Raises
    ------
    OSError
        If the file can be neither read nor written; it names the file.
    """

    MAX_LINE_BYTES = 2**16  # a policy string with every option is far shorter

    def __init__(self, path: str | os.PathLike[str], trace: DecodedTrace) -> None:
        self._path = Path(path)
        self._trace = trace
        self._about = {"trace": trace.fingerprint(), "version": __version__}
        self._ends_in_newline = True

    def read(self, wanted: Iterable[Cell]) -> dict[Cell, Counts]:
        """Return what is known of the cells that are wanted; memory does not grow with the file."""
        known: dict[Cell, Counts] = {}
        if self._path.is_file():
            cells = set(wanted)
            with self._path.open("rb") as file:
                for line in self._lines(file):
                    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                        row = json.loads(line)
                        if all(row[name] == value for name, value in self._about.items()):
                            cell, counts = _of(Cell, row["cell"]), _of(Counts, row["counts"])
                            if cell in cells and self._is_possible(cell, counts):
                                known[cell] = counts
        return known

    def add(self, cell: Cell, counts: Counts) -> None:
        """Append one result."""
        line = json.dumps({**self._about, "cell": asdict(cell), "counts": asdict(counts)}) + "\n"
        with open_output(self._path, append=True) as file:
            file.write(line.encode() if self._ends_in_newline else b"\n" + line.encode())
        self._ends_in_newline = True

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the lines that are not too long, and note whether the last one is complete."""
        is_start = True
        while piece := file.readline(self.MAX_LINE_BYTES):
            self._ends_in_newline = piece.endswith(b"\n")
            if is_start and (self._ends_in_newline or len(piece) < self.MAX_LINE_BYTES):
                yield piece
            is_start = self._ends_in_newline

    def _is_possible(self, cell: Cell, counts: Counts) -> bool:
        """Tell whether the counts can be those of a replay of the trace."""
        requests, blocks = self._trace.num_requests, self._trace.num_blocks
        return (
            (counts.requests, counts.blocks) == (requests, blocks)
            and 0 <= counts.hits <= counts.asked <= blocks
            and (counts.asked == blocks or cell.device_blocks > 0)
            and 0 <= counts.evicted <= counts.stored <= blocks
            and 0 <= counts.refused <= requests
            and 0 <= counts.not_admitted <= blocks
        )


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
