"""Where the commands that make a trace write it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from kvoffload.traces import Request, write_requests, write_trace

output_option = click.option(
    "-o",
    "--output",
    default="-",
    metavar="FILE",
    help="File to write, compressed if it ends in .gz or .zst; standard output by default.",
)


def write_output(requests: Iterable[Request], output: str) -> None:
    """Write requests to a file, or to standard output for ``-``.

    Raises
    ------
    OSError
        If it cannot be written; it names the file.
    """
    try:
        if output == "-":
            write_requests(requests, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            write_trace(requests, output)
    except OSError as error:
        if error.filename is None:  # it failed when it was open already
            error.filename = "<stdout>" if output == "-" else output
        raise
