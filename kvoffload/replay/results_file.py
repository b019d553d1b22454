"""A file of results of a grid of policies and capacities over one trace.

Each result is appended as a line of JSON as soon as it is known, with all its parameters, so that
an interrupted sweep continues where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvoffload import __version__
from kvoffload.errors import describe
from kvoffload.traces.outputs import open_output, own_descriptor

from .configuration import Configuration
from .groups import GroupChunks
from .requests import DecodedTrace, digest_of
from .results import Result, placement_of

CELL = ("policy", "host", "device", "pending")
"""The fields in which the configurations of a file may differ."""

COUNTS = (
    *("requests", "blocks", "tokens", "asked_tokens", "device_tokens", "host_tokens"),
    *("missed_tokens", "missed_p50", "missed_p95", "has_junctions"),
    *("loaded", "stored", "evicted", "refused", "not_admitted", "liar_asked", "liar_hits"),
)
"""The figures of a result in a file."""


class ResultsFile:
    """Results of finished cells, one JSON object per line, kept for the next sweep.

    Lines of other traces or other versions stay in the file and are not used. Lines that were
    truncated or changed, whose digests are not those of their content, are ignored. Anything except
    a regular file is written to and never read. A file that is not empty and has no line of results
    is refused with a ValueError, because results would be appended to it; one that does not exist
    is created.
    """

    MAX_LINE_BYTES = 2**16  # a policy string with every option is far shorter

    def __init__(
        self, path: str | os.PathLike[str], trace: DecodedTrace, groups: GroupChunks
    ) -> None:
        self.check(path)
        self._path = Path(path)
        about: dict[str, object] = {
            "trace": trace.fingerprint(),
            "version": __version__,
            "block_tokens": groups.block_tokens if groups.knows_tokens else None,
        }
        if trace.hints is not None:
            about["hints"] = digest_of(trace.hints.arrays())
        if not groups.is_plain:
            about["groups"] = {
                "layout": asdict(groups.layout),
                "retention": groups.retention,
                "step_tokens": groups.step_tokens,
            }
        if groups.step_tokens is not None:
            about["step_tokens"] = groups.step_tokens
        self._about = json.loads(json.dumps(about))  # as a line has it
        self._placement = placement_of(np.zeros(trace.num_requests, dtype=np.uint16))
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

    def read(self, wanted: Iterable[Configuration]) -> dict[Configuration, Result]:
        """Return the known results of wanted configurations; memory is not that of the file."""
        known: dict[Configuration, Result] = {}
        if self._path.is_file():
            cells = {tuple(_cell(one).values()): one for one in wanted}
            with self._path.open("rb") as file:
                for line in self._lines(file):
                    self._ends_in_newline = line.endswith(b"\n")
                    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                        row = dict(json.loads(line))
                        is_whole = row.pop("digest") == _digest(row)
                        cell, counts = dict(row.pop("cell")), row.pop("counts")
                        one = cells.get(tuple(cell.values())) if is_whole else None
                        if row == self._about and one is not None:
                            known[one] = Result(
                                configuration=one, placement=self._placement, **counts
                            )
        return known

    def add(self, result: Result) -> None:
        """Append one result."""
        counts = {name: getattr(result, name) for name in COUNTS}
        row = self._about | {"cell": _cell(result.configuration), "counts": counts}
        line = json.dumps(row | {"digest": _digest(row)}) + "\n"
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


def _cell(one: Configuration) -> dict[str, Any]:
    return {name: getattr(one, name) for name in CELL}


def _digest(row: dict[str, Any]) -> str:
    """Return a digest of a line without its own."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def _is_result(line: bytes) -> bool:
    """Return whether a line is a result, of any trace and version."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.keys() >= {"trace", "version", "cell", "counts"}
