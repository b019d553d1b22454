"""``kvoffload convert``: a trace in another format, in the Mooncake format or libCacheSim's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import click

from kvoffload.replay import Selection
from kvoffload.traces import MergedTrace, PromptOptions, Request, SessionOptions, Survey
from kvoffload.traces.formats import PROMPT_FORMATS
from kvoffload.traces.formats.comma_separated import COMMA_SEPARATED
from kvoffload.traces.formats.mooncake import MOONCAKE
from kvoffload.traces.formats.mooncake_delta import MOONCAKE_DELTA
from kvoffload.traces.formats.weka import WEKA
from kvoffload.traces.oracle_general import ORACLE_GENERAL, write_oracle_general
from kvoffload.traces.prompt_blocks import COLUMNS, MAX_BYTES_PER_TOKEN, MAX_TOKENS_PER_IMAGE
from kvoffload.traces.reader import FORMAT_NAMES
from kvoffload.traces.sorting import counted_from_first, sorted_by_time
from kvoffload.traces.writer import write_requests

from ._options import examples, reading_options_of, traces_argument, value_of
from ._output import check_output_option, output_option, write_output
from ._sources import Reading, Source, named_files, note_order
from ._terminal import note, note_bad_lines

MOST_SECONDS = 10**9
WRITERS = {MOONCAKE.name: write_requests, ORACLE_GENERAL: write_oracle_general}
MOST_TOKENS = 2**31 - 1  # per block
FULL_BLOCKS = (
    "lmcache",
    WEKA.name,
    MOONCAKE_DELTA.name,
    *PROMPT_FORMATS,
)  # whose requests have full blocks only
COLUMNS_FORM = "time=COLUMN,prompt=COLUMN"


def read_columns(text: str) -> dict[str, str]:
    """Read the columns of a CSV file, by role."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        role, _, column = map(str.strip, part.partition("="))
        if role not in COLUMNS or not column or role in columns:
            known = ", ".join(COLUMNS)
            raise ValueError(
                f"must be {COLUMNS_FORM}, each of {known} at most once, got {part.strip()!r}"
            )
        columns[role] = column
    for role in COLUMNS[:2]:
        if role not in columns:
            raise ValueError(f"must be {COLUMNS_FORM}, got none for {role}")
    return columns


def read_salt(text: str) -> str:
    """Read a salt; no message shows it."""
    if not text:
        raise ValueError("must not be empty, got an empty text")
    return text


@click.command(
    epilog=examples(
        "kvoffload convert lookup_hashes/ --output trace.jsonl.zst",
        "kvoffload convert log.jsonl --sort --output trace.jsonl.zst",
        "kvoffload convert sessions/ --starts 28800 --output trace.jsonl.zst",
        "kvoffload convert trace.jsonl --to oracle-general -o trace.oracleGeneral",
        "kvoffload convert chats.jsonl --format openai -o trace.jsonl.zst",
    )
)
@traces_argument
@output_option
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
    "starts_s",
    metavar="SECONDS",
    type=click.IntRange(0, MOST_SECONDS),
    help="Draw the start of each session over this many seconds; sessions are published without "
    "starts (weka). By default, all start together.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of --starts; 0 by default.")
@click.option(
    "--until",
    "until_s",
    metavar="SECONDS",
    type=click.IntRange(0, MOST_SECONDS),
    help="Leave out requests of sessions after this time.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1, MOST_TOKENS),
    help="Tokens per block: a multiple of the sessions' own (weka); any number, 16 by default "
    "(openai, csv); the tokens of an id, inferred by default (mooncake-delta).",
)
@click.option(
    "--shared-prompts",
    is_flag=True,
    help="Take tools and system prompt to be the same in all sessions that have equally many "
    "tokens of both; the ids do not show what sessions share (weka).",
)
@click.option(
    "--tokenizer",
    metavar="PATH",
    help="A tokenizer.json of Hugging Face, or a folder with it; its chat template is used, too "
    "(openai, csv). By default, tokens are approximated from bytes.",
)
@click.option(
    "--bytes-per-token",
    type=click.IntRange(1, MAX_BYTES_PER_TOKEN),
    help="Bytes of text that count as a token without a tokenizer, 4 by default (openai, csv).",
)
@click.option(
    "--tokens-per-image",
    metavar="N",
    type=click.IntRange(1, MAX_TOKENS_PER_IMAGE),
    help="Tokens that a part of a message without text counts as, such as a picture or a file; "
    "1,000 by default (openai).",
)
@click.option(
    "--salt",
    metavar="TEXT",
    callback=value_of(read_salt),
    help="A secret with which every conversion gives the same ids (openai, csv). By default, a "
    "random key is used and not kept.",
)
@click.option(
    "--columns",
    metavar="NAMES",
    callback=value_of(read_columns),
    help="The columns of a table (csv): time=COLUMN,prompt=COLUMN and optionally model=COLUMN, "
    "output=COLUMN (tokens of the answer), session=COLUMN.",
)
@reading_options_of((*FORMAT_NAMES, *PROMPT_FORMATS))
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
    tokenizer: str | None,
    bytes_per_token: int | None,
    tokens_per_image: int | None,
    salt: str | None,
    columns: dict[str, str] | None,
    reading: Reading,
    quiet: bool,
) -> None:
    """Write a trace in the Mooncake format, or for libCacheSim.

    TRACE is in the Mooncake format itself, LMCache's lookup-hash log, the format of the Bailian
    traces, sessions of coding agents as kv-cache-tester publishes them, libCacheSim's
    oracleGeneral, or plain text with a request's hexadecimal hashes on each line. Several files,
    folders or patterns are merged by time. Rows that list only what is new in their session are
    put together. With --format openai, TRACE is a log of chat requests, and with
    --format csv a table of prompts; only keyed hashes of their text are written.
    """
    has_prompts = reading.format in PROMPT_FORMATS
    _check_prompt_options(
        reading.format,
        {
            "--tokenizer": tokenizer,
            "--bytes-per-token": bytes_per_token,
            "--tokens-per-image": tokens_per_image,
            "--salt": salt,
            "--columns": columns,
        },
    )
    check_output_option(traces, output, to)
    sessions = SessionOptions(
        starts_s=starts_s or 0.0,
        seed=seed or 0,
        until_s=until_s,
        block_tokens=None if has_prompts else block_tokens,
        shared_prompts=shared_prompts,
    )
    prompts = PromptOptions(
        tokenizer=tokenizer,
        bytes_per_token=bytes_per_token or 4,
        tokens_per_image=tokens_per_image or 1000,
        block_tokens=block_tokens or 16,
        salt=salt,
        columns=columns,
    )
    source = reading.trace(named_files(traces), sessions, prompts)
    given = {
        "--starts": starts_s,
        "--seed": seed,
        "--until": until_s,
        "--block-tokens": sessions.block_tokens,
        "--shared-prompts": shared_prompts or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    survey = Survey()
    requests: Iterable[Request] = Selection(source, limit=reading.limit)
    if option is not None:
        requests = _of_sessions(requests, source, option)
    counted = survey.counting(sorted_by_time(requests) if sort else requests)
    if has_prompts:
        counted = counted_from_first(counted)
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
    if has_prompts:
        _note_prompts(prompts, quiet=quiet)
        if not survey.blocks:
            note(f"no prompt fills a block of {prompts.block_tokens:,} tokens", quiet=quiet)
    if to == MOONCAKE.name and source.format in FULL_BLOCKS and source.block_tokens is not None:
        note(
            f"blocks of {source.block_tokens:,} tokens, full ones only: "
            f"replay it with --block-tokens {source.block_tokens}",
            quiet=quiet,
        )


def _of_sessions(
    requests: Iterable[Request], source: MergedTrace, option: str
) -> Iterator[Request]:
    """Yield requests; refuse an option of sessions if the trace has none."""
    formats = (WEKA.name, MOONCAKE_DELTA.name) if option == "--block-tokens" else (WEKA.name,)
    for request in requests:
        if source.format not in formats:
            raise click.UsageError(f"{option} must go with sessions (weka), got {source.format}")
        yield request


def _check_prompt_options(format: str | None, given: Mapping[str, object]) -> None:
    """Refuse options of prompts that have no effect, and a table without its columns."""
    named = "a trace that is recognised" if format is None else f"--format {format}"
    for option, value in given.items():
        if value is None:
            continue
        if option == "--columns" and format != COMMA_SEPARATED.name:
            raise click.UsageError(f"--columns must go with --format csv, got it with {named}")
        if format not in PROMPT_FORMATS:
            raise click.UsageError(
                f"{option} must go with --format openai or csv, got it with {named}"
            )
    if given["--tokenizer"] is not None and given["--bytes-per-token"] is not None:
        raise click.UsageError("--bytes-per-token must go without --tokenizer, got both")
    if format == COMMA_SEPARATED.name and given["--columns"] is None:
        raise click.UsageError(f"--format csv needs --columns {COLUMNS_FORM}, got none")


def _note_prompts(prompts: PromptOptions, *, quiet: bool) -> None:
    """Note what was approximated or is unknown in a trace of prompts."""
    found = prompts.blocks
    if found.is_approximate:
        note(
            f"tokens are approximated, {prompts.bytes_per_token} bytes each: --tokenizer counts "
            "them",
            quiet=quiet,
        )
    if found.parts:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in found.parts.items())
        note(
            f"parts of messages without text count as {prompts.tokens_per_image:,} tokens each: "
            f"{counts}; --tokens-per-image sets that",
            quiet=quiet,
        )
    if found.is_untimed:
        note("no request has a time, so all times are 0", quiet=quiet)
