"""A file of results of a grid of policies and capacities over one trace.

Each result is appended as a line of JSON as soon as it is known, with all its parameters, so that
an interrupted sweep continues where it stopped.
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

from .grid import Cell
from .groups import GroupChunks
from .offline import BELADY
from .requests import DecodedTrace, digest_of
from .results import ReplayResult
from .simulate import Demand

__all__ = ["ResultsFile"]

MAY_BE_UNKNOWN = ("hit_tokens", "missed_p50", "missed_p95", "loaded")
"""The counts that may be None."""


class ResultsFile:
    """Results of finished cells, one JSON object per line, kept for the next sweep.

    Lines of other traces or other versions stay in the file and are not used. Lines that cannot be
    results of this trace, because they are truncated or made up, are ignored. Anything except a
    regular file is written to and never read. A file that is not empty and has no line of results
    is refused with a ValueError, because results would be appended to it; one that does not exist
    is created.
    """

    MAX_LINE_BYTES = 2**16  # a policy string with every option is far shorter

    def __init__(
        self, path: str | os.PathLike[str], trace: DecodedTrace, groups: GroupChunks | None = None
    ) -> None:
        self.check(path)
        self._path = Path(path)
        self._trace = trace
        self._tokens = sum(trace.lengths.tolist())
        self._groups = groups = groups or GroupChunks.of_blocks()
        about: dict[str, object] = {
            "trace": trace.fingerprint(),
            "version": __version__,
            "block_tokens": groups.block_tokens if groups.knows_tokens else None,
        }
        if trace.hints is not None:
            about["hints"] = digest_of(trace.hints.arrays())
        demand = Demand.of(trace, groups, 0)
        asked = int(demand.asked.sum())
        nothing = np.zeros_like(demand.device_hits)
        everything = slice(0, trace.num_requests)
        self._most_missed = int(demand.missed(nothing, everything).max(initial=0))
        liars = (0, 0) if trace.hints is not None and trace.hints.lies.any() else None
        most = ReplayResult.of(groups, asked, 0, liars=liars).as_row()
        self._names, self._most_asked = list(most), most["asked"] or 0
        self._most_kept = trace.num_blocks * len(groups.layout.groups)
        self._most_refused = trace.num_requests
        if not groups.is_plain:
            about["groups"] = {
                "layout": asdict(groups.layout),
                "retention": groups.retention,
                "step_tokens": groups.step_tokens,
            }
            self._most_refused += self._most_kept  # states have separate calls
        if groups.step_tokens is not None:
            about["step_tokens"] = groups.step_tokens
            # a step completes a block or ends the prompt; two more repeat refused offers
            self._most_refused += trace.num_blocks + 2 * trace.num_requests
        self._about = json.loads(json.dumps(about))  # as a line has it
        self._ends_in_newline = True

    @classmethod
    def check(cls, path: str | os.PathLike[str]) -> None:
        """Refuse a file that is not empty and has no line of results, without changing it."""
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

    def read(self, wanted: Iterable[Cell]) -> dict[Cell, ReplayResult]:
        """Return the known results of the wanted cells; memory does not grow with the file."""
        known: dict[Cell, ReplayResult] = {}
        if self._path.is_file():
            cells = set(wanted)
            with self._path.open("rb") as file:
                for line in self._lines(file):
                    self._ends_in_newline = line.endswith(b"\n")
                    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                        row = dict(json.loads(line))
                        found = row.pop("cell"), row.pop("counts")
                        if row == self._about:
                            cell, counts = _of(Cell, found[0]), self._counts(found[1])
                            if cell.policy == BELADY:
                                counts["loaded"] = None
                            if cell in cells and self._is_possible(cell, counts):
                                known[cell] = ReplayResult.of_row(self._groups, counts)
        return known

    def add(self, cell: Cell, result: ReplayResult) -> None:
        """Append one result."""
        counts = result.as_row()
        counts["loaded"] = counts.get("loaded") or 0  # a number, as 0.3 reads it
        line = json.dumps({**self._about, "cell": asdict(cell), "counts": counts}) + "\n"
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

    def _counts(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the counts of a row, each of which must be there and of its type."""
        for name in self._names:
            is_known = values[name] is not None or name not in MAY_BE_UNKNOWN
            if is_known and type(values[name]) is not int:
                raise TypeError(f"{name} must be int, got {values[name]}")
        return values

    def _is_possible(self, cell: Cell, counts: dict[str, Any]) -> bool:
        """Return whether the counts are possible for a replay of the trace."""
        asked, hits, hit_tokens = counts["asked"], counts["hits"], counts["hit_tokens"]
        return (
            counts["requests"] == self._trace.num_requests
            and counts["blocks"] == self._trace.num_blocks
            and 0 <= hits <= asked <= self._most_asked
            and (asked == self._most_asked or cell.device_blocks > 0)
            and 0 <= counts["evicted"] <= counts["stored"] <= self._most_kept
            and 0 <= counts["refused"] <= self._most_refused
            and 0 <= counts["not_admitted"] <= self._most_kept
            and counts["tokens"] == self._tokens
            and (hit_tokens is None) == self._lacks_tokens(cell)
            and 0 <= (hit_tokens or 0) <= self._tokens
            and all(
                (counts[name] is None) == (hit_tokens is None)
                and 0 <= (counts[name] or 0) <= self._most_missed
                for name in ("missed_p50", "missed_p95")
            )
        )

    def _lacks_tokens(self, cell: Cell) -> bool:
        return not self._groups.knows_tokens or cell.policy == BELADY


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
