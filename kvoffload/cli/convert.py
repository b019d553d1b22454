"""``kvoffload convert``: a trace in another format, in the Mooncake format or libCacheSim's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from kvoffload.replay import Selection
from kvoffload.traces import MergedTrace, Request, SessionOptions, Survey
from kvoffload.traces.formats.mooncake import MOONCAKE
from kvoffload.traces.formats.weka import WEKA
from kvoffload.traces.oracle_general import ORACLE_GENERAL, write_oracle_general
from kvoffload.traces.sorting import sorted_by_time
from kvoffload.traces.writer import write_requests

from ._options import examples, reading_options, traces_argument
from ._output import check_output_option, output_option, write_output
from ._sources import Reading, Source, named_files, note_order
from ._terminal import note, note_bad_lines

MOST_SECONDS = 10**9
WRITERS = {MOONCAKE.name: write_requests, ORACLE_GENERAL: write_oracle_general}
FULL_BLOCKS = ("lmcache", WEKA.name)  # formats whose requests have full blocks only


@click.command(
    epilog=examples(
        "kvoffload convert lookup_hashes/ --output trace.jsonl.zst",
        "kvoffload convert log.jsonl --sort --output trace.jsonl.zst",
        "kvoffload convert sessions/ --starts 28800 --output trace.jsonl.zst",
        "kvoffload convert trace.jsonl --to oracle-general -o trace.oracleGeneral",
    )
)
@traces_argument
@output_option
@click.option(
    "--to",
    type=click.Choice(list(WRITERS)),
    default=MOONCAKE.name,
    show_default=True,
    help="Format to write: oracle-general is libCacheSim's, a record of size 1 for each block.",
)
@click.option(
    "--sort",
    is_flag=True,
    help="Put the requests in the order of their timestamps, through a temporary file; otherwise "
    "those of a file keep their order.",
)
@click.option(
    "--starts",
    "starts_s",
    metavar="SECONDS",
    type=click.IntRange(0, MOST_SECONDS),
    help="Draw when each session starts, over so many seconds; they are published without "
    "(weka). Otherwise all start together.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of that draw, 0 if not given.")
@click.option(
    "--until",
    "until_s",
    metavar="SECONDS",
    type=click.IntRange(0, MOST_SECONDS),
    help="Leave out requests of sessions that come later.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    help="Make blocks of so many tokens, a multiple of those of the sessions (weka).",
)
@click.option(
    "--shared-prompts",
    is_flag=True,
    help="Take tools and system prompt for the same in all sessions that have as many tokens of "
    "both; the ids do not say what sessions share (weka).",
)
@reading_options
def convert(
    traces: tuple[str, ...],
    *,
    output: str,
    to: str,
    sort: bool,
    starts_s: int | None,
    seed: int | None,
    until_s: int | None,
    block_tokens: int | None,
    shared_prompts: bool,
    reading: Reading,
    quiet: bool,
) -> None:
    """Write a trace in the Mooncake format, or for libCacheSim.

    TRACE is in the Mooncake format itself, LMCache's lookup-hash log, the format of the Bailian
    traces, sessions of coding agents as kv-cache-tester publishes them, libCacheSim's oracleGeneral
    or plain text with a request's hexadecimal hashes on each line; several files, folders or
    patterns are merged by time.
    """
    check_output_option(traces, output, to)
    sessions = SessionOptions(
        starts_s=starts_s or 0.0,
        seed=seed or 0,
        until_s=until_s,
        block_tokens=block_tokens,
        shared_prompts=shared_prompts,
    )
    source = reading.trace(named_files(traces), sessions)
    given = {
        "--starts": starts_s,
        "--seed": seed,
        "--until": until_s,
        "--block-tokens": block_tokens,
        "--shared-prompts": shared_prompts or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    survey = Survey()
    requests: Iterable[Request] = Selection(source, limit=reading.limit)
    if option is not None:
        requests = _of_sessions(requests, source, option)
    counted = survey.counting(sorted_by_time(requests) if sort else requests)
    try:
        write_output(counted, output, WRITERS[to])
    except OverflowError as error:
        raise click.UsageError(f"{error}, for --to {to}") from None
    whole = Source("", source, source, reading.same_ids)
    ids_text = whole.ids_text
    if ids_text is not None:
        note(ids_text, quiet=quiet)
    note_bad_lines(source.bad_lines, quiet=quiet)
    note_order(survey, whole, quiet=quiet)
    if to == MOONCAKE.name and source.format in FULL_BLOCKS and source.block_tokens is not None:
        note(
            f"blocks of {source.block_tokens:,} tokens, full ones only: "
            f"replay it with --block-tokens {source.block_tokens}",
            quiet=quiet,
        )


def _of_sessions(
    requests: Iterable[Request], source: MergedTrace, option: str
) -> Iterator[Request]:
    """Yield requests; refuse an option of sessions where the trace has none."""
    for request in requests:
        if source.format != WEKA.name:
            raise click.UsageError(f"{option} must go with sessions (weka), got {source.format}")
        yield request
