"""``kvoffload convert``: a trace in another format, in the Mooncake format."""

from __future__ import annotations

import click

from kvoffload.replay import Selection
from kvoffload.traces import Trace

from ._options import reading_options
from ._output import check_output_option, output_option, write_output
from ._terminal import note


@click.command()
@click.argument("trace")
@output_option
@reading_options
def convert(
    trace: str,
    *,
    output: str,
    format: str | None,
    limit: int | None,
    skip_bad: bool,
    quiet: bool,
) -> None:
    """Write a trace in the Mooncake format.

    TRACE is in the Mooncake format itself, LMCache's lookup-hash log, the format of the Bailian
    traces or plain text with a request's hexadecimal hashes on each line.
    """
    check_output_option(trace, output)
    source = Trace(trace, format=format, skip_bad=skip_bad)
    write_output(Selection(source, limit=limit), output)
    if source.bad_lines:
        note(f"{source.bad_lines:,} bad lines passed over", quiet=quiet)
    if source.format == "lmcache" and source.block_tokens is not None:
        note(
            f"blocks of {source.block_tokens:,} tokens, full ones only: "
            f"replay it with --block-tokens {source.block_tokens}",
            quiet=quiet,
        )
