"""``kvoffload replay``: a trace through the managers, policies side by side."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import click

from kvoffload import IMPLEMENTATION, CPUOffloadingManager, __version__
from kvoffload.policies import registry
from kvoffload.replay import CEILINGS
from kvoffload.replay import replay as replay_trace
from kvoffload.traces import Survey, Workload

from ._options import (
    Capacity,
    json_option,
    read_capacity,
    read_size,
    reading_options,
    value_of,
    values_of,
)
from ._output import check_outputs
from ._replay_result import Cell, as_object, print_cells
from ._sources import BlockSize, Source, open_source
from ._terminal import note, print_json, progress_bar

GENERATED_REQUESTS = 5_000


def read_policy(text: str) -> registry.PolicySpec:
    """Read a policy string."""
    if text in CEILINGS:
        raise ValueError(
            f"must be a policy, got {text!r}, which is a ceiling: "
            f"kvoffload sweep TRACE --policies {text}"
        )
    return registry.parse(text)


@click.command()
@click.argument("trace", required=False)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("lru,arc",),
    show_default=True,
    metavar="POLICY",
    callback=values_of(read_policy),
    help="Policies to compare; a comma list, or repeated. NAME or 'NAME?OPTION=VALUE'.",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    default=("1%,5%,20%",),
    show_default=True,
    metavar="CAPACITY",
    callback=values_of(read_capacity),
    help="Capacities to compare; a comma list, or repeated: blocks (4096), a share of the unique "
    "blocks rounded down (5%), or a size (64GiB, with --block-bytes).",
)
@click.option(
    "--block-bytes",
    metavar="SIZE",
    callback=value_of(read_size),
    help="Size of a block, for capacities in bytes.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    help="Tokens a block; inferred where one size fits all requests.",
)
@click.option("--full-blocks", is_flag=True, help="Drop the block that a prompt fills in part.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Which of the possible generated workloads; without TRACE.  [default: 0]",
)
@reading_options
@json_option
def replay(
    trace: str | None,
    *,
    policies: tuple[registry.PolicySpec, ...],
    capacities: tuple[Capacity, ...],
    block_bytes: int | None,
    block_tokens: int | None,
    full_blocks: bool,
    seed: int | None,
    form: str | None,
    limit: int | None,
    skip_bad: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Replay a trace through the cache managers and compare the policies.

    TRACE is a file in any of the forms, plain or compressed with gzip or zstandard; - is standard
    input. Without it, a generated workload is replayed.

    Times are those of the manager's calls alone, all calls of a request together; percentiles are
    within 1/64 of the exact ones.
    """
    _check_options_of_a_workload(trace, seed=seed, form=form, skip_bad=skip_bad)
    for capacity in capacities:
        if capacity.size is not None and block_bytes is None:
            raise click.UsageError(
                f"--capacity in bytes needs --block-bytes, got {capacity.text!r} without it"
            )
    check_outputs(trace)
    with _open(trace, form=form, seed=seed, skip_bad=skip_bad, limit=limit) as source:
        needs_unique = any(capacity.percent is not None for capacity in capacities)
        with progress_bar("reading", limit, quiet=quiet) as progress:
            survey = Survey.of(
                source.requests,
                unique=needs_unique,
                block_tokens=block_tokens,
                progress=progress,
            )
        if source.bad_lines:
            note(f"{source.bad_lines:,} bad lines passed over", quiet=quiet)
        block_size = BlockSize.of(source, survey, block_tokens)
        block_tokens = block_size.tokens
        requests = source.requests
        if full_blocks:
            requests = block_size.full_blocks(requests, quiet=quiet)
            if needs_unique:
                survey = Survey.of(requests)
        elif block_tokens is None:
            note(
                "no block size fits all requests: without --block-tokens, no token ratio",
                quiet=quiet,
            )
        sizes = [asked.resolve(block_bytes, survey.unique_blocks) for asked in capacities]
        cells = []
        for asked, num_blocks in zip(capacities, sizes, strict=True):
            for policy in policies:
                manager = _manager(policy, num_blocks, block_tokens)
                description = f"{policy}, {num_blocks:,} blocks"
                with progress_bar(description, survey.requests, quiet=quiet) as progress:
                    result = replay_trace(
                        requests, manager, block_tokens=block_tokens, progress=progress
                    )
                cells.append(Cell(str(policy), asked.text, num_blocks, result))
        if as_json:
            print_json(
                {
                    "trace": source.name,
                    "implementation": IMPLEMENTATION,
                    "version": __version__,
                    "block_tokens": block_tokens,
                    "block_tokens_from": block_size.origin,
                    "unique_blocks": survey.unique_blocks,
                    "bad_lines": source.bad_lines,
                    "results": [as_object(cell) for cell in cells],
                }
            )
        else:
            print_cells(source.name, cells, block_size, survey.unique_blocks)


def _check_options_of_a_workload(
    trace: str | None, *, seed: int | None, form: str | None, skip_bad: bool
) -> None:
    """Refuse the options that would have no effect on what is replayed."""
    if trace is not None and seed is not None:
        raise click.UsageError(f"--seed must go without TRACE, got {seed} with {trace!r}")
    if trace is None and (form is not None or skip_bad):
        option = "--skip-bad" if form is None else "--format"
        raise click.UsageError(f"{option} must go with TRACE, got it without")


def _open(
    trace: str | None, *, form: str | None, seed: int | None, skip_bad: bool, limit: int | None
) -> AbstractContextManager[Source]:
    if trace is not None:
        return open_source(trace, form=form, skip_bad=skip_bad, limit=limit)
    workload = Workload(limit or GENERATED_REQUESTS, seed=seed or 0)
    return nullcontext(Source(workload.name, workload))


def _manager(
    policy: registry.PolicySpec, num_blocks: int, block_tokens: int | None
) -> CPUOffloadingManager:
    try:
        return CPUOffloadingManager(block_tokens or 1, num_blocks, str(policy))
    except ValueError as error:  # options that do not go with this capacity
        raise click.UsageError(f"--policy {policy} at {num_blocks} blocks: {error}") from None
