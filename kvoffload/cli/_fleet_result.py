"""The result of ``kvoffload fleet``: its tables, its totals, and what is enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import click

from kvoffload.advise.answer import column
from kvoffload.advise.choice import ROUND_ROBIN, Prices, choose_fleet, p95_error, saving
from kvoffload.advise.remarks import NOT_MODELLED
from kvoffload.advise.units import percent_text
from kvoffload.replay import Configuration, Result
from kvoffload.replay.offline import BELADY, CEILINGS, INFINITE

from ._fields import PLACES, Row, columns, seconds
from ._terminal import print_prose, print_tables
from ._view import View


@dataclass(frozen=True, slots=True)
class Fleets(View):
    """All fleets that were compared, and one cache of the same memory as all of each."""

    pooled: Mapping[Configuration, Result] = field(default_factory=dict)
    prices: Prices | None = None

    def draw(self, path: str) -> None:
        """Draw the tokens hit into a file."""
        from ._plot import draw_fleets

        draw_fleets(self, path)

    def more(self) -> dict[str, object]:
        """Return the limits of the model, the totals, and what is enough."""
        return {
            "not_modelled": NOT_MODELLED,
            "totals": [
                {"engines": engines, "capacity": given, "pooled": hits, **ceilings}
                for (engines, given), hits, ceilings in self._totals()
            ],
            "enough": [self._choice_object(*choice) for choice in self._choices()],
        }

    def print(self) -> None:
        """Print a row per fleet, the totals, what is enough and the limits of the model."""
        rows = self.rows
        has_tier = any(row.configuration.tier is not None for row in rows)
        has_device = any(row.configuration.device for row in rows)
        shown = dict(zip(PLACES, (has_device, has_device or has_tier, has_tier), strict=True))
        leading = columns(rows, "engines", "capacity_given", "tier_given", "policy", "router")
        leading[1] = replace(leading[1], title="capacity\nof each", numeric=False)
        groups = [columns(rows, "token_hit_ratio")]
        groups += [[place.column(rows)] for place, is_shown in shown.items() if is_shown]
        for names in (
            ("honest_hit_ratio", "liar_hit_ratio"),
            ("missed_p50", "missed_p95"),
            ("saved",),
            ("ttft_p50", "ttft_p95"),
            ("busy",),
            ("imbalance",),
        ):
            groups.append(columns(rows, *names))
        print_tables(self.title(), leading, [group for group in groups if group])
        click.echo()
        self._print_totals()
        click.echo()
        for choice in self._choices():
            print_prose(self._choice_text(*choice))
            click.echo()
        print_prose(NOT_MODELLED)

    def _totals(self) -> list[tuple[tuple[int, str], dict[str, int], dict[str, int]]]:
        """Return the blocks that all memory hits as one cache, and the ceilings of these."""
        found: dict[tuple[int, str], dict[str, int]] = {}
        for row in self.rows:
            one = row.configuration
            hits = found.setdefault((one.engines, row.given), {})
            for pooled in pooled_of(one):
                result = self.pooled[pooled]
                hits[pooled.policy] = result.device_hits + result.hits
        return [
            (
                key,
                {policy: count for policy, count in hits.items() if policy not in CEILINGS},
                {policy: hits[policy] for policy in CEILINGS},
            )
            for key, hits in found.items()
        ]

    def _print_totals(self) -> None:
        totals = self._totals()
        every = [hits | ceilings for _, hits, ceilings in totals]
        policies = dict.fromkeys(policy for hits in every for policy in hits)
        whole = self.read.trace.num_blocks or 1
        print_tables(
            ["blocks hit if all engines shared one host memory, without tiers"],
            [
                column("engines", [f"{engines}" for (engines, _), _, _ in totals]),
                column("capacity\nof each", [given for (_, given), _, _ in totals], numeric=False),
            ],
            [
                [column(policy, [percent_text(hits[policy] / whole) for hits in every])]
                for policy in policies
            ],
        )

    def _choices(self) -> list[tuple[Row, dict[str, float | None]]]:
        """Return the choice for each number of engines with which several were compared.

        Each comes with what others save: the best, the same behind ``round-robin``, and with twice
        the host memory; None for what was not compared.
        """
        by_engines: dict[int, dict[Configuration, Row]] = {}
        for row in self.rows:
            some = by_engines.setdefault(row.configuration.engines, {})
            some.setdefault(row.configuration, row)
        found = []
        for rows in by_engines.values():
            if len(rows) == 1:
                continue
            chosen = choose_fleet({one: row.result for one, row in rows.items()}, self.prices)
            others = {
                "round_robin": rows.get(replace(chosen, router=ROUND_ROBIN)),
                "twice": rows.get(replace(chosen, host=2 * chosen.host)),
            }
            savings = {
                name: None if row is None else saving(row.result) for name, row in others.items()
            }
            best = max(saving(row.result) for row in rows.values())
            found.append((rows[chosen], {"best": best, **savings}))
        return found

    def _choice_text(self, row: Row, others: Mapping[str, float | None]) -> str:
        """Return a choice in words."""
        fleet, found = row.configuration, row.result
        what = "tokens" if found.saved is None else "prefill"
        tier = "" if row.tier is None else f", tier {row.tier}"
        text = (
            f"Enough for {fleet.engines:,} engine{'s' * (fleet.engines > 1)}: {fleet.router}, "
            f"{fleet.policy}, {row.given} each{tier}. It saves "
            f"{percent_text(saving(found))} of the {what}, the best saves "
            f"{percent_text(others['best'])}"
        )
        if fleet.router != ROUND_ROBIN and others["round_robin"] is not None:
            text += f", {ROUND_ROBIN} {percent_text(others['round_robin'])}"
        if others["twice"] is not None:
            text += f", twice the memory {percent_text(others['twice'])}"
        if found.ttft_p95 is not None:
            time, error = seconds(found.ttft_p95), seconds(p95_error(found))
            text += f"; 95 % of the first tokens come within {time} ± {error} s"
        return f"{text}."

    def _choice_object(self, row: Row, others: Mapping[str, float | None]) -> dict[str, object]:
        """Return a choice as ``--json`` prints it."""
        return {
            "engines": row.configuration.engines,
            "capacity": row.given,
            "tier": row.tier,
            "policy": row.configuration.policy,
            "router": row.configuration.router,
            "saving": saving(row.result),
            **others,
        }


def pooled_of(fleet: Configuration) -> list[Configuration]:
    """Return one cache of the same total memory, and its ceilings."""
    host, device = fleet.engines * fleet.host, fleet.engines * fleet.device
    groups = fleet.groups
    return [
        Configuration(policy=fleet.policy, host=host, device=device, groups=groups),
        Configuration(policy=BELADY, host=host + device, groups=groups),
        Configuration(policy=INFINITE, host=1, groups=groups),
    ]
