"""The result of ``kvoffload sweep`` as a table, as CSV and as JSON."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import click

from kvoffload.advise.remarks import group_remarks
from kvoffload.advise.units import bytes_text, percent_text
from kvoffload.replay import GroupChunks, HintOptions, ReplayResult, TraceHints
from kvoffload.replay.closed_loop import ClosedLoop
from kvoffload.replay.grid import Cell
from kvoffload.replay.offline import CEILINGS
from kvoffload.replay.policies import implementation_of

from ._hint_options import hints_object, hints_text
from ._loop_options import duration_text, loop_object, loop_text, times_object
from ._model_options import groups_object
from ._replay_result import liars_object, steps_text, tokens_text
from ._sources import BlockTokens, Source
from ._terminal import Column, flat, print_prose, print_tables


@dataclass(frozen=True, slots=True)
class Grid:
    """A finished sweep."""

    source: Source
    unique_blocks: int  # of the trace
    block_bytes: int | None  # if known
    block_tokens: BlockTokens
    sizes: dict[str, int]  # by capacity as given, its number of blocks
    cells: list[Cell]  # every policy at every capacity, in the order given
    counts: dict[Cell, ReplayResult]
    model: str | None = None  # the model and the bytes of a block or slot, in words
    groups: GroupChunks = field(default_factory=GroupChunks.of_blocks)
    order: dict[str, object] = field(default_factory=dict)  # counts of what is out of order
    step_tokens: int | None = None  # of a scheduler step; None where prompts are offered whole
    hints: HintOptions | None = None  # as asked for
    told: TraceHints | None = None  # by the clients of the trace; None if hints is None
    loop: ClosedLoop | None = None

    @property
    def kept_in(self) -> str:
        """The unit of capacities: ``"blocks"`` or ``"slots"``."""
        return f"{self.groups.slot_name}s"

    @property
    def policies(self) -> list[str]:
        """The policies, in the order given."""
        return list(dict.fromkeys(cell.policy for cell in self.cells))

    @property
    def no_tokens(self) -> str | None:
        """The reason why no share of tokens is known; None if it is."""
        if not self.counts[self.cells[0]].tokens:
            return "the trace has no lengths of prompts"
        if self.block_tokens.count is None:
            return "no block size fits all requests: give --block-tokens"
        return None

    def row(self, policy: str) -> list[tuple[Cell, ReplayResult]]:
        """Return a policy's cells and their counts, in the order of the capacities."""
        return [(cell, self.counts[cell]) for cell in self.cells if cell.policy == policy]

    def draw(self, path: str) -> None:
        """Draw the hit ratios into a file."""
        from ._plot import draw

        draw(self, path)

    def results(self) -> list[dict[str, object]]:
        """Return each cell as one flat object."""
        return [
            _object(self, given, cell, counts)
            for policy in self.policies
            for given, (cell, counts) in zip(self.sizes, self.row(policy), strict=True)
        ]

    def as_object(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {
            **self.source.head(),
            "unique_blocks": self.unique_blocks,
            "block_bytes": self.block_bytes,
            "block_tokens": self.block_tokens.count,
            "block_tokens_from": self.block_tokens.origin,
            "no_token_hit_ratio": self.no_tokens,
            **self.order,
            "step_tokens": self.step_tokens,
            "hints": hints_object(self.hints, self.told),
            "closed_loop": loop_object(self.loop),
            **groups_object(self.groups),
            "results": self.results(),
        }

    def print(self) -> None:
        """Print the tables."""
        print_grid(self)


def print_grid(grid: Grid) -> None:
    """Print hit ratios, shares of tokens and blocks stored; a row per policy."""
    cell, counts = grid.row(grid.policies[0])[0]
    facts = [*grid.source.names, f"{counts.requests:,} requests", f"{counts.blocks:,} blocks"]
    facts.append(f"{grid.unique_blocks:,} unique")
    if cell.device_blocks:
        found = f"{cell.device_blocks:,} slots on device"
        if counts.asked_blocks is not None:
            on_device = counts.blocks - counts.asked_blocks
            found = f"{on_device:,} found in {cell.device_blocks:,} on device"
        facts.append(found)
    if cell.pending:
        facts.append(f"stores in flight for {cell.pending:,} requests")
    if grid.step_tokens is not None:
        facts.append(steps_text(grid.step_tokens))
    remarks = [hints_text(grid.hints, grid.told), loop_text(grid.loop), grid.model]
    title = ["; ".join(facts), *filter(None, remarks), *group_remarks(grid.groups)]
    title += ["", "hit ratio" if grid.groups.is_plain else "hit ratio of tokens"]
    _print_matrix(title, grid, lambda found: percent_text(found.hit_ratio))
    click.echo()
    if any(found.liar_asked is not None for found in grid.counts.values()):
        for heading, ratio in (
            ("hit ratio of honest sessions", "honest_hit_ratio"),
            ("hit ratio of liars", "liar_hit_ratio"),
        ):
            _print_matrix([heading], grid, _percent_of(operator.attrgetter(ratio)))
            click.echo()
    if grid.groups.is_plain or cell.device_blocks:  # else all tokens are asked for
        _print_shares_of_tokens(grid)
        click.echo()
    if grid.no_tokens is None:
        for heading, name in (("median", "missed_p50"), ("95th percentile", "missed_p95")):
            _print_matrix(
                [f"tokens missed by a request, {heading}"],
                grid,
                _tokens_of(operator.attrgetter(name)),
            )
            click.echo()
    _print_matrix([f"{grid.kept_in} stored"], grid, lambda found: f"{found.stored_slots:,}")
    if grid.loop is not None and grid.loop.rate is not None:
        for heading, name in (
            ("first token, mean, s", "ttft_mean"),
            ("first token, 95th percentile, s", "ttft_p95"),
        ):
            click.echo()
            _print_matrix([heading], grid, _seconds_of(operator.attrgetter(f"loop.{name}")))


def _percent_of(
    share: Callable[[ReplayResult], float | None],
) -> Callable[[ReplayResult], str]:
    """Return the text of a share."""
    return lambda found: percent_text(share(found))


def _seconds_of(time: Callable[[ReplayResult], float]) -> Callable[[ReplayResult], str]:
    """Return the text of a time of a closed loop."""
    return lambda found: duration_text(time(found))


def _tokens_of(
    count: Callable[[ReplayResult], int | None],
) -> Callable[[ReplayResult], str]:
    """Return the text of a number of tokens."""
    return lambda found: tokens_text(count(found))


def _print_shares_of_tokens(grid: Grid) -> None:
    if grid.no_tokens is None:
        title = [f"share of prompt tokens hit, {grid.block_tokens}"]
        _print_matrix(title, grid, lambda found: percent_text(found.token_hit_ratio))
    else:
        print_prose(f"share of prompt tokens hit: not known, {grid.no_tokens}")


def _print_matrix(title: list[str], grid: Grid, text: Callable[[ReplayResult], str]) -> None:
    """Print a table, its columns headed by the capacity: given, in blocks or slots, in bytes."""
    rows = [[text(found) for _, found in grid.row(policy)] for policy in grid.policies]
    headings = {grid.kept_in: [f"{blocks:,}" for blocks in grid.sizes.values()]}
    if any(given != str(blocks) for given, blocks in grid.sizes.items()):
        headings = {"capacity": list(grid.sizes), **headings}
    if grid.block_bytes is not None:
        headings["size"] = [bytes_text(blocks * grid.block_bytes) for blocks in grid.sizes.values()]
    columns = [
        [Column("\n".join(heading), [row[index] for row in rows])]
        for index, heading in enumerate(zip(*headings.values(), strict=True))
    ]
    leading = Column("\n".join(headings), grid.policies, numeric=False)
    print_tables(title, [leading], columns)


def _object(grid: Grid, given: str, cell: Cell, counts: ReplayResult) -> dict[str, object]:
    """Return a cell as one flat object; a ceiling has fewer fields."""
    block_bytes = grid.block_bytes
    values: dict[str, object] = {
        "policy": cell.policy,
        "capacity": cell.capacity,
        "capacity_given": given,
        "capacity_bytes": None if block_bytes is None else cell.capacity * block_bytes,
        "implementation": implementation_of(cell.policy),
        "device_blocks": cell.device_blocks,
        "pending": cell.pending,
        **counts.as_row(),
        "hit_ratio": counts.hit_ratio,
        "token_hit_ratio": counts.token_hit_ratio,
        **liars_object(counts),
    }
    if cell.policy in CEILINGS:
        values.update(dict.fromkeys(("implementation", "evicted", "refused", "not_admitted")))
    if counts.loop is not None:
        values |= flat(times_object(counts.loop))
    return values
