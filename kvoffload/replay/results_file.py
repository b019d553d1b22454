"""A file of results of a grid of policies and capacities over one trace.

Each result is appended as a line of JSON as soon as it is known, with everything that it depends
on, so that an interrupted sweep continues where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvoffload import __version__
from kvoffload.errors import describe
from kvoffload.traces.outputs import open_output, own_descriptor

from .counts import Counts
from .decoded import DecodedTrace
from .grid import Cell
from .groups import GroupChunks
from .offline import BELADY

__all__ = ["ResultsFile"]


class ResultsFile:
    """Results of finished cells, one JSON object per line, kept for the next sweep.

    Lines of other traces or other versions stay in the file and are not used. Lines that cannot be
    results of this trace, truncated by a crash or made up, are ignored. Anything but a regular file
    is written to and never read. A file that is not empty and has no line of results is refused,
    because results would be appended to it.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is created if it does not exist.
    trace : DecodedTrace
        The trace.
    block_tokens : int, optional
        Tokens per block; the share of tokens that were hit depends on it.
    groups : GroupChunks, optional
        The KV groups of the model, on which all results depend.
    step_tokens : int, optional
        Tokens of a scheduler step, on which all results depend.

    Raises
    ------
    ValueError
        From the constructor, if the file is refused.
    OSError
        If the file can be neither read nor written; it names the file.
    """

    MAX_LINE_BYTES = 2**16  # a policy string with every option is far shorter

    def __init__(
        self,
        path: str | os.PathLike[str],
        trace: DecodedTrace,
        block_tokens: int | None = None,
        groups: GroupChunks | None = None,
        step_tokens: int | None = None,
    ) -> None:
        self.check(path)
        self._path = Path(path)
        self._trace = trace
        self._tokens = sum(trace.lengths.tolist())
        about: dict[str, object] = {
            "trace": trace.fingerprint(),
            "version": __version__,
            "block_tokens": block_tokens,
        }
        self._most_asked = self._most_kept = trace.num_blocks
        self._most_refused = trace.num_requests
        if groups is not None:
            about["groups"] = {
                "layout": asdict(groups.layout),
                "retention": groups.retention,
                "step_tokens": groups.step_tokens,
            }
            blocks = np.diff(trace.starts).tolist()
            self._most_asked = sum(map(groups.length_of, trace.lengths.tolist(), blocks))
            self._most_kept *= len(groups.layout.groups)
            self._most_refused += self._most_kept  # states have calls of their own
        if step_tokens is not None:
            about["step_tokens"] = step_tokens
            # a step completes a block or ends the prompt; two more offer again what was refused
            self._most_refused += trace.num_blocks + 2 * trace.num_requests
        self._about = json.loads(json.dumps(about))  # as a line has it
        self._ends_in_newline = True

    @classmethod
    def check(cls, path: str | os.PathLike[str]) -> None:
        """Refuse a file that is not empty and has no line of results, without changing it.

        Raises
        ------
        ValueError
            If the file is such a one.
        OSError
            If it cannot be read; it names the file.
        """
        if own_descriptor(os.fspath(path)) is not None or not Path(path).is_file():
            return
        is_empty = True
        with Path(path).open("rb") as file:
            for line in cls._lines(file):
                is_empty = False
                if _is_result(line):
                    return
        if not is_empty:
            name = describe(os.fspath(path))
            raise ValueError(
                f"must be a file of results or an empty one, got {name}, which has none"
            )

    def read(self, wanted: Iterable[Cell]) -> dict[Cell, Counts]:
        """Return the known results of the wanted cells; memory does not grow with the file."""
        known: dict[Cell, Counts] = {}
        if self._path.is_file():
            cells = set(wanted)
            with self._path.open("rb") as file:
                for line in self._lines(file):
                    self._ends_in_newline = line.endswith(b"\n")
                    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                        row = dict(json.loads(line))
                        found = row.pop("cell"), row.pop("counts")
                        if row == self._about:
                            cell, counts = _of(Cell, found[0]), _of(Counts, found[1])
                            if cell in cells and self._is_possible(cell, counts):
                                known[cell] = counts
        return known

    def add(self, cell: Cell, counts: Counts) -> None:
        """Append one result."""
        line = json.dumps({**self._about, "cell": asdict(cell), "counts": asdict(counts)}) + "\n"
        with open_output(self._path, append=True) as file:
            file.write(line.encode() if self._ends_in_newline else b"\n" + line.encode())
        self._ends_in_newline = True

    @classmethod
    def _lines(cls, file: BinaryIO) -> Iterator[bytes]:
        """Yield the lines; of each piece of an overlong line only its last byte."""
        is_start = True
        while piece := file.readline(cls.MAX_LINE_BYTES):
            ends = piece.endswith(b"\n")
            is_whole = is_start and (ends or len(piece) < cls.MAX_LINE_BYTES)
            yield piece if is_whole else piece[-1:]
            is_start = ends

    def _is_possible(self, cell: Cell, counts: Counts) -> bool:
        """Return whether the counts can be those of a replay of the trace."""
        requests, blocks = self._trace.num_requests, self._trace.num_blocks
        return (
            (counts.requests, counts.blocks) == (requests, blocks)
            and 0 <= counts.hits <= counts.asked <= self._most_asked
            and (counts.asked == self._most_asked or cell.device_blocks > 0)
            and 0 <= counts.evicted <= counts.stored <= self._most_kept
            and 0 <= counts.refused <= self._most_refused
            and 0 <= counts.not_admitted <= self._most_kept
            and counts.tokens == self._tokens
            and (counts.hit_tokens is None) == self._lacks_tokens(cell)
            and 0 <= (counts.hit_tokens or 0) <= self._tokens
        )

    def _lacks_tokens(self, cell: Cell) -> bool:
        return self._about["block_tokens"] is None or cell.policy == BELADY


def _is_result(line: bytes) -> bool:
    """Return whether a line is a result, of any trace and version."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.keys() >= {"trace", "version", "cell", "counts"}


def _of(kind: type[Any], values: dict[str, Any]) -> Any:
    """Build a dataclass from a file's values, which must be its fields, of their types."""
    for field in fields(kind):
        kind_of_value = type(values[field.name]).__name__.replace("NoneType", "None")
        if kind_of_value not in field.type.split(" | "):
            raise TypeError(f"{field.name} must be {field.type}, got {kind_of_value}")
    return kind(**values)
