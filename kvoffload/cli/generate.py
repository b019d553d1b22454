"""``kvoffload generate``: the built-in workload as a trace."""

from __future__ import annotations

import sys

import click

from kvoffload.traces import Workload, write_requests, write_trace

from ._options import seed_option


@click.command()
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=5_000,
    show_default=True,
    help="How many requests.",
)
@seed_option
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Tokens a block.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    default="-",
    help="File to write, compressed if it ends in .gz or .zst; standard output by default.",
)
def generate(requests: int, seed: int, block_tokens: int, output: str) -> None:
    """Write a generated workload as a trace in the Mooncake form.

    Chats over shared system prompts, agents that resend a growing context and one-shot requests,
    with Poisson arrivals. A seed gives the same trace on every machine.
    """
    workload = Workload(requests, seed=seed, block_tokens=block_tokens)
    if output == "-":
        write_requests(workload, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    else:
        write_trace(workload, output)
