"""``kvoffload convert``: a trace in another format, in the Mooncake format."""

from __future__ import annotations

import click

from kvoffload.replay import Selection
from kvoffload.traces import Survey
from kvoffload.traces.sorting import sorted_by_time

from ._options import examples, reading_options, traces_argument
from ._output import check_output_option, output_option, write_output
from ._sources import Reading, Source, named_files, note_order
from ._terminal import note, note_bad_lines


@click.command(
    epilog=examples(
        "kvoffload convert lookup_hashes/ --output trace.jsonl.zst",
        "kvoffload convert log.jsonl --sort --output trace.jsonl.zst",
    )
)
@traces_argument
@output_option
@click.option(
    "--sort",
    is_flag=True,
    help="Put the requests in the order of their timestamps, through a temporary file; otherwise "
    "those of a file keep their order.",
)
@reading_options
def convert(
    traces: tuple[str, ...], *, output: str, sort: bool, reading: Reading, quiet: bool
) -> None:
    """Write a trace in the Mooncake format.

    TRACE is in the Mooncake format itself, LMCache's lookup-hash log, the format of the Bailian
    traces or plain text with a request's hexadecimal hashes on each line; several files, folders
    or patterns are merged by time.
    """
    check_output_option(traces, output)
    source = reading.trace(named_files(traces))
    survey = Survey()
    requests = Selection(source, limit=reading.limit)
    write_output(survey.counting(sorted_by_time(requests) if sort else requests), output)
    whole = Source("", source, source, reading.same_ids)
    ids_text = whole.ids_text
    if ids_text is not None:
        note(ids_text, quiet=quiet)
    note_bad_lines(source.bad_lines, quiet=quiet)
    note_order(survey, whole, quiet=quiet)
    if source.format == "lmcache" and source.block_tokens is not None:
        note(
            f"blocks of {source.block_tokens:,} tokens, full ones only: "
            f"replay it with --block-tokens {source.block_tokens}",
            quiet=quiet,
        )
