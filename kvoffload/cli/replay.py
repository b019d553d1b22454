"""``kvoffload replay``: a trace through the managers, policies side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from kvoffload.replay.loop import Replays
from kvoffload.replay.offline import CEILINGS

from . import _options
from ._fields import Row, columns
from ._grid import Grid, in_grid
from ._loop_options import loop_options
from ._output import Outputs
from ._sources import given_option, open_or_generate
from ._streams import standard_input_waits
from ._terminal import note, print_tables, progress_bar
from ._view import View

GENERATED_REQUESTS = 5_000
IN_LOOP = (
    *("ttft_p50", "ttft_p95", "ttft_mean", "latency_mean"),
    *("requests_per_second", "tokens_per_second", "busy"),
)
TIMES = ("request_seconds_p50", "request_seconds_p99", "request_seconds_max", "blocks_per_second")


@dataclass(frozen=True, slots=True)
class Replayed(View):
    """Policies side by side, with the times of their managers."""

    def print(self) -> None:
        """Print a row per policy and capacity, in several tables if the terminal is too narrow."""
        rows, is_plain = self.rows, self.first.groups.is_plain
        found = ["requests", "blocks", "hits", "hit_ratio", "token_hit_ratio"]
        if not is_plain:
            found = ["requests", "asked", "hits", "hit_ratio"]
        if any(row.given != f"{row.configuration.host}" for row in rows):
            found.insert(0, "capacity_given")
        kept = ["stored", "evicted", "refused"]
        if any(row.result.not_admitted for row in rows):
            kept.append("not_admitted")
        ran_by = columns(rows, "implementation")
        ways = sorted({cell.text for column in ran_by for cell in column.cells} - {"-"})
        title = self.title()
        if len(ways) == 1:
            title.append(f"ms: time in the manager per request, {ways[0]} implementation")
        elif ways:
            title.append("ms: time in the manager per request")
        tables = [
            columns(rows, *found, "honest_hit_ratio", "liar_hit_ratio", "missed_p50", "missed_p95"),
            columns(rows, *kept),
            columns(rows, *IN_LOOP),
            [*columns(rows, *TIMES), *(ran_by if len(ways) > 1 else [])],
        ]
        print_tables(title, columns(rows, "policy", "capacity"), [some for some in tables if some])


@click.command(
    epilog=_options.examples(
        "kvoffload replay",
        "kvoffload replay trace.jsonl.gz --policy lru,arc,belady --capacity 5%",
        "kvoffload replay trace.jsonl --policy mymodule:MyPolicy",
    )
)
@click.argument("traces", metavar="[TRACE]...", nargs=-1)
@_options.policy_option("lru,hit-density,belady")
@_options.capacity_option("1%,5%,20%")
@_options.step_tokens_option(None, "; by default, whole")
@loop_options
@_options.workload_seed_option
@in_grid
def replay(grid: Grid, *, seed: int | None, outputs: Outputs) -> None:
    """Replay a trace through managers and compare policies.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    such files, or a pattern; several are merged by time. - means standard input. Without TRACE, a
    generated workload is replayed.

    Times cover only the manager's calls, all calls of a request together; percentiles are within
    1/64 of the exact values.
    """
    decoding = replace(grid.decoding, arrivals=bool(grid.loop))
    traces, reading = decoding.traces, decoding.reading
    grid.cache.check()
    outputs.check(traces)
    block_tokens = decoding.block_tokens
    with open_or_generate(traces, GENERATED_REQUESTS, seed, reading, block_tokens) as source:
        read = decoding.of(source)
    cells = grid.cells(read, unasked=given_option("policies") is None)
    groups, unit = cells[0][1].groups, cells[0][1].groups.slot_name
    if not groups.knows_tokens:
        note("no block size fits all requests: token ratios need --block-tokens")
    replays, rows = Replays(read.trace), []
    for given, one in cells:
        manager = None
        if one.policy not in CEILINGS:
            manager = _options.manager_of(one.policy, one.host, unit, read.block_tokens.count)
        description = f"{one.policy}, {one.host:,} {unit}s"
        with progress_bar(description, read.trace.num_requests) as progress:
            result = replays.of(one, manager=manager, progress=progress)
        rows.append(Row(one, result, given))
    if not traces and standard_input_waits():
        note("a generated workload was replayed; standard input was not read: TRACE - reads it")
    outputs.show(Replayed(read, rows, grid.cache.text(groups)))
