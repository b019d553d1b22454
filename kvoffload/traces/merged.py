"""Several trace files as one, merged by time."""

from __future__ import annotations

import glob
import heapq
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from .errors import BadLineError, TraceError
from .formats import recognise
from .formats.base import bounded_name
from .formats.weka import WEKA
from .lines import MAX_LINE_BYTES, STDIN, first_line
from .objects import ObjectBatch
from .prompt_blocks import PromptOptions
from .reader import Trace
from .request import MAX_HASH_ID, Request
from .rows import open_rows
from .sessions import SessionOptions

SUFFIXES = (
    *(".jsonl", ".json", ".log", ".txt", ".csv", ".tsv", ".parquet", ".gz", ".zst"),
    *(".oracleGeneral", ".oracleGeneral.bin"),
)
"""Endings of the files read from a folder, perhaps with the number or the date of a rotation."""
_ROTATED = re.compile(r"[.-][\d-]{1,20}\Z", re.ASCII)

_STRIDE = 0x9E3779B97F4A7C15  # odd, 2**64 over the golden ratio: far from simple fractions

MOST_FILES = 500
"""Most files read side by side; systems allow a process about a thousand."""


def trace_files(paths: Sequence[str]) -> list[str]:
    """Return the files that paths, folders and patterns stand for, in the order given.

    A folder stands for its files with the ending of a trace, a pattern such as ``"log/*.jsonl"``
    for its matches, both sorted by name. A path that is a file stands for itself. TraceError if a
    folder or a pattern stands for no file.
    """
    found: list[str] = []
    for path in paths:
        if path == STDIN or os.path.lexists(path):
            if path != STDIN and Path(path).is_dir():
                names = ((p, _ROTATED.sub("", p.name)) for p in Path(path).iterdir())
                inside = sorted(p for p, name in names if name.endswith(SUFFIXES))
                files = [str(file) for file in inside if file.is_file()]
                if not files:
                    rule = f"a folder must hold a file that ends in {', '.join(SUFFIXES)}, got none"
                    raise TraceError(path, None, rule)
                found += files
            else:
                found.append(path)
        elif glob.has_magic(path):
            matching = sorted(glob.glob(path))  # noqa: PTH207 - a pattern may be absolute
            if not matching:
                raise TraceError(path, None, "must match a file, got none")
            found += matching
        else:
            found.append(path)
    return found


class MergedTrace:
    """Several trace files as one trace, read side by side and merged by time.

    Requests with equal times keep the order of the files. Requests of one file always keep their
    order, even if its times go back. Files with clock times, as in LMCache's log, are aligned by
    them, and time 0 is that of the earliest; files whose times count from their own start begin
    with the first request of those, or together. A file without a request, or without one to the
    model, is left out, unless all are such files.

    An id means the same block in several files only if it is a hash of the block's content (see
    `Trace.has_hashes`). Other formats number the blocks of each file, mostly from 0; the ids and
    sessions of each such file are kept apart from those of all others, unless `same_ids` says that
    one numbering covers all files. If n files are kept apart, id i of file k, from 0, becomes
    ``i * n + k``; ids of 2**64 / n and more are shifted by a multiple of a constant instead, and
    among m ids that large two may collide with a chance of about m² / 2⁶⁴.

    Parameters
    ----------
    paths : sequence of str
        One file or more, as returned by `trace_files`.
    format, skip_bad, model_name, max_line_bytes
        As in `Trace`.
    sessions : SessionOptions, optional
        As in `Trace`: files of sessions are one input, in the order of the files.
    prompts : PromptOptions, optional
        As in `Trace`: equal blocks of all files have equal ids.
    same_ids : bool
        Whether equal ids mean equal blocks in all files, whatever their format: the parts of one
        trace that was divided.

    Attributes
    ----------
    name : str
        Name in messages: the file, or the first and the number of others.
    bad_lines : int
        Bad lines skipped by the latest iteration, in all files.
    format : str or None
        The format of the first file.
    block_tokens, block_bytes : int or None
        Tokens and bytes per block, if all files state them and agree.
    id_spaces : int
        Sets of files that share their ids, as known to the latest iteration: the number of files if
        all are kept apart, 1 if all share them.

    Raises
    ------
    ValueError
        If there is no file.
    TraceError
        If there are more than 500 files, unless they hold sessions; during iteration, as in a
        `Trace`.

    Notes
    -----
    Not safe to iterate over from two threads at once.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        format: str | None = None,
        skip_bad: bool = False,
        model_name: str | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
        same_ids: bool = False,
        sessions: SessionOptions | None = None,
        prompts: PromptOptions | None = None,
    ) -> None:
        if not paths:
            raise ValueError("paths must name a file, got none")
        holds_sessions = len(paths) > 1 and _holds_sessions(paths[0], format)
        if len(paths) > MOST_FILES and not holds_sessions:
            rule = f"must be at most {MOST_FILES} files, got {len(paths)}"
            raise TraceError(paths[0], None, rule)
        prompts = prompts or PromptOptions()  # one key for all files
        self._same_ids = same_ids
        self.id_spaces = 1
        self.paths = tuple(paths)
        self._traces = [
            Trace(
                path,
                format=format,
                skip_bad=skip_bad,
                model_name=model_name,
                max_line_bytes=max_line_bytes,
                sessions=sessions,
                prompts=prompts,
            )
            for path in (paths[:1] if holds_sessions else paths)
        ]
        if holds_sessions:
            self._traces[0].more_paths = paths[1:]
        more = len(paths) - 1
        self.name = self._traces[0].name + (f" and {more} more" if more else "")

    @property
    def bad_lines(self) -> int:
        """Bad lines skipped by the latest iteration."""
        return sum(trace.bad_lines for trace in self._traces)

    @property
    def is_log(self) -> bool:
        """Whether a file is a log of requests, in which times may run back."""
        return any(trace.is_log for trace in self._traces)

    @property
    def has_prompts(self) -> bool:
        """Whether a file has prompts, of which blocks are made."""
        return any(trace.has_prompts for trace in self._traces)

    @property
    def remarks(self) -> list[str]:
        """Contents of the latest iteration's requests that could not be followed, by file."""
        if len(self._traces) == 1:
            return self._traces[0].remarks
        found = [f"{trace.name}: {text}" for trace in self._traces for text in trace.remarks]
        return found + [f"{trace.name}: no request" for trace in self._traces if trace.is_empty]

    @property
    def format(self) -> str | None:
        """The formats of the files that were read, each once, separated by commas."""
        found = dict.fromkeys(trace.format for trace in self._traces if not trace.is_empty)
        return ", ".join(name for name in found if name is not None) or None

    @property
    def block_tokens(self) -> int | None:
        """Tokens per block, if all files state them and agree."""
        sizes = {trace.block_tokens for trace in self._traces if not trace.is_empty}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def block_bytes(self) -> int | None:
        """Bytes per block, if all files state them and agree."""
        sizes = {trace.block_bytes for trace in self._traces if not trace.is_empty}
        return sizes.pop() if len(sizes) == 1 else None

    def batches(self) -> Iterator[ObjectBatch] | None:
        """Return the rows in arrays if it is one trace of single objects, else None."""
        return self._traces[0].batches() if len(self._traces) == 1 else None

    def __iter__(self) -> Iterator[Request]:
        if len(self._traces) == 1:
            return iter(self._traces[0])
        return self._merged()

    def _merged(self) -> Iterator[Request]:
        started: list[tuple[Trace, Iterator[Request]]] = []
        begun: list[float] = []  # clock times of first requests
        nothing: TraceError | None = None  # the error of the first file without a request
        for trace in self._traces:
            requests = iter(trace)
            try:
                first = next(requests)
            except TraceError as error:
                if not trace.is_empty:
                    raise
                nothing = nothing or error
                continue
            started.append((trace, chain((first,), requests)))
            if trace.start is not None:
                begun.append(trace.start + first.timestamp / 1000)
        if nothing is not None and not started:
            raise nothing
        starts = [trace.start for trace, _ in started if trace.start is not None]
        earliest = min(starts, default=0.0)
        first_of_all = min(begun, default=earliest)
        spaces: list[int | None] = [
            None if self._same_ids or trace.has_hashes else index
            for index, (trace, _) in enumerate(started)
        ]
        empty = len(self._traces) - len(started)
        self.id_spaces = len(set(spaces)) + (0 if None in spaces else empty)
        placed = []
        for (trace, requests), space in zip(started, spaces, strict=True):
            begin = first_of_all if trace.start is None else trace.start
            later = round(1000 * (begin - earliest))
            placed.append(_placed(requests, later, space, len(started)))
        yield from heapq.merge(*placed, key=lambda request: request.timestamp)


def _placed(
    requests: Iterator[Request], later: int, index: int | None, files: int
) -> Iterator[Request]:
    """Yield the requests of one file with their times shifted by milliseconds.

    Unless `index` is None, their ids and sessions become distinct from those of the other files.
    """
    limit = (MAX_HASH_ID + 1) // files
    moved_by = ((index or 0) + 1) * _STRIDE
    for request in requests:
        ids, time = request.hash_ids, request.timestamp + later
        session, parent = request.session, request.parent
        if index is not None:
            ids = tuple(
                hash_id * files + index if hash_id < limit else (hash_id + moved_by) & MAX_HASH_ID
                for hash_id in ids
            )
            session, parent = (
                None if name is None else bounded_name(f"{index}:{name}")
                for name in (session, parent)
            )
        yield replace(request, timestamp=time, hash_ids=ids, session=session, parent=parent)


def _holds_sessions(path: str, format: str | None) -> bool:
    """Return whether a file holds sessions, by its first row if that can be read again."""
    if format is not None:
        return format == WEKA.name
    opened = partial(open_rows, format=None, options=PromptOptions(), max_row_bytes=MAX_LINE_BYTES)
    with suppress(BadLineError):
        return recognise(first_line(path, opened)) is WEKA
    return False
