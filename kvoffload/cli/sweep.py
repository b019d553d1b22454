"""``kvoffload sweep``: every policy at every capacity, as table, CSV, JSON or picture."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from kvoffload.advise.answer import column
from kvoffload.advise.units import bytes_text
from kvoffload.policies import registry
from kvoffload.replay import Configuration, DecodedTrace, Result, replay_all
from kvoffload.replay.offline import CEILINGS
from kvoffload.replay.policies import is_own
from kvoffload.replay.results_file import ResultsFile

from . import _options
from ._fields import FIELDS, Row
from ._grid import Grid, in_grid
from ._loop_options import loop_options
from ._machines import Effort, check_dask, efforts
from ._output import Outputs, csv_option, plot_option
from ._terminal import note, print_prose, print_tables
from ._view import View

ALL_POLICIES = ",".join((*registry.names(), *CEILINGS))


@dataclass(frozen=True, slots=True)
class Swept(View):
    """Every policy at every capacity."""

    @property
    def policies(self) -> list[str]:
        """The policies, in the order given."""
        return list(dict.fromkeys(row.configuration.policy for row in self.rows))

    @property
    def sizes(self) -> dict[str, int]:
        """By capacity as given, its slots."""
        return {row.given: row.configuration.host for row in self.rows}

    def of(self, policy: str) -> list[Row]:
        """Return the rows of a policy, in the order of the capacities."""
        return [row for row in self.rows if row.configuration.policy == policy]

    def draw(self, path: str) -> None:
        """Draw the hit ratios into a file."""
        from ._plot import draw

        draw(self, path)

    def print(self) -> None:
        """Print a table per figure: a row per policy, a column per capacity."""
        groups = self.first.groups
        hit = "hit ratio" if groups.is_plain else "hit ratio of tokens"
        titles = {
            "hit_ratio": [*self.title(), "", hit],
            "honest_hit_ratio": ["hit ratio of honest sessions"],
            "liar_hit_ratio": ["hit ratio of liars"],
            "token_hit_ratio": ["share of prompt tokens found"],
            "missed_p50": ["tokens missed by a request, median"],
            "missed_p95": ["tokens missed by a request, 95th percentile"],
            "stored": [f"{groups.slot_name}s stored"],
            "ttft_mean": ["first token, mean, s"],
            "ttft_p95": ["first token, 95th percentile, s"],
        }
        if not groups.is_plain and not self.first.device:  # all tokens are asked for
            del titles["token_hit_ratio"]
        names = [
            name for name in titles if any(FIELDS[name].value(row) is not None for row in self.rows)
        ]
        for name in names:
            if name != names[0]:
                click.echo()
            self._print_matrix(titles[name], name)
        if self.no_tokens is not None:
            click.echo()
            print_prose(f"share of prompt tokens found: not known, {self.no_tokens}")

    def _print_matrix(self, title: list[str], name: str) -> None:
        """Print a figure, its columns headed by the capacity: given, in slots, in bytes."""
        sizes, size = self.sizes, self.first.block_bytes
        headings = {f"{self.first.groups.slot_name}s": [f"{slots:,}" for slots in sizes.values()]}
        if any(given != str(slots) for given, slots in sizes.items()):
            headings = {"capacity": list(sizes), **headings}
        if size:
            headings["size"] = [bytes_text(slots * size) for slots in sizes.values()]
        texts = [[FIELDS[name].text_of(row) for row in self.of(policy)] for policy in self.policies]
        columns = [
            [column("\n".join(heading), [row[index] for row in texts])]
            for index, heading in enumerate(zip(*headings.values(), strict=True))
        ]
        leading = column("\n".join(headings), self.policies, numeric=False)
        print_tables(title, [leading], columns)


@click.command(
    epilog=_options.examples(
        "kvoffload sweep trace.jsonl --block-bytes 160MiB --plot hits.svg",
        "kvoffload sweep logs/ --policy lru,belady --capacity 1%,5%",
        "kvoffload sweep trace.jsonl --model gpt-oss-20b --capacity 64GiB,128GiB",
    ),
)
@_options.traces_argument
@_options.policy_option(ALL_POLICIES)
@_options.capacity_option("0.5%,1%,2%,5%,10%,20%,40%")
@click.option(
    "--pending",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Number of requests for which a store stays in flight.",
)
@_options.step_tokens_option(None, "; by default, whole")
@loop_options
@_options.jobs_option
@_options.dask_option
@click.option(
    "--results",
    metavar="FILE",
    help="Append the result of each cell to FILE, and reuse the results for this trace in it: an "
    "interrupted sweep continues where it stopped. Policies of your own are always replayed.",
)
@plot_option("the hit ratio over the capacity")
@csv_option("cell")
@in_grid
def sweep(
    grid: Grid,
    *,
    pending: int,
    jobs: int | None,
    dask: str | None,
    results: str | None,
    outputs: Outputs,
) -> None:
    """Compare policies over a range of capacities, in parallel.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    such files, or a pattern; several are merged by time. - means standard input. The trace is
    decoded once and held in memory, 12 bytes per block.
    """
    grid.cache.check()
    decoding = replace(grid.decoding, arrivals=bool(grid.loop))
    outputs.check(decoding.traces, results)
    check_dask(dask, decoding.traces)
    if results is not None:
        try:
            ResultsFile.check(results)
        except ValueError as error:
            raise click.UsageError(f"--results {error}") from None
    read = decoding.read()
    asked = dict.fromkeys(grid.cells(read, pending=pending))
    cells = sorted(asked, key=lambda cell: grid.policies.index(cell[1].policy))
    wanted, groups = [one for _, one in cells], cells[0][1].groups
    for one in wanted:
        if one.policy not in CEILINGS:
            _options.manager_of(one.policy, one.host, groups.slot_name)
    file = None if results is None else ResultsFile(results, read.trace, groups)
    faults: list[OSError] = []  # of files; the result is still printed
    with efforts(jobs, dask, decoding, read.trace.num_blocks) as effort:
        found = _results(read.trace, wanted, file, effort, faults)
    rows = [Row(one, found[one], text) for text, one in cells]
    outputs.show(Swept(read, rows, grid.cache.text(groups)), faults)


def _results(
    trace: DecodedTrace,
    every: list[Configuration],
    file: ResultsFile | None,
    effort: Effort,
    faults: list[OSError],
) -> dict[Configuration, Result]:
    """Return the result of every configuration; compute and append those that the file lacks.

    Results of a user's class are not kept: the class may have changed by the next run.
    """
    every = list(dict.fromkeys(every))
    found = {} if file is None else file.read([one for one in every if not is_own(one.policy)])
    wanted = [one for one in every if one not in found]
    if len(wanted) < len(every) and file is not None:
        note(f"{len(every) - len(wanted):,} of {len(every):,} results were known")
    with effort.on("sweeping", len(wanted), "cells") as how:
        try:
            for result in replay_all(trace, wanted, **how):
                found[result.configuration] = result
                if file is not None and not faults and not is_own(result.configuration.policy):
                    _add(file, result, faults)
        except (KeyboardInterrupt, SystemExit):
            if file is not None:
                kept = f"{len(file.read(every)):,} of {len(every):,} results"
                note(f"--results has {kept}; the same command continues there")
            raise
    return found


def _add(file: ResultsFile, result: Result, faults: list[OSError]) -> None:
    try:
        file.add(result)
    except OSError as error:
        faults.append(error)
