"""The result of ``kvoffload fleet`` as a table, as CSV and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import click

from kvoffload.advise.fleet_wording import NOT_MODELLED
from kvoffload.advise.fleets import FleetChoice, Prices, choose_fleet, p95_error, saving
from kvoffload.advise.units import percent_text
from kvoffload.replay import DecodedTrace, HintOptions, ReplayResult, TraceHints
from kvoffload.replay.fleet import EngineCounts, Fleet, FleetResult
from kvoffload.replay.grid import Cell
from kvoffload.replay.offline import BELADY, INFINITE

from ._hint_options import hints_object, hints_text
from ._loop_options import duration_text
from ._replay_result import liar_columns, liars_object, missed_columns
from ._sources import BlockTokens, Source
from ._terminal import Column, print_prose, print_tables


@dataclass(frozen=True, slots=True)
class FleetCell:
    """One fleet, with its sizes as they were given."""

    fleet: Fleet
    capacity: str
    tier: str | None


@dataclass(frozen=True, slots=True)
class FleetGrid:
    """All fleets that were compared."""

    source: Source
    trace: DecodedTrace
    block_bytes: int | None
    block_tokens: BlockTokens
    cells: list[FleetCell]  # by engines, capacity, tier, policy, router
    counts: dict[Fleet | Cell, FleetResult | ReplayResult]
    model: str | None
    order: dict[str, object]
    hints: HintOptions | None
    told: TraceHints | None
    prices: Prices | None

    def rows(self) -> Iterator[tuple[FleetCell, FleetResult]]:
        """Yield each fleet with its result, in order."""
        for cell in self.cells:
            found = self.counts[cell.fleet]
            if isinstance(found, FleetResult):
                yield cell, found

    def draw(self, path: str) -> None:
        """Draw the tokens hit into a file."""
        from ._plot import draw_fleets

        draw_fleets(self, path)

    def results(self) -> list[dict[str, Any]]:
        """Return each fleet with its result as an object."""
        return [fleet_object(*row) for row in self.rows()]

    def as_object(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        first, trace = self.cells[0].fleet, self.trace
        return {
            **self.source.head(),
            "unique_blocks": trace.unique_blocks,
            "block_bytes": self.block_bytes,
            "block_tokens": self.block_tokens.count,
            "block_tokens_from": self.block_tokens.origin,
            **self.order,
            "hints": hints_object(self.hints, self.told),
            "loop": first.loop,
            "prefill_tokens_per_second": first.rate,
            "link_bandwidth": first.link,
            "tier_bandwidth": first.tier_link,
            "decode_ms": first.decode_ns / 1e6,
            "slots": first.slots,
            "seed": first.seed,
            "not_modelled": NOT_MODELLED,
            "totals": [
                _total(self, engines, capacity, every)
                for (engines, capacity), every in totals_of(self.cells).items()
            ],
            "enough": [_choice_object(self, choice) for choice in _choices(self)],
            "results": self.results(),
        }

    def print(self) -> None:
        """Print the tables and what is enough."""
        print_fleets(self)

    def hits(self, pooled: Cell) -> int:
        """Return the blocks that one cache, and the accelerators' as one in front, hit."""
        found = self.counts[pooled]
        if isinstance(found, FleetResult):
            raise TypeError("pooled must be a Cell, got a fleet")
        return found.blocks - (found.asked_blocks or 0) + (found.hit_blocks or 0)

    def ratio(self, pooled: Cell) -> float:
        """Return the share of the blocks that one cache hits."""
        return self.hits(pooled) / (self.trace.num_blocks or 1)


def totals_of(cells: list[FleetCell]) -> dict[tuple[int, str], list[Cell]]:
    """Return one cache of the same total memory, and its ceilings, by engines and capacity."""
    totals: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        fleet = cell.fleet
        host, device = (
            fleet.engines * blocks for blocks in (fleet.host_blocks, fleet.device_blocks)
        )
        pooled = totals.setdefault((fleet.engines, cell.capacity), [])
        for one in (
            Cell(fleet.policy, host, device),
            Cell(BELADY, host + device),
            Cell(INFINITE, 1),
        ):
            if one not in pooled:
                pooled.append(one)
    return totals


def print_fleets(grid: FleetGrid) -> None:
    """Print the setup, a row per fleet, the totals and the limits of the model."""
    first = grid.cells[0].fleet
    trace = grid.trace
    facts = [*grid.source.names, f"{trace.num_requests:,} requests"]
    facts += [f"{trace.num_blocks:,} blocks", f"{trace.unique_blocks:,} unique"]
    facts.append(str(grid.block_tokens))
    remarks = [hints_text(grid.hints, grid.told), grid.model, _engine_text(first)]
    title = ["; ".join(facts), *filter(None, remarks)]
    has_tier = any(cell.fleet.tier is not None for cell in grid.cells)
    has_device = any(cell.fleet.device_blocks for cell in grid.cells)
    rows = list(grid.rows())

    def column(
        heading: str, text: Callable[[FleetCell, FleetResult], str], *, numeric: bool = True
    ) -> Column:
        return Column(heading, [text(*row) for row in rows], numeric=numeric)

    def share(name: str) -> Callable[[FleetCell, FleetResult], str]:
        return lambda _, found: percent_text(
            getattr(found, name) / found.blocks if found.blocks else 0.0
        )

    leading = [
        column("engines", lambda cell, _: f"{cell.fleet.engines}"),
        column("capacity\nof each", lambda cell, _: cell.capacity, numeric=False),
        *([column("tier", lambda cell, _: cell.tier or "-", numeric=False)] if has_tier else []),
        column("policy", lambda cell, _: cell.fleet.policy, numeric=False),
        column("router", lambda cell, _: cell.fleet.router, numeric=False),
    ]
    groups = [
        [column("tokens\nhit", lambda _, found: percent_text(found.token_hit_ratio))],
        *([[column("blocks on\ndevice", share("device_hits"))]] if has_device else []),
        *([[column("blocks in\nhost", share("host_hits"))]] if has_device or has_tier else []),
        *([[column("blocks in\ntier", share("tier_hits"))]] if has_tier else []),
    ]
    liars = liar_columns([found for _, found in rows])
    groups += [liars] if liars else []
    groups.append(missed_columns([found for _, found in rows]))
    if first.rate is not None:
        groups += [
            [column("prefill\nsaved", lambda _, found: percent_text(found.saved))],
            [
                column("first token\np50, s", lambda _, found: _seconds(found.ttft_p50)),
                column("\np95, s", lambda _, found: _seconds(found.ttft_p95)),
            ],
            [column("busy", lambda _, found: percent_text(found.busy))],
        ]
    groups.append([column("busiest\nengine/mean", lambda _, found: f"{found.imbalance:.2f}")])
    print_tables(title, leading, groups)
    click.echo()
    _print_totals(grid)
    click.echo()
    for choice in _choices(grid):
        print_prose(_choice_text(grid, choice))
        click.echo()
    print_prose(NOT_MODELLED)


def _choices(grid: FleetGrid) -> list[FleetChoice]:
    """Return the choice for each number of engines with which several fleets were compared."""
    by_engines: dict[int, dict[Fleet, FleetResult]] = {}
    for cell, found in grid.rows():
        by_engines.setdefault(cell.fleet.engines, {})[cell.fleet] = found
    choices = [choose_fleet(some, grid.prices) for some in by_engines.values() if len(some) > 1]
    return [choice for choice in choices if choice is not None]


def _choice_text(grid: FleetGrid, choice: FleetChoice) -> str:
    """Return a choice in words."""
    fleet, found = choice.fleet, choice.result
    cell = next(cell for cell in grid.cells if cell.fleet == fleet)
    tier = "" if fleet.tier is None else f", tier {cell.tier}"
    what = "tokens" if found.saved is None else "prefill"
    text = (
        f"Enough for {fleet.engines:,} engine{'s' * (fleet.engines > 1)}: {fleet.router}, "
        f"{fleet.policy}, {cell.capacity} each{tier}. It saves {percent_text(saving(found))} of "
        f"the {what}, the best saves {percent_text(saving(choice.best))}"
    )
    for other, name in ((choice.by_turns, "round-robin"), (choice.twice, "twice the memory")):
        if other is not None and other is not found:
            text += f", {name} {percent_text(saving(other))}"
    if found.ttft_p95 is not None:
        time, error = duration_text(found.ttft_p95), duration_text(p95_error(found))
        text += f"; 95 % of the first tokens come within {time} ± {error} s"
    return f"{text}."


def _choice_object(grid: FleetGrid, choice: FleetChoice) -> dict[str, object]:
    """Return a choice as ``--json`` prints it."""
    cell = next(cell for cell in grid.cells if cell.fleet == choice.fleet)
    others = {"best": choice.best, "round_robin": choice.by_turns, "twice": choice.twice}
    return {
        "engines": choice.fleet.engines,
        "capacity": cell.capacity,
        "tier": cell.tier,
        "policy": choice.fleet.policy,
        "router": choice.fleet.router,
        "saving": saving(choice.result),
        **{name: None if one is None else saving(one) for name, one in others.items()},
    }


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration_text(value)


def _engine_text(fleet: Fleet) -> str:
    if fleet.rate is None:
        text = "no rate: prompts take no time"
    else:
        text = f"{fleet.rate:,} prompt tokens per second and engine"
        text += f", {fleet.decode_ns / 1e6:g} ms per token of an answer"
        if fleet.slots:
            text += f", at most {fleet.slots:,} requests per engine at once"
    loops = {"closed": "; each session waits for its answers", "recorded": "; recorded waits"}
    return text + loops.get(fleet.loop, "")


def _print_totals(grid: FleetGrid) -> None:
    totals = totals_of(grid.cells)
    policies = list(dict.fromkeys(pooled.policy for every in totals.values() for pooled in every))
    by_policy = {
        policy: [
            percent_text(next(grid.ratio(one) for one in every if one.policy == policy))
            for every in totals.values()
        ]
        for policy in policies
    }
    print_tables(
        ["blocks hit if all engines shared one host memory, without tiers"],
        [
            Column("engines", [f"{engines}" for engines, _ in totals]),
            Column("capacity\nof each", [capacity for _, capacity in totals], numeric=False),
        ],
        [[Column(policy, texts)] for policy, texts in by_policy.items()],
    )


def ttft_object(found: FleetResult) -> dict[str, float | None]:
    """Return the times of first tokens, seconds, and the error of the 95th percentile."""
    return {
        "p50": found.ttft_p50,
        "p95": found.ttft_p95,
        "p95_error": None if found.ttft_p95 is None else p95_error(found),
        "mean": found.ttft_mean,
    }


def fleet_object(cell: FleetCell, found: FleetResult) -> dict[str, Any]:
    """Return a fleet and its result as ``--json`` prints them."""
    fleet, tier = cell.fleet, cell.fleet.tier
    size = fleet.block_bytes or None

    def in_bytes(blocks: int) -> int | None:
        return None if size is None else blocks * size

    return {
        "engines": fleet.engines,
        "capacity": cell.capacity,
        "router": fleet.router,
        "policy": fleet.policy,
        "host_blocks": fleet.host_blocks,
        "device_blocks": fleet.device_blocks,
        "tier": None if tier is None else tier.kind,
        "tier_blocks": 0 if tier is None else tier.blocks,
        "tier_policy": None if tier is None else tier.policy,
        "requests": found.requests,
        "blocks": found.blocks,
        "device_hits": found.device_hits,
        "host_hits": found.host_hits,
        "tier_hits": found.tier_hits,
        "tokens": found.tokens,
        "hit_tokens": found.hit_tokens,
        "missed_tokens": found.missed_tokens,
        "missed_p50": found.missed_p50,
        "missed_p95": found.missed_p95,
        "token_hit_ratio": found.token_hit_ratio,
        **liars_object(found),
        "saved": found.saved,
        "host_stored": found.host_stored,
        "tier_stored": found.tier_stored,
        "bytes": {
            "host_in": in_bytes(found.host_stored),
            "host_out": in_bytes(found.host_hits),
            "tier_in": in_bytes(found.tier_stored),
            "tier_out": in_bytes(found.tier_hits),
        },
        "ttft": ttft_object(found),
        "latency_mean": found.latency_mean,
        "busy": found.busy,
        "imbalance": found.imbalance,
        "placement": found.placement,
        "per_engine": [
            {field.name: getattr(one, field.name) for field in fields(EngineCounts)}
            for one in found.engines
        ],
    }


def _total(grid: FleetGrid, engines: int, capacity: str, every: list[Cell]) -> dict[str, object]:
    """Return the blocks that all memory hits as one cache."""
    hits = {one.policy: grid.hits(one) for one in every}
    ceilings = {name: hits.pop(name) for name in (BELADY, INFINITE)}
    return {"engines": engines, "capacity": capacity, "pooled": hits, **ceilings}
