"""What is known of a grid of policies and capacities over one trace, in a file.

A result is a line of a JSON Lines file as soon as it is there, under everything that it depends on,
so that an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

from kvoffload import __version__
from kvoffload.traces.outputs import open_output

from .counts import Counts
from .decoded import DecodedTrace
from .grid import Cell

__all__ = ["ResultsFile"]


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
