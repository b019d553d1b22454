"""``kvoffload generate``: the built-in workload as a trace."""

from __future__ import annotations

import click

from kvoffload.traces import Workload

from ._options import examples, quiet_option, seed_option
from ._output import check_output_option, packed_option, write_output
from ._terminal import counted, progress_bar


@click.command(epilog=examples("kvoffload generate --requests 2000 --output chats.jsonl.gz"))
@click.option(
    "--requests",
    type=click.IntRange(1, 10**12),
    default=5_000,
    show_default=True,
    help="Number of requests.",
)
@seed_option
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Tokens per block.",
)
@packed_option
@quiet_option
def generate(requests: int, seed: int, block_tokens: int, output: str) -> None:
    """Write a generated workload as a trace in the Mooncake format.

    Chats over shared system prompts, agents that resend a growing context and one-shot requests,
    with Poisson arrivals. A seed gives the same trace on every machine.
    """
    check_output_option((), output)
    workload = Workload(requests, seed=seed, block_tokens=block_tokens)
    with progress_bar("writing", requests) as progress:
        write_output(counted(workload, progress), output)
