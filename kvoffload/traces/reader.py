"""A trace file that can be iterated over repeatedly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain

from .errors import BadLineError, TraceError
from .formats import (
    FORMATS,
    MODEL_FORMATS,
    NAMED_FORMATS,
    PROMPT_FORMATS,
    Format,
    Parser,
    recognise,
)
from .formats.comma_separated import COMMA_SEPARATED, Rows
from .formats.mooncake_delta import MOONCAKE_DELTA, MooncakeDeltaParser
from .formats.openai import OpenAIParser
from .formats.weka import WEKA, WekaParser
from .lines import MAX_LINE_BYTES, STDIN, Lines
from .oracle_general import ORACLE_GENERAL, is_named_oracle_general, read_objects
from .prompt_blocks import PromptOptions
from .request import Request
from .scratch import scratch_file
from .sessions import SessionOptions, SessionRows

FORMAT_NAMES = (*FORMATS, ORACLE_GENERAL)
"""The formats that a trace may be in: those of lines, and the one of records."""


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
        ``"mooncake"``, ``"lmcache"``, ``"bailian"``, ``"weka"``, ``"dynamo"``, ``"hex"`` or
        ``"oracle-general"``; by default the last for a file with the name of libCacheSim's traces,
        such as ``w.oracleGeneral.zst``, else the one of its first good line. Requests of ``"weka"``
        are sorted by time. Three formats are read only if named: ``"mooncake-delta"``, rows with
        only the new part of a session, and the logs of prompts ``"openai"`` and ``"csv"``, whose
        times are Unix times in milliseconds.
    skip_bad : bool
        Skip lines that break the format's rules, and count them in `bad_lines`. A file that cannot
        be read to its end, such as a truncated or damaged compressed one, is still an error.
    model_name : str, optional
        Read only the requests to this model, in a format that names it: LMCache's log.
    max_line_bytes : int
        Longest line that is accepted, bytes.
    sessions : SessionOptions, optional
        Options for ``"weka"``, sessions that were published without their starts. For
        ``"mooncake-delta"`` only `block_tokens` counts, the tokens that an id stands for.
    prompts : PromptOptions, optional
        How to make blocks of prompts, for ``"openai"`` and ``"csv"``, which needs its columns.

    Attributes
    ----------
    name : str
        Name of the trace in messages.
    bad_lines : int
        Bad lines skipped by the latest iteration.
    remarks : list of str
        Contents of the latest iteration's requests that could not be followed as they are, such as
        a field that is not read, each with the number of requests.
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
        If there is no format of that name, or columns are not given for ``"csv"``, or tokens of a
        block for ``"mooncake-delta"``.
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
        self.remarks: list[str] = []
        self.format = format
        self.block_tokens: int | None = None
        self.block_bytes: int | None = None
        self.start: float | None = None
        self.has_hashes = False
        self._model_name = model_name
        self._given_format = format
        self._max_line_bytes = max_line_bytes
        known = (*FORMAT_NAMES, *NAMED_FORMATS)
        if format is not None and format not in known:
            raise ValueError(f"format must be one of {', '.join(known)}, got {format!r}")
        if format == COMMA_SEPARATED.name and self._prompts.columns is None:
            raise ValueError("prompts must name the columns of csv, got none")
        if format == MOONCAKE_DELTA.name and self._sessions.block_tokens is None:
            raise ValueError(f"sessions must give the block_tokens of {format}, got none")

    def __iter__(self) -> Iterator[Request]:
        self.bad_lines = 0
        self.remarks = []
        self.block_tokens = self.block_bytes = self.start = None
        self.has_hashes = False
        self.format = self._given_format
        if self.format is None and is_named_oracle_general(self.path):
            self.format = ORACLE_GENERAL
        if self.format == ORACLE_GENERAL:
            yield from self._object_requests()
            return
        found_format = {**FORMATS, **NAMED_FORMATS}[self.format or next(iter(FORMATS))]
        parse = self._new_parser(found_format)
        requests = 0
        is_settled = False  # whether a good line has shown the format
        with Lines(self.path, self._max_line_bytes) as lines:
            found = self._found_in(lines)
            while True:
                try:
                    line = next(found)
                    if not is_settled and self._given_format is None:
                        found_format = recognise(line, self.path)
                        self.format, parse = found_format.name, found_format.new_parser()
                    if not is_settled and self._model_name is not None:
                        self._check_that_models_are_named()
                        parse.model_name = self._model_name
                    if found_format is WEKA:
                        yield from self._session_requests(line, lines)
                        return
                    request = parse(line)
                except StopIteration:
                    self.remarks = parse.remarks
                    break
                except BadLineError as error:
                    if not self.skip_bad:
                        raise TraceError(self.name, lines.count, str(error)) from None
                    self.bad_lines += 1
                    continue
                is_settled = True
                if not parse.is_wanted:
                    continue
                requests += 1
                if requests == 1:
                    self.start = parse.start
                    self.has_hashes = lines.is_recording or found_format.has_hashes
                self.block_tokens, self.block_bytes = parse.block_tokens, parse.block_bytes
                yield request
            if requests == 0:
                count, kind = self.bad_lines or lines.count, "bad" if self.bad_lines else "blank"
                got = f"{count} {kind} line{'s' * (count > 1)}" if count else "an empty file"
                wanted = ""
                if self._model_name is not None:
                    wanted = f" to model {self._model_name!r}"
                    got = parse.models_text or got
                rule = f"a trace must hold at least one request{wanted}, got {got}"
                raise TraceError(self.name, max(1, lines.count), rule)

    def _object_requests(self) -> Iterator[Request]:
        """Yield the requests of a trace of objects."""
        if self._model_name is not None:
            try:
                self._check_that_models_are_named()
            except BadLineError as error:
                raise TraceError(self.name, None, str(error)) from None
        self.has_hashes = True
        is_empty = True
        for request in read_objects(self.path):
            is_empty = False
            yield request
        if is_empty:
            rule = "a trace must hold at least one request, got an empty file"
            raise TraceError(self.name, None, rule)

    def _found_in(self, lines: Lines) -> Iterator[bytes]:
        """Return the parser's input: lines, or rows of CSV, which may span several."""
        if self._given_format == COMMA_SEPARATED.name:
            return Rows(lines, self._prompts.columns or {}, self._max_line_bytes)
        return lines

    def _new_parser(self, format: Format) -> Parser:
        if format.name in PROMPT_FORMATS:
            return OpenAIParser(self._prompts)
        if format is MOONCAKE_DELTA:
            return MooncakeDeltaParser(self._sessions.block_tokens)
        return format.new_parser()

    def _session_requests(self, first: bytes, lines: Lines) -> Iterator[Request]:
        """Yield the requests of sessions; `first` is the first session's line."""
        parser = WekaParser(
            self._sessions.block_tokens, shared_prompts=self._sessions.shared_prompts
        )
        with scratch_file() as (stream, spooled):
            rows = SessionRows(self._sessions, stream, spooled)
            self._add_sessions(chain((first,), lines), lines, parser, rows)
            for path in self.more_paths:
                with Lines(path, self._max_line_bytes) as more:
                    self._add_sessions(more, more, parser, rows)
            self.block_tokens, self.has_hashes = parser.block_tokens, WEKA.has_hashes
            is_empty = True
            for request in rows.requests():
                is_empty = False
                yield request
        if is_empty:
            rule = "a trace must hold at least one request, got sessions without any"
            raise TraceError(self.name, None, rule)

    def _add_sessions(
        self, found: Iterator[bytes], lines: Lines, parser: WekaParser, rows: SessionRows
    ) -> None:
        while True:
            try:
                line = next(found, None)
                if line is None:
                    return
                rows.add(parser.session(line))
            except BadLineError as error:  # noqa: PERF203
                if not self.skip_bad:
                    raise TraceError(lines.name, lines.count, str(error)) from None
                self.bad_lines += 1

    def _check_that_models_are_named(self) -> None:
        if self.format not in MODEL_FORMATS:
            rule = (
                f"a trace must be in a format that names models ({', '.join(MODEL_FORMATS)}) for "
                f"one of them to be chosen, got {self.format}"
            )
            raise BadLineError(rule)
