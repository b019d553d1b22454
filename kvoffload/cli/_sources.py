"""The trace given to a command, readable more than once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvoffload import IMPLEMENTATION, __version__
from kvoffload.advise.units import duration_text
from kvoffload.replay import Selection
from kvoffload.replay.groups import MAX_CHUNK_TOKENS
from kvoffload.traces import MergedTrace, PromptOptions, Request, SessionOptions, Survey, Workload
from kvoffload.traces.breaks import PrefixBreaks
from kvoffload.traces.formats.mooncake import MOONCAKE
from kvoffload.traces.lines import STDIN, is_read_again
from kvoffload.traces.merged import trace_files
from kvoffload.traces.objects import OBJECTS, ObjectBatch, batches_of
from kvoffload.traces.oracle_general import ORACLE_GENERAL
from kvoffload.traces.rows import CSV, PARQUET
from kvoffload.traces.scratch import Spool, scratch_file
from kvoffload.traces.sorting import counted_from_first, sorted_by_time

from ._terminal import bad_lines_text, counted, note, progress_bar

TABLES = (CSV, PARQUET)
OF_PROMPTS = ("tokenizer", "bytes_per_token", "tokens_per_image", "salt")
"""Options that only a log of prompts needs."""
PROGRESS_REQUESTS = 256  # between two calls of the progress function
MOST_RATE = 10**6
"""Prompt tokens per second that no recorded engine had."""
MOST_KEYED, KEYED_BYTES = 8, 2**16
"""Files, and bytes of each, of which the key of a log's blocks is made."""
ENOUGH = 10
"""Requests whose rate means something."""
LONG_PAUSE = 24 * 3600
"""Seconds without a request that are noted, if they are most of the trace."""


def given_option(*parameters: str) -> str | None:
    """Return the first of some options of the command that the user gave; None if none was."""
    context = click.get_current_context(silent=True)
    if context is None:  # on another machine
        return None
    source, given = context.get_parameter_source, ParameterSource.COMMANDLINE
    options = {option.name: option.opts[-1] for option in context.command.params}
    return next((options[name] for name in parameters if source(name) is given), None)


def refuse_given(rule: str, *parameters: str) -> None:
    """Refuse the first of some options that the user gave although it breaks a rule."""
    option = given_option(*parameters)
    if option is not None:
        raise click.UsageError(f"{option} {rule}")


@dataclass(frozen=True, slots=True)
class Reading:
    """The options of every command that reads a trace, as given."""

    format: str | None
    model_name: str | None
    limit: int | None
    skip_bad: bool
    same_ids: bool
    tokenizer: str | None = None
    bytes_per_token: int | None = None
    tokens_per_image: int | None = None
    salt: str | None = None
    fields: Mapping[str, str] | None = None
    delimiter: str | None = None
    drawn: str | None = field(default=None, repr=False)  # instead of a salt; None: draw one

    def check_prompts(self, trace: MergedTrace) -> None:
        """Refuse options of prompts that have no effect on a trace that has been begun."""
        if not trace.has_prompts:
            rule = f"must go with a log of prompts, got it with {trace.format}"
            refuse_given(rule, "fields", *OF_PROMPTS, "show_text")

    def prompts(
        self, block_tokens: int | None = None, breaks: PrefixBreaks | None = None
    ) -> PromptOptions:
        """Return how to make blocks of prompts, with one key for all passes."""
        return PromptOptions(
            tokenizer=self.tokenizer,
            bytes_per_token=self.bytes_per_token or 4,
            tokens_per_image=self.tokens_per_image or 1000,
            block_tokens=block_tokens,
            salt=self.salt or self.drawn,
            fields=self.fields,
            delimiter=self.delimiter,
            breaks=breaks,
        )

    def trace(
        self,
        files: Sequence[str],
        sessions: SessionOptions | None = None,
        prompts: PromptOptions | None = None,
    ) -> MergedTrace:
        """Return the trace made of files, without the limit; refuse options that exclude others."""
        if self.tokenizer is not None:
            refuse_given("must go without --tokenizer, got both", "bytes_per_token")
        if self.format is not None and self.format not in TABLES:
            rule = f"must go without --format, or with {' or '.join(TABLES)}"
            refuse_given(f"{rule}, got it with --format {self.format}", "fields")
        return MergedTrace(
            files,
            format=self.format,
            skip_bad=self.skip_bad,
            model_name=self.model_name,
            same_ids=self.same_ids,
            sessions=sessions,
            prompts=prompts or self.prompts(),
        )

    def requests(self, trace: MergedTrace) -> _InOrder:
        """Return the first requests of a trace, those of a log in the order of their times."""
        return _InOrder(Selection(trace, limit=self.limit), trace, self)


class _InOrder:
    """Requests that can be iterated over again; those of a log are sorted by time."""

    def __init__(self, requests: Iterable[Request], trace: MergedTrace, reading: Reading) -> None:
        self._requests, self._trace, self._reading = requests, trace, reading
        self.progress: Callable[[int], object] | None = None  # of reading a log, before sorting

    def batches(self) -> Iterator[ObjectBatch] | None:
        """Return the rows in arrays, if they are of single objects."""
        found = batches_of(self._requests)
        if found is not None:
            self._reading.check_prompts(self._trace)
        return found

    def __iter__(self) -> Iterator[Request]:
        requests = iter(self._requests)
        first = next(requests, None)
        if first is None:
            return
        self._reading.check_prompts(self._trace)
        requests = chain((first,), requests)
        if self._trace.is_log:
            watched = counted(requests, self.progress, PROGRESS_REQUESTS)
            requests = counted_from_first(sorted_by_time(watched))
        yield from requests


class Generated:
    """The facts of a generated workload, by the names of a `MergedTrace`."""

    paths: Sequence[str] = ()
    id_spaces = 1
    format: str | None = None
    block_tokens: int | None = None
    block_bytes: int | None = None
    has_prompts = is_log = False
    remarks: Sequence[str] = ()
    bad_lines = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Requests that can be iterated over repeatedly, and their origin."""

    name: str  # the name given by the user
    requests: Iterable[Request]
    trace: MergedTrace | Generated = field(default_factory=Generated)  # what they are read from
    same_ids: bool = False  # the user said that equal ids mean equal blocks in all files
    is_copy: bool = False  # of input that could be read only once

    @property
    def ids_text(self) -> str | None:
        """The treatment of the block ids of several files, in words; None for one file."""
        files, spaces = len(self.trace.paths), self.trace.id_spaces
        if files < 2:
            return None
        whose = f"ids of {files:,} files"
        if self.same_ids:
            return f"{whose} taken as one numbering"
        if spaces == 1:
            return f"{whose} shared: they are hashes"
        apart = "kept apart" if spaces == files else "kept apart, but for hashes"
        return f"{whose} {apart} (--same-ids: one numbering)"

    @property
    def names(self) -> list[str]:
        """The name, and the treatment of the block ids of several files, if there are some."""
        name = "standard input" if self.name == STDIN else self.name
        return [name] if self.ids_text is None else [name, self.ids_text]

    @property
    def assumed_text(self) -> str | None:
        """Assumptions made and rows left out as the trace was read, in words; None without any."""
        trace = self.trace
        found = list(trace.remarks) if trace.has_prompts else []
        found += [bad_lines_text(trace.bad_lines), self.ids_text or ""]
        return "; ".join(filter(None, found)) or None

    def watched(self, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Return a function that shows progress, also while a log is read to be sorted."""
        if isinstance(self.requests, _InOrder):
            self.requests.progress = progress
        return progress

    def survey(self, what: str, total: int | None, **options: Any) -> Survey:
        """Read all requests, `total` if that is known, with a bar of progress."""
        with progress_bar(what, total) as progress:
            return Survey.of(self.requests, progress=self.watched(progress), **options)

    def head(self) -> dict[str, object]:
        """Return the first fields of every result that ``--json`` prints."""
        return {
            "trace": self.name,
            "files": len(self.trace.paths) or None,
            "id_spaces": self.trace.id_spaces,
            "implementation": IMPLEMENTATION,
            "version": __version__,
        }


def named_files(paths: Sequence[str]) -> list[str]:
    """Return the files given as TRACE; standard input must be the only one."""
    if STDIN in paths and len(paths) > 1:
        raise click.UsageError(f"TRACE must be only - for standard input, got {len(paths)} names")
    return trace_files(paths)


@contextlib.contextmanager
def open_source(
    paths: Sequence[str],
    reading: Reading,
    block_tokens: int | None = None,
    breaks: PrefixBreaks | None = None,
) -> Iterator[Source]:
    """Open a trace for any number of iterations over its first requests.

    Of prompts, blocks of `block_tokens` are made, and `breaks` takes a sample.

    Input that can be read only once, standard input or a named pipe, is copied to a temporary
    file. Blocks of prompts in other files have the same ids each time, so that equal commands
    print equal figures.
    """
    files = named_files(paths)
    is_read_once = not all(map(is_read_again, files))
    if reading.drawn is None and not is_read_once:
        reading = replace(reading, drawn=_key_of(files))
    trace = reading.trace(files, prompts=reading.prompts(block_tokens, breaks))
    name = paths[0] if len(paths) == 1 else trace.name
    requests = reading.requests(trace)
    if not is_read_once:
        yield Source(name, requests, trace, reading.same_ids)
        return
    with scratch_file() as (stream, copy):
        spool = Spool(stream, copy)
        with progress_bar("reading", reading.limit) as progress:
            requests.progress = progress
            for request in counted(requests, progress, PROGRESS_REQUESTS):
                spool.add(request)
        yield Source(name, spool, trace, reading.same_ids, is_copy=True)


def _key_of(files: Sequence[str]) -> str:
    """Return a key that only who has the files knows."""
    digest = blake2b()
    for path in files[:MOST_KEYED]:
        with contextlib.suppress(OSError), Path(path).open("rb") as file:
            digest.update(file.read(KEYED_BYTES))
    return digest.hexdigest()


def open_or_generate(
    paths: Sequence[str],
    requests: int,
    seed: int | None,
    reading: Reading,
    block_tokens: int | None = None,
) -> contextlib.AbstractContextManager[Source]:
    """Open a trace, or generate a workload of that many requests if none is named.

    Options that would have no effect are refused.
    """
    if paths:
        refuse_given(f"must go without TRACE, got it with {paths[0]!r}", "seed")
        return open_source(paths, reading, block_tokens)
    names = ("format", "model_name", "skip_bad", "same_ids", "fields", "delimiter")
    refuse_given("must go with TRACE, got it without", *names, *OF_PROMPTS)
    workload = Workload(reading.limit or requests, seed=seed or 0)
    return contextlib.nullcontext(Source(workload.name, workload))


def note_order(survey: Survey, source: Source) -> None:
    """Note ignored fields, ids that are not chained, and timestamps that are hardly right."""
    trace = source.trace
    for remark in trace.remarks:
        note(remark)
    if trace.format in (OBJECTS, ORACLE_GENERAL):
        note(f"{trace.format}: each object is one block, whatever its size")
    rate = survey.input_tokens / survey.seconds if survey.seconds else 0.0
    counts_ms = trace.is_log or MOONCAKE.name in (trace.format or "")
    if rate > MOST_RATE and survey.requests >= ENOUGH and counts_ms:
        note(
            f"{rate:,.0f} prompt tokens per second: "
            + (
                "the times of the log seem to be in another unit"
                if trace.is_log
                else "timestamps count as milliseconds, and these seem to be seconds"
            )
        )
    if survey.chaining.is_suspect:
        note(_unchained_text(survey, source))
    if survey.backwards:
        step = survey.farthest_back
        note(
            f"{survey.backwards:,} of {survey.requests:,} timestamps are earlier than the one "
            f"before, by up to {f'{step:.3g} ms' if step < 1000 else duration_text(step / 1000)}, "
            "as in a log that is written when requests end: kvoffload convert --sort puts them in "
            "order"
        )
    elif (pause := survey.longest_pause / 1000) > max(LONG_PAUSE, survey.seconds / 2):
        note(
            f"no request comes for {duration_text(pause)} of the {duration_text(survey.seconds)}: "
            "rates count that time, and a timestamp may be wrong"
        )


def check_order(survey: Survey, source: Source) -> None:
    """Refuse a trace in which too many ids are not prefix-chained for advice to hold."""
    if survey.chaining.is_broken:
        raise click.UsageError(f"{_unchained_text(survey, source)}; --unchained-ids accepts them")


def order_object(survey: Survey) -> dict[str, object]:
    """Return the counts behind `note_order` as fields of ``--json``."""
    chaining = survey.chaining
    return {
        "repeated_ids": chaining.repeated_ids,
        "unchained_ids": chaining.unchained_ids,
        "unchained_requests": chaining.unchained_requests,
        "backward_timestamps": survey.backwards,
    }


def _unchained_text(survey: Survey, source: Source) -> str:
    found = survey.chaining
    way_out = "hash each block together with the id of the block before it"
    if source.same_ids and len(source.trace.paths) > 1:
        way_out += ", or leave out --same-ids"
    return (
        f"the ids are not prefix-chained, so hit ratios are too high: {found.unchained_ids:,} of "
        f"{found.repeated_ids:,} repeated ids, in {found.unchained_requests:,} of "
        f"{found.requests:,} requests, follow different ids or occur twice in a prompt; {way_out}"
    )


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """The number of tokens per block, and its origin.

    The origin is ``"trace"`` if the trace states it, ``"lengths"`` if it was inferred from the
    requests' lengths, ``"option"`` if those are not known and it was given.
    """

    count: int | None  # None if no one size fits all requests
    origin: str | None

    @classmethod
    def of(cls, source: Source, survey: Survey, given: int | None) -> BlockTokens:
        """Determine the tokens per block of a trace that has been read, given the user's option."""
        named = source.trace.block_tokens
        if given is not None:
            contradiction = survey.contradiction(given)
            if named is not None:
                contradiction = None if named == given else f"the trace says {named:,}"
            if contradiction is not None:
                raise click.UsageError(
                    f"--block-tokens must agree with the trace, got {given:,}: {contradiction}"
                )
        count = named or given or survey.block_tokens
        if count is None or count > MAX_CHUNK_TOKENS:
            return cls(None, None)
        if named is not None:
            return cls(count, "trace")
        return cls(count, "lengths" if survey.input_tokens else "option")

    def of_full_blocks(self) -> int:
        """Return the number of tokens, which ``--full-blocks`` needs."""
        if self.count is None:
            raise click.UsageError(
                "--full-blocks needs --block-tokens: no block size fits all requests"
            )
        if self.origin == "option":
            note("the trace has no lengths: --full-blocks keeps all blocks")
        return self.count

    def __str__(self) -> str:
        origin = " (as given; the trace has no lengths)" if self.origin == "option" else ""
        return f"blocks of {self.count:,} tokens{origin}"
