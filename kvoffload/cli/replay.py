"""``kvoffload replay``: a trace through the managers, policies side by side."""

from __future__ import annotations

import functools

import click

from kvoffload.replay import DeviceCache, HintOptions
from kvoffload.replay import replay as replay_trace
from kvoffload.replay.closed_loop import ClosedLoop, replay_closed
from kvoffload.replay.offline import CEILINGS, INFINITE
from kvoffload.replay.simulate import Demand

from ._decoding import decode
from ._hint_options import hint_options, hints_object, hints_text
from ._loop_options import (
    check_arrivals,
    check_loop,
    loop_object,
    loop_options,
    loop_text,
    without_belady,
)
from ._model_options import (
    CacheOptions,
    groups_object,
    model_options,
    note_no_ceiling,
    unique_chunks,
    without_unknown_ceilings,
)
from ._options import (
    Capacity,
    block_bytes_option,
    block_tokens_option,
    capacity_option,
    check_sizes,
    check_steps,
    device_memory_blocks,
    device_memory_option,
    examples,
    is_default,
    json_option,
    manager_of,
    policy_option,
    reading_options,
    step_tokens_option,
    workload_seed_option,
)
from ._output import check_outputs
from ._replay_result import Cell, as_object, print_cells
from ._sources import Reading, note_order, open_or_generate, order_object
from ._streams import standard_input_waits
from ._terminal import note, note_bad_lines, print_json, progress_bar

GENERATED_REQUESTS = 5_000


@click.command(
    epilog=examples(
        "kvoffload replay",
        "kvoffload replay trace.jsonl.gz --policy lru,arc,belady --capacity 5%",
        "kvoffload replay trace.jsonl --policy mymodule:MyPolicy",
    )
)
@click.argument("traces", metavar="[TRACE]...", nargs=-1)
@policy_option("lru,hit-density,belady")
@capacity_option("1%,5%,20%")
@block_bytes_option
@model_options
@device_memory_option
@block_tokens_option
@click.option("--full-blocks", is_flag=True, help="Drop blocks that a prompt fills only partly.")
@step_tokens_option(None, "; by default, whole")
@hint_options
@loop_options
@workload_seed_option
@reading_options
@json_option
def replay(
    traces: tuple[str, ...],
    *,
    policies: tuple[str, ...],
    capacities: tuple[Capacity, ...],
    block_bytes: int | None,
    cache: CacheOptions,
    device_memory: Capacity | None,
    block_tokens: int | None,
    full_blocks: bool,
    hints: HintOptions | None,
    loop: ClosedLoop | None,
    seed: int | None,
    reading: Reading,
    as_json: bool,
    quiet: bool,
) -> None:
    """Replay a trace through managers and compare policies.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    such files, or a pattern; several are merged by time. - means standard input. Without TRACE, a
    generated workload is replayed.

    Times cover only the manager's calls, all calls of a request together; percentiles are within
    1/64 of the exact values.
    """
    cache.check(block_bytes)
    check_outputs(traces)
    with open_or_generate(traces, GENERATED_REQUESTS, seed, reading) as source:
        decoded, known, survey = decode(
            source,
            block_tokens,
            reading.limit,
            hints,
            full_blocks=full_blocks,
            arrivals=loop is not None,
            quiet=quiet,
        )
        told = decoded.hints
        note_bad_lines(source.bad_lines, quiet=quiet)
        note_order(survey, source, quiet=quiet)
        block_tokens = known.count
        check_steps(cache.step_tokens, block_tokens)
        block_bytes = cache.block_bytes(block_tokens) or block_bytes or source.block_bytes
        check_sizes(block_bytes, capacity=capacities, device_memory=[device_memory])
        groups = cache.groups(block_tokens)
        unasked = is_default("policies")
        policies = without_unknown_ceilings(policies, groups, quiet=quiet or unasked)
        check_loop(loop, groups, block_tokens, step_tokens=cache.step_tokens)
        if loop is not None:
            policies = without_belady(policies, quiet=quiet or unasked)
        if block_tokens is None:
            note(
                "no block size fits all requests: token ratios need --block-tokens",
                quiet=quiet,
            )
        unique = unique_chunks(groups, decoded.unique_blocks)
        unit = groups.slot_name
        sizes = [asked.resolve(block_bytes, unique, unit=unit) for asked in capacities]
        device_blocks = device_memory_blocks(device_memory, block_bytes, unique, unit=unit)
        note_no_ceiling(policies, groups, device_blocks, quiet=quiet)
        if loop is not None:
            check_arrivals(loop, decoded)
        demand = functools.cache(lambda: Demand.of(decoded, groups, device_blocks))
        keys = decoded.keys()
        cells = []
        for asked, num_blocks in zip(capacities, sizes, strict=True):
            for policy in policies:
                if policy in CEILINGS and loop is None:
                    result = demand().simulate(policy, num_blocks)
                    cells.append(Cell(policy, asked.text, num_blocks, result))
                    continue
                if policy == INFINITE:
                    manager = manager_of("lru", decoded.unique_blocks, unit)
                else:
                    manager = manager_of(policy, num_blocks, unit, block_tokens)
                description = f"{policy}, {num_blocks:,} {unit}s"
                with progress_bar(description, decoded.num_requests, quiet=quiet) as progress:
                    if loop is None:
                        result = replay_trace(
                            decoded,
                            manager,
                            groups=groups,
                            device=DeviceCache(device_blocks, groups),
                            keys=keys,
                            progress=progress,
                        )
                    else:
                        result = replay_closed(
                            decoded,
                            keys,
                            manager,
                            loop,
                            groups=groups,
                            device_blocks=device_blocks,
                            progress=progress,
                        )
                cells.append(Cell(policy, asked.text, num_blocks, result))
        if not traces and standard_input_waits():
            note(
                "a generated workload was replayed; standard input was not read: TRACE - reads it",
                quiet=quiet,
            )
        if as_json:
            print_json(
                {
                    **source.head(),
                    "block_tokens": block_tokens,
                    "block_tokens_from": known.origin,
                    "unique_blocks": decoded.unique_blocks,
                    "device_blocks": device_blocks,
                    "step_tokens": cache.step_tokens,
                    "hints": hints_object(hints, told),
                    "closed_loop": loop_object(loop),
                    **groups_object(groups),
                    "bad_lines": source.bad_lines,
                    **order_object(survey),
                    "results": [as_object(cell) for cell in cells],
                }
            )
        else:
            print_cells(
                source,
                cells,
                known,
                decoded.unique_blocks,
                device_blocks,
                step_tokens=cache.step_tokens,
                hints=hints_text(hints, told),
                loop=loop_text(loop),
                model=cache.text(block_tokens),
                groups=groups,
            )
