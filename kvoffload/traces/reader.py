"""A trace file that can be iterated over repeatedly."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

from kvoffload._printable import plural

from .errors import BadLineError, TraceError
from .formats import FORMATS, LOG_FORMATS, recognise
from .formats.base import Format, Parser
from .formats.gateways import ANY_LOG, log_of
from .formats.lmcache import LMCacheParser
from .formats.logs import Log, LogParser, mapped
from .formats.mooncake import MOONCAKE, MooncakeParser
from .formats.mooncake_delta import MOONCAKE_DELTA, MOST_ID_TOKENS, MooncakeDeltaParser
from .formats.weka import WEKA, WekaParser
from .lines import MAX_LINE_BYTES, STDIN, first_line
from .objects import OBJECTS, ObjectBatch, are_objects, object_batches, requests_of
from .oracle_general import ORACLE_GENERAL, is_named_oracle_general, record_batches
from .prompt_blocks import PromptOptions
from .request import Request
from .rows import CSV, PARQUET, ParquetRows, Rows, TableRows, open_rows
from .scratch import scratch_file
from .sessions import SessionOptions, SessionRows
from .survey import BlockLengths

FORMAT_NAMES = (*FORMATS, *LOG_FORMATS, CSV, PARQUET, OBJECTS, ORACLE_GENERAL)
"""The formats that a trace may be in: those of lines, tables of them, and the one of records."""

_Found = TypeVar("_Found")

SESSION_ID = b'"session_id"'
AHEAD_BYTES = 2**22  # of lines that are looked at to see what rows list, or whether any has a time


class Trace:
    """A trace file, an iterable of its requests in the order of the file.

    Nothing is read before iteration and nothing is kept, so a trace may be larger than memory. Each
    iteration opens the file again; standard input can be iterated over once. Blank lines are
    skipped; a file of only blank lines holds no request. A file may be plain or compressed with
    gzip or zstandard, which is recognised by its first bytes.

    Parameters
    ----------
    path : str or os.PathLike
        The file; ``-`` is standard input.
    format : str, optional
        One of `FORMAT_NAMES`; by default ``"oracle-general"`` for a file with the name of
        libCacheSim's traces, such as ``w.oracleGeneral.zst``, else the one of its first good line.
        Rows with a `session_id` are ``"mooncake-delta"``, with only the new part of a session, if
        sessions have later rows and none of these repeats its session's first id. Requests of
        ``"weka"`` are sorted by time. Logs of prompts have Unix times, in milliseconds, and the
        order of the file. ``"openai"`` stands for any log; ``"csv"`` and ``"parquet"`` are tables
        of rows of any format.
    skip_bad : bool
        Skip lines that break the format's rules, and count them in `bad_lines`. A file that cannot
        be read to its end, such as a truncated or damaged compressed one, is still an error.
    model_name : str, optional
        Read only the requests to this model: of LMCache's log, or of a log of prompts.
    max_line_bytes : int
        Longest line that is accepted, bytes.
    sessions : SessionOptions, optional
        Options for ``"weka"``, sessions that were published without their starts. For
        ``"mooncake-delta"`` only `block_tokens` counts, the tokens that an id stands for; by
        default they are inferred from the lengths of the first rows.
    prompts : PromptOptions, optional
        How to make blocks of prompts, for logs, and the fields of one that is not recognised.

    Attributes
    ----------
    name : str
        Name of the trace in messages.
    bad_lines : int
        Bad lines skipped by the latest iteration.
    is_empty : bool
        Whether the latest iteration found no request, which was an error.
    format : str or None
        The format that was given, or that the latest iteration recognised.
    block_tokens : int or None
        Tokens per block, if the trace states them, as known to the latest iteration.
    block_bytes : int or None
        Bytes per block, likewise.
    start : float or None
        Unix time of time 0, seconds, if the trace states it, likewise.
    has_hashes : bool
        Whether equal ids mean equal blocks in other files too, likewise: ids are hashes of the
        blocks' content in LMCache's log, in hexadecimal text, in files of a `TraceRecorder` and in
        logs of prompts, and object ids in libCacheSim's traces. Other ids number the blocks of this
        file.

    Raises
    ------
    ValueError
        If there is no format of that name.
    TraceError
        During iteration: the file cannot be opened or read to its end, a line breaks a rule
        (without `skip_bad`), or the trace holds no request.

    Notes
    -----
    Not safe to iterate over from two threads at once.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        skip_bad: bool = False,
        model_name: str | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
        sessions: SessionOptions | None = None,
        prompts: PromptOptions | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.more_paths: Sequence[str] = ()  # of files whose sessions follow these
        self._sessions = sessions or SessionOptions()
        self._prompts = prompts or PromptOptions()
        self.name = "<stdin>" if self.path == STDIN else self.path
        self.skip_bad = skip_bad
        self.bad_lines = 0
        self.is_empty = False
        self._parser: Parser | None = None  # of the latest iteration
        self._id_tokens: int | None = None  # of mooncake-delta, as far as they are known
        self.format = format
        self.block_tokens: int | None = None
        self.block_bytes: int | None = None
        self.start: float | None = None
        self.has_hashes = False
        self._model_name = model_name
        self._given_format = format
        if format is None and is_named_oracle_general(self.path):
            self._given_format = ORACLE_GENERAL
        self._max_line_bytes = max_line_bytes
        if format is not None and format not in FORMAT_NAMES:
            raise ValueError(f"format must be one of {', '.join(FORMAT_NAMES)}, got {format!r}")

    @property
    def is_log(self) -> bool:
        """Whether the latest iteration reads a log of requests, in which times may run back."""
        return isinstance(self._parser, LogParser)

    @property
    def has_prompts(self) -> bool:
        """Whether the latest iteration reads prompts, of which it makes blocks."""
        return isinstance(self._parser, LogParser) and self._parser.has_prompts

    @property
    def remarks(self) -> list[str]:
        """Contents of the latest iteration's requests that could not be followed, in words."""
        found = [] if self._parser is None else self._parser.remarks
        if self._given_format is None and isinstance(self._parser, MooncakeParser):
            is_delta = isinstance(self._parser, MooncakeDeltaParser)
            if is_delta:
                size = self._parser.block_tokens
                found.append(
                    "no row repeats its session's first id, so rows are read as listing only what "
                    f"is new, {size:,} tokens per id (mooncake-delta); --format mooncake takes "
                    "them as whole prompts"
                )
            elif self._parser.lists_additions:
                found.append(
                    "no row repeats its session's first id: if rows list only what is new in "
                    "their session, name --format mooncake-delta"
                )
        return found

    def __iter__(self) -> Iterator[Request]:
        self.bad_lines = 0
        self.is_empty = False
        self._parser = None
        self.block_tokens = self.block_bytes = self.start = None
        self.has_hashes = False
        self._id_tokens = None
        batches = self.batches()
        if batches is not None:
            yield from requests_of(batches)
            return
        self.format = self._given_format
        found_format = {**FORMATS, **LOG_FORMATS}.get(self.format or "", MOONCAKE)
        requests = 0
        is_settled = False  # whether a good line has shown the format
        with open_rows(self.path, self._given_format, self._prompts, self._max_line_bytes) as rows:
            found = _Ahead(rows)
            if found_format is MOONCAKE_DELTA:
                self._id_tokens = self._sessions.block_tokens
                if self._id_tokens is None:
                    self._id_tokens = _Probe(found.look(AHEAD_BYTES)).id_tokens(self.name)
            parse = self._parser = self._new_parser(found_format, found)
            while True:
                try:
                    line = next(found)
                    if not is_settled and self._is_to_be_recognised:
                        format = self._recognised(line, found)
                        if format is not found_format:
                            found_format = format
                            parse = self._parser = self._new_parser(found_format, found)
                    if not is_settled:
                        parse.model_name = self._model_name
                    if found_format is WEKA:
                        yield from self._session_requests(chain((line,), found), found)
                        return
                    made = parse.requests(line)
                    if self._given_format is None and isinstance(parse, MooncakeDeltaParser):
                        self._check_additions(parse, found)
                except StopIteration:
                    break
                except BadLineError as error:
                    self._pass_over(error, found)
                    continue
                is_settled = True
                if made and not requests:
                    self._check_that_models_are_named()
                    self.start = parse.start
                    self.has_hashes = rows.is_recording or found_format.has_hashes
                self.block_tokens, self.block_bytes = parse.block_tokens, parse.block_bytes
                requests += len(made)
                yield from made
            if requests == 0:
                got = self._nothing(rows, parse, is_settled=is_settled)
                raise self._empty(max(1, rows.count), got)

    @property
    def _is_to_be_recognised(self) -> bool:
        """Whether a line shows the format, or which of the logs it is of."""
        return self._given_format in (None, CSV, PARQUET, ANY_LOG.name)

    def _pass_over(self, error: BadLineError, where: Rows | _Ahead) -> None:
        """Count a bad line, or raise TraceError if they are not to be skipped."""
        if not self.skip_bad:
            raise TraceError(where.name, where.count, str(error)) from None
        self.bad_lines += 1

    def _nothing(self, rows: Rows, parse: Parser, *, is_settled: bool) -> str:
        """Return what a trace without requests has instead, in words."""
        if parse.nothing_text:
            return parse.nothing_text
        if self.bad_lines:
            return plural(self.bad_lines, "bad line")
        if isinstance(rows, TableRows | ParquetRows) and rows.bytes_read:
            return "a table without rows"
        if is_settled:
            return f"{plural(rows.count, 'line')} without one"
        return plural(rows.count, "blank line") if rows.count else "an empty file"

    def batches(self) -> Iterator[ObjectBatch] | None:
        """Return the rows in arrays if it is a trace of single objects, else None.

        Each is the times, milliseconds, and the block ids of some requests of one block.
        """
        format = self._given_format
        if format is None and are_objects(first_line(self.path)):
            format = OBJECTS
        if format not in (OBJECTS, ORACLE_GENERAL):
            return None
        self.bad_lines, self.format, self.has_hashes = 0, format, True
        self._check_that_models_are_named()
        batches = object_batches if format == OBJECTS else record_batches
        return self._not_empty(batches(self.path), "an empty file")

    def _not_empty(self, found: Iterable[_Found], got: str) -> Iterator[_Found]:
        """Yield what is found; TraceError if that is nothing."""
        is_empty = True
        for each in found:
            is_empty = False
            yield each
        if is_empty:
            raise self._empty(None, got)

    def _empty(self, line: int | None, got: str) -> TraceError:
        """Return the error of a trace without requests."""
        self.is_empty = True
        wanted = "" if self._model_name is None else f" to model {self._model_name!r}"
        rule = f"a trace must hold at least one request{wanted}, got {got}"
        return TraceError(self.name, line, rule)

    def _recognised(self, line: bytes, found: _Ahead) -> Format:
        """Return the format of a line, by those that follow it if it does not show it."""
        if self._prompts.fields is not None:
            format: Format = mapped(self._given_format or "fields", self._prompts.fields)
        else:
            format = recognise(line, logs_only=self._given_format == ANY_LOG.name)
        if format is MOONCAKE and SESSION_ID in line and not found.has_looked:
            probe = _Probe(chain((line,), found.look(AHEAD_BYTES)))
            self._id_tokens = probe.additions(self._sessions.block_tokens)
        if format is MOONCAKE and self._id_tokens is not None:
            format = MOONCAKE_DELTA
        self.format = format.name
        return format

    def _check_additions(self, parse: MooncakeDeltaParser, found: _Ahead) -> None:
        """Refuse a row that contradicts those by which the format was recognised."""
        if parse.has_repeats:
            rule = (
                "no row before repeats its session's first id, but this one does: whether rows "
                "list only what is new has to be named, --format mooncake-delta or mooncake"
            )
            raise TraceError(self.name, found.count, rule)

    def _new_parser(self, format: Format, found: _Ahead) -> Parser:
        if isinstance(format, Log):
            is_named = self._prompts.fields is not None or not self._is_to_be_recognised
            other, ahead = None if is_named else log_of, partial(found.look, AHEAD_BYTES)
            return LogParser(self._prompts, format, other, ahead)
        if format is MOONCAKE_DELTA and self._id_tokens is not None:
            return MooncakeDeltaParser(self._id_tokens, lambda: found.rows.bytes_read)
        return format.new_parser()

    def _session_requests(self, first: Iterator[bytes], ahead: _Ahead) -> Iterator[Request]:
        """Yield the requests of sessions; `first` are the lines of the first file."""
        self._check_that_models_are_named()
        parser = WekaParser(
            self._sessions.block_tokens, shared_prompts=self._sessions.shared_prompts
        )
        with scratch_file() as (stream, spooled):
            rows = SessionRows(self._sessions, stream, spooled)
            self._add_sessions(first, ahead, parser, rows)
            for path in self.more_paths:
                with open_rows(
                    path, self._given_format, self._prompts, self._max_line_bytes
                ) as more:
                    self._add_sessions(more, more, parser, rows)
            self.block_tokens, self.has_hashes = parser.block_tokens, WEKA.has_hashes
            yield from self._not_empty(rows.requests(), "sessions without any")

    def _add_sessions(
        self, found: Iterator[bytes], lines: Rows | _Ahead, parser: WekaParser, rows: SessionRows
    ) -> None:
        while True:
            try:
                line = next(found, None)
                if line is None:
                    return
                rows.add(parser.session(line))
            except BadLineError as error:  # noqa: PERF203
                self._pass_over(error, lines)

    def _check_that_models_are_named(self) -> None:
        named = isinstance(self._parser, LMCacheParser | LogParser)
        if self._model_name is not None and not named:
            rule = (
                "a trace must be a log of prompts, or in the format lmcache, for a model to be "
                f"chosen, got {self.format}"
            )
            raise TraceError(self.name, None, rule)


class _Ahead:
    """An iterator over lines, some of which may be looked at before their turn.

    Attributes
    ----------
    rows : Rows
        The lines.
    name : str
        Name of the trace in messages.
    count : int
        Number of the line returned last.
    has_looked : bool
        Whether lines have been looked at before their turn.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._held: deque[tuple[int, bytes | BadLineError | TraceError]] = deque()
        self.name = rows.name
        self.count = 0
        self.has_looked = False

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> bytes:
        if self._held:
            self.count, item = self._held.popleft()
            if isinstance(item, bytes):
                return item
            raise item
        try:
            return next(self.rows)
        finally:
            self.count = self.rows.count

    def look(self, most_bytes: int) -> Iterator[bytes]:
        """Yield lines that keep their turn: errors are passed over, and raised in theirs."""
        self.has_looked = True
        held = 0
        while held < most_bytes:
            item: bytes | BadLineError | TraceError
            try:
                item = next(self.rows)
            except StopIteration:
                return
            except (BadLineError, TraceError) as error:
                item = error
            self._held.append((self.rows.count, item))
            held += len(item) + 100 if isinstance(item, bytes) else 1000
            if isinstance(item, bytes):
                yield item


class _Probe:
    """Rows of Mooncake's form, read to see what they list; bad ones are passed over."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._parser = MooncakeParser()
        self._lengths = BlockLengths()
        self._rows = 0
        for line in lines:
            try:
                request = self._parser(line)
            except BadLineError:
                continue
            self._rows += 1
            self._lengths.add(request.input_length, len(request.hash_ids))

    def additions(self, block_tokens: int | None) -> int | None:
        """Return the tokens of an id if rows list only what is new in their session, else None."""
        size = block_tokens or self._lengths.best()
        return size if self._fits(size) and self._parser.lists_additions else None

    def id_tokens(self, name: str) -> int:
        """Return the tokens of an id; TraceError if they do not follow from the lengths."""
        size = self._lengths.best() or 1
        if self._rows and not self._fits(size):
            rule = (
                "rows must have an id for each N tokens, the same N in all, or it must be given "
                "(--block-tokens), got others"
            )
            raise TraceError(name, None, rule)
        return size

    def _fits(self, size: int | None) -> bool:
        return (
            size is not None and size <= MOST_ID_TOKENS and self._lengths.with_partial.holds(size)
        )
