"""``kvoffload sweep``: every policy at every capacity, as table, CSV, JSON or picture."""

from __future__ import annotations

from dataclasses import replace

import click

from kvoffload.policies import registry
from kvoffload.replay import HintOptions, ReplayResult
from kvoffload.replay.closed_loop import ClosedLoop
from kvoffload.replay.grid import Cell, GridWork, run_grid
from kvoffload.replay.offline import CEILINGS
from kvoffload.replay.policies import is_own
from kvoffload.replay.results_file import ResultsFile

from ._decoding import Decoding, decode
from ._hint_options import hint_options
from ._loop_options import (
    check_arrivals,
    check_loop,
    loop_options,
    without_belady,
)
from ._machines import Effort, check_dask, efforts
from ._model_options import (
    CacheOptions,
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
    dask_option,
    device_memory_blocks,
    device_memory_option,
    examples,
    jobs_option,
    json_option,
    manager_of,
    policy_option,
    read_picture,
    reading_options,
    step_tokens_option,
    traces_argument,
    value_of,
)
from ._output import check_csv, check_outputs, check_plot, show
from ._sources import Reading, note_order, open_source, order_object
from ._sweep_result import Grid
from ._terminal import note, note_bad_lines, progress_bar

ALL_POLICIES = ",".join((*registry.names(), *CEILINGS))


@click.command(
    epilog=examples(
        "kvoffload sweep trace.jsonl --block-bytes 160MiB --plot hits.svg",
        "kvoffload sweep logs/ --policy lru,belady --capacity 1%,5%",
        "kvoffload sweep trace.jsonl --model gpt-oss-20b --capacity 64GiB,128GiB",
    ),
)
@traces_argument
@policy_option(ALL_POLICIES)
@capacity_option("0.5%,1%,2%,5%,10%,20%,40%")
@block_bytes_option
@model_options
@block_tokens_option
@click.option("--full-blocks", is_flag=True, help="Drop blocks that a prompt fills only partly.")
@device_memory_option
@click.option(
    "--pending",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of requests for which a store stays in flight.",
)
@step_tokens_option(None, "; by default, whole")
@hint_options
@loop_options
@jobs_option
@dask_option
@click.option(
    "--results",
    metavar="FILE",
    help="Append the result of each cell to FILE, and reuse the results for this trace in it: an "
    "interrupted sweep continues where it stopped. Policies of your own are always replayed.",
)
@click.option(
    "--plot",
    metavar="FILE",
    callback=value_of(read_picture),
    help="Draw the hit ratio over the capacity: .png, .svg or .pdf.",
)
@click.option(
    "--csv",
    metavar="FILE",
    help="Write one line per cell, comma-separated, to FILE; - prints the lines instead of the "
    "tables.",
)
@reading_options
@json_option
def sweep(
    traces: tuple[str, ...],
    *,
    policies: tuple[str, ...],
    capacities: tuple[Capacity, ...],
    block_bytes: int | None,
    cache: CacheOptions,
    block_tokens: int | None,
    full_blocks: bool,
    device_memory: Capacity | None,
    pending: int,
    hints: HintOptions | None,
    loop: ClosedLoop | None,
    jobs: int | None,
    dask: str | None,
    results: str | None,
    plot: str | None,
    reading: Reading,
    csv: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare policies over a range of capacities, in parallel.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    such files, or a pattern; several are merged by time. - means standard input. The trace is
    decoded once and held in memory, 12 bytes per block.
    """
    cache.check(block_bytes)
    files = {"--plot": plot, "--results": results, "--csv": check_csv(csv, as_json=as_json)}
    check_outputs(traces, files, append=("--results",))
    check_dask(dask, traces)
    if results is not None:
        _check_results(results)
    check_plot(plot, quiet=quiet)
    with open_source(traces, reading) as source:
        decoded, known, survey = decode(
            source,
            block_tokens,
            reading.limit,
            hints,
            full_blocks=full_blocks,
            arrivals=loop is not None,
            quiet=quiet,
        )
        note_bad_lines(source.bad_lines, quiet=quiet)
        note_order(survey, source, quiet=quiet)
    check_steps(cache.step_tokens, known.count)
    groups = cache.groups(known.count)
    block_bytes = cache.block_bytes(known.count) or block_bytes or source.block_bytes
    check_sizes(block_bytes, capacity=capacities, device_memory=[device_memory])
    unique = unique_chunks(groups, decoded.unique_blocks)
    unit = groups.slot_name
    sizes = {asked.text: asked.resolve(block_bytes, unique, unit=unit) for asked in capacities}
    device_blocks = device_memory_blocks(device_memory, block_bytes, unique, unit=unit)
    note_no_ceiling(policies, groups, device_blocks, quiet=quiet)
    policies = without_unknown_ceilings(policies, groups, quiet=quiet)
    check_loop(
        loop, groups, known.count, step_tokens=cache.step_tokens, pending=pending, results=results
    )
    if loop is not None:
        check_arrivals(loop, decoded)
        policies = without_belady(policies, quiet=quiet)
    cells = [
        Cell(policy, size, device_blocks, pending)
        for policy in dict.fromkeys(policies)
        for size in sizes.values()
    ]
    for cell in cells:
        if cell.policy not in CEILINGS:
            manager_of(cell.policy, cell.capacity, unit)
    work = GridWork(decoded, cells, groups=groups, loop=loop)
    file = None if results is None else ResultsFile(results, decoded, groups)
    faults: list[OSError] = []  # of files; the result is still printed
    decoding = Decoding(traces, reading, block_tokens, hints, full_blocks, loop is not None)
    with efforts(jobs, dask, decoding, quiet=quiet) as effort:
        counts = _counts(work, file, effort, faults)
    grid = Grid(
        source,
        decoded.unique_blocks,
        block_bytes,
        known,
        sizes,
        cells,
        counts,
        cache.text(known.count),
        groups,
        order_object(survey),
        cache.step_tokens,
        hints,
        decoded.hints,
        loop,
    )
    show(grid, plot=plot, csv=csv, as_json=as_json, faults=faults)


def _check_results(results: str) -> None:
    """Refuse a file that holds anything but results, because results would be appended."""
    try:
        ResultsFile.check(results)
    except ValueError as error:
        raise click.UsageError(f"--results {error}") from None


def _counts(
    work: GridWork, file: ResultsFile | None, effort: Effort, faults: list[OSError]
) -> dict[Cell, ReplayResult]:
    """Return the result of every cell; compute and append those that the file lacks.

    Results of a user's class are not kept: the class may have changed by the next run.
    """
    cells, quiet = work.cells, effort.quiet
    counts = {} if file is None else file.read([c for c in cells if not is_own(c.policy)])
    wanted = [cell for cell in dict.fromkeys(cells) if cell not in counts]
    if len(wanted) < len(cells) and file is not None:
        note(f"{len(cells) - len(wanted):,} of {len(cells):,} results were known", quiet=quiet)
    with progress_bar("sweeping", len(wanted), quiet=quiet, unit="cells") as progress:
        grid = run_grid(effort.jobs, replace(work, cells=wanted), effort.elsewhere)
        try:
            for done, (cell, (found,)) in enumerate(grid, start=1):
                counts[cell] = found
                if file is not None and not faults and not is_own(cell.policy):
                    _add(file, cell, found, faults)
                if progress is not None:
                    progress(done)
        except (KeyboardInterrupt, SystemExit):
            if file is not None:
                kept = f"{len(file.read(cells)):,} of {len(cells):,} results"
                note(f"--results has {kept}; the same command continues there", quiet=quiet)
            raise
    return counts


def _add(file: ResultsFile, cell: Cell, counts: ReplayResult, faults: list[OSError]) -> None:
    try:
        file.add(cell, counts)
    except OSError as error:
        faults.append(error)
