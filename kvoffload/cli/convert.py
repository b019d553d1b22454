"""``kvoffload convert``: a trace in another format, in the Mooncake format or libCacheSim's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import click

from kvoffload.traces import MergedTrace, Request, SessionOptions, Survey
from kvoffload.traces.formats.mooncake import MOONCAKE
from kvoffload.traces.formats.mooncake_delta import MOONCAKE_DELTA
from kvoffload.traces.formats.weka import WEKA
from kvoffload.traces.oracle_general import ORACLE_GENERAL, write_oracle_general
from kvoffload.traces.sorting import sorted_by_time
from kvoffload.traces.writer import write_requests

from ._options import MAX_BLOCK_TOKENS, examples, reading_options, traces_argument
from ._output import check_output_option, packed_option, write_output
from ._sources import Reading, Source, given_option, named_files, note_order, refuse_given
from ._terminal import note, note_bad_lines

MOST_SECONDS = 10**9
WRITERS = {MOONCAKE.name: write_requests, ORACLE_GENERAL: write_oracle_general}
FULL_BLOCKS = ("lmcache", WEKA.name, MOONCAKE_DELTA.name)  # whose requests have full blocks only


@click.command(
    epilog=examples(
        "kvoffload convert lookup_hashes/ --output trace.jsonl.zst",
        "kvoffload convert log.jsonl --sort --output trace.jsonl.zst",
        "kvoffload convert sessions/ --starts 28800 --output trace.jsonl.zst",
        "kvoffload convert trace.jsonl --to oracle-general -o trace.oracleGeneral",
        "kvoffload convert chats.jsonl --tokenizer model/ -o trace.jsonl.zst",
    )
)
@traces_argument
@packed_option
@click.option(
    "--to",
    type=click.Choice(list(WRITERS)),
    default=MOONCAKE.name,
    show_default=True,
    help="Format to write: oracle-general is libCacheSim's, with one record of size 1 per block.",
)
@click.option(
    "--sort",
    is_flag=True,
    help="Sort the requests by their timestamps, through a temporary file. By default, the "
    "requests of a file keep their order.",
)
@click.option(
    "--starts",
    metavar="SECONDS",
    type=click.IntRange(0, MOST_SECONDS),
    help="Draw the start of each session over this many seconds; sessions are published without "
    "starts (weka). By default, all start together.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of --starts; 0 by default.")
@click.option(
    "--until",
    metavar="SECONDS",
    type=click.IntRange(0, MOST_SECONDS),
    help="Leave out requests of sessions after this time.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1, MAX_BLOCK_TOKENS),
    help="Tokens per block: a multiple of the sessions' own (weka); any number, 16 by default "
    "(prompts); the tokens of an id, inferred by default (mooncake-delta); any number, "
    "for the lengths that are written, where the trace has none (hex, oracle-general).",
)
@click.option(
    "--shared-prompts",
    is_flag=True,
    help="Take tools and system prompt to be the same in all sessions that have equally many "
    "tokens of both; the ids do not show what sessions share (weka).",
)
@reading_options
def convert(
    traces: tuple[str, ...],
    *,
    output: str,
    to: str,
    sort: bool,
    starts: int | None,
    seed: int | None,
    until: int | None,
    block_tokens: int | None,
    shared_prompts: bool,
    reading: Reading,
) -> None:
    """Write a trace in the Mooncake format, or for libCacheSim.

    TRACE is in any of the formats: a trace, sessions of coding agents, or a log of a gateway, of
    whose prompts only keyed hashes are written. Several files, folders or patterns are merged by
    time, and logs are sorted by it. Rows that list only what is new in their session are put
    together.
    """
    if starts is None:
        refuse_given("must go with --starts, got it without", "seed")
    check_output_option(traces, output, to)
    sessions = SessionOptions(
        starts_s=starts or 0.0,
        seed=seed or 0,
        until_s=until,
        block_tokens=block_tokens,
        shared_prompts=shared_prompts,
    )
    source = reading.trace(named_files(traces), sessions, reading.prompts(block_tokens))
    option = given_option("starts", "seed", "until", "shared_prompts", "block_tokens")
    survey = Survey()
    requests: Iterable[Request] = reading.requests(source)
    if option is not None:
        requests = _as_asked(requests, source, option, block_tokens)
    counted = survey.counting(sorted_by_time(requests) if sort else requests)
    try:
        write_output(counted, output, WRITERS[to])
    except OverflowError as error:
        raise click.UsageError(f"{error}, for --to {to}") from None
    whole = Source("", source, source, reading.same_ids)
    ids_text = whole.ids_text
    if ids_text is not None:
        note(ids_text)
    note_bad_lines(source.bad_lines)
    note_order(survey, whole)
    if source.has_prompts and not survey.blocks:
        note(f"no prompt fills a block of {source.block_tokens:,} tokens")
    is_full = source.has_prompts or source.format in FULL_BLOCKS
    if to == MOONCAKE.name and is_full and source.block_tokens is not None:
        note(
            f"blocks of {source.block_tokens:,} tokens, full ones only: "
            f"replay it with --block-tokens {source.block_tokens}"
        )


def _as_asked(
    requests: Iterable[Request], source: MergedTrace, option: str, block_tokens: int | None
) -> Iterator[Request]:
    """Yield requests; refuse an option that does not go with the trace.

    A prompt whose length is not known gets that of its blocks, if their size is given.
    """
    for request in requests:
        is_known, what = source.format == WEKA.name, "sessions (weka)"
        if option == "--block-tokens":
            is_known |= source.is_log or source.format == MOONCAKE_DELTA.name
            is_known |= not request.input_length
            what += ", prompts or blocks of unknown size"
        if not is_known:
            raise click.UsageError(f"{option} must go with {what}, got {source.format}")
        if block_tokens is None or request.input_length:
            yield request
        else:
            yield replace(request, input_length=len(request.hash_ids) * block_tokens)
