"""A file of results of a grid of policies and capacities over one trace.

Each result is appended as a line of JSON as soon as it is known, with all its parameters, so that
an interrupted sweep continues where it stopped.
"""

from __future__ import annotations

import contextlib
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
from .offline import BELADY
from .requests import DecodedTrace, digest_of
from .results import Result, placement_of
from .rows import Rows

__all__ = ["ResultsFile"]

CELL = {"policy": str, "host": int, "device": int, "pending": int}
"""What the configurations of a file may differ in, with their types."""

COUNTS = (
    *("requests", "blocks", "tokens", "asked_tokens", "device_tokens", "host_tokens"),
    *("stored", "evicted", "refused", "not_admitted"),
)
MAY_BE_UNKNOWN = ("missed_tokens", "missed_p50", "missed_p95", "loaded")
"""The counts that may be None."""

OF_LIARS = ("liar_asked", "liar_hits")


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
        self, path: str | os.PathLike[str], trace: DecodedTrace, groups: GroupChunks
    ) -> None:
        self.check(path)
        self._path = Path(path)
        self._trace = trace
        self._groups = groups
        about: dict[str, object] = {
            "trace": trace.fingerprint(),
            "version": __version__,
            "block_tokens": groups.block_tokens if groups.knows_tokens else None,
        }
        if trace.hints is not None:
            about["hints"] = digest_of(trace.hints.arrays())
        rows = Rows(trace, groups, trace.keys)
        self._tokens = sum(rows.tokens.tolist())
        self._most_asked = int(rows.whole.sum())
        self._most_missed = int(rows.tokens.max(initial=0))
        self._has_liars = bool(rows.lies.any())
        self._placement = placement_of(np.zeros(trace.num_requests, dtype=np.uint16))
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
                        cell, counts = row.pop("cell"), row.pop("counts")
                        one = cells.get(tuple(_checked(cell, CELL).values()))
                        if row == self._about and one is not None:
                            result = Result(
                                configuration=one,
                                placement=self._placement,
                                **self._counts(counts),
                            )
                            if self._is_possible(one, result):
                                known[one] = result
        return known

    def add(self, result: Result) -> None:
        """Append one result."""
        of_liars = OF_LIARS if self._has_liars else ()
        names = ("has_junctions", *COUNTS, *MAY_BE_UNKNOWN, *of_liars)
        counts = {name: getattr(result, name) for name in names}
        of = {"cell": _cell(result.configuration), "counts": counts}
        line = json.dumps({**self._about, **of}) + "\n"
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
        """Return the counts of a line, each of which must be there and of its type."""
        unknown: tuple[str, ...] = MAY_BE_UNKNOWN
        if self._has_liars:
            unknown += OF_LIARS
        return _checked(values, dict.fromkeys(COUNTS, int) | {"has_junctions": bool}) | {
            name: None if values[name] is None else _checked(values, {name: int})[name]
            for name in unknown
        }

    def _is_possible(self, one: Configuration, result: Result) -> bool:
        """Return whether a result is possible for a replay of the trace."""
        knows_tokens = self._groups.knows_tokens and one.policy != BELADY
        missed = result.missed_tokens, result.missed_p50, result.missed_p95
        counts = [getattr(result, name) for name in (*COUNTS, "loaded", *OF_LIARS)]
        return (
            min(count for count in counts if count is not None) >= 0
            and result.requests == self._trace.num_requests
            and result.blocks == self._trace.num_blocks
            and result.tokens == self._tokens
            and result.asked_tokens + result.device_tokens == self._most_asked
            and result.host_tokens <= result.asked_tokens
            and (result.device_tokens == 0 or one.device > 0)
            and result.evicted <= result.stored <= self._most_kept
            and result.refused <= self._most_refused
            and result.not_admitted <= self._most_kept
            and all((count is not None) == knows_tokens for count in missed)
            and 0 <= (result.missed_tokens or 0) <= self._tokens
            and all(0 <= (count or 0) <= self._most_missed for count in missed[1:])
            and (result.liar_asked is not None) == self._has_liars
        )


def _cell(one: Configuration) -> dict[str, Any]:
    return {name: getattr(one, name) for name in CELL}


def _checked(values: dict[str, Any], types: dict[str, type]) -> dict[str, Any]:
    """Return some values of an object of a file, each of which must be there and of its type."""
    for name, kind in types.items():
        if type(values[name]) is not kind:
            raise TypeError(f"{name} must be {kind.__name__}, got {values[name]}")
    return {name: values[name] for name in types}


def _is_result(line: bytes) -> bool:
    """Return whether a line is a result, of any trace and version."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.keys() >= {"trace", "version", "cell", "counts"}
