"""The result of ``kvoffload fleet``: its tables, its totals, and what is enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import click

from kvoffload._checks import MAX_NUM_BLOCKS
from kvoffload._printable import plural
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
    is_total: bool = False  # capacities were given for all engines together

    def draw(self, path: str) -> None:
        """Draw the tokens hit into a file."""
        from ._plot import draw_fleets

        draw_fleets(self, path)

    @property
    def _of_whom(self) -> str:
        return f"capacity\nof {'all' if self.is_total else 'each'}"

    def more(self) -> dict[str, object]:
        """Return the limits of the model, the totals, and what is enough."""
        return {
            "not_modelled": NOT_MODELLED,
            "totals": self._totals(),
            "enough": [choice for _, choice in self._choices()],
        }

    def print(self) -> None:
        """Print a row per fleet, the totals, what is enough and the limits of the model."""
        rows = self.rows
        has_tier = any(row.configuration.tier is not None for row in rows)
        has_device = any(row.configuration.device for row in rows)
        shown = dict(zip(PLACES, (has_device, has_device or has_tier, has_tier), strict=True))
        leading = columns(rows, "engines", "capacity_given", "tier_given", "policy", "router")
        leading[1] = replace(leading[1], title=self._of_whom, numeric=False)
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

    def _totals(self) -> list[dict[str, Any]]:
        """Return the blocks that all memory hits as one cache, and the ceilings of these."""
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for row in self.rows:
            one = row.configuration
            total: dict[str, Any] = {"engines": one.engines, "capacity": row.given, "pooled": {}}
            total = found.setdefault((one.engines, row.given), total)
            for pooled in pooled_of(one):
                result, name = self.pooled[pooled], pooled.policy
                hits = total if name in CEILINGS else total["pooled"]
                hits[name] = result.device_hits + result.hits
        return list(found.values())

    def _print_totals(self) -> None:
        totals = self._totals()
        every = [total["pooled"] | {name: total[name] for name in CEILINGS} for total in totals]
        policies = dict.fromkeys(policy for hits in every for policy in hits)
        whole = self.read.trace.num_blocks or 1
        capacities = [total["capacity"] for total in totals]
        print_tables(
            ["blocks hit if all engines shared one host memory, without tiers"],
            [
                column("engines", [f"{total['engines']}" for total in totals]),
                column(self._of_whom, capacities, numeric=False),
            ],
            [
                [column(policy, [percent_text(hits[policy] / whole) for hits in every])]
                for policy in policies
            ],
        )

    def _choices(self) -> list[tuple[Row, dict[str, Any]]]:
        """Return the choice for each number of engines with which several were compared.

        Each comes as ``--json`` prints it, with what others save: the best, the same behind
        ``round-robin``, and with twice the host memory; None for what was not compared.
        """
        by_engines: dict[int, dict[Configuration, Row]] = {}
        for row in self.rows:
            some = by_engines.setdefault(row.configuration.engines, {})
            some.setdefault(row.configuration, row)
        found = []
        for engines, rows in by_engines.items():
            if len(rows) == 1:
                continue
            savings = {one: saving(row.result) for one, row in rows.items()}
            chosen = choose_fleet({one: row.result for one, row in rows.items()}, self.prices)
            choice = {
                "engines": engines,
                "capacity": rows[chosen].given,
                "tier": rows[chosen].tier,
                "policy": chosen.policy,
                "router": chosen.router,
                "saving": savings[chosen],
                "best": max(savings.values()),
                "round_robin": savings.get(replace(chosen, router=ROUND_ROBIN)),
                "twice": savings.get(replace(chosen, host=2 * chosen.host)),
            }
            found.append((rows[chosen], choice))
        return found

    def _choice_text(self, row: Row, choice: Mapping[str, Any]) -> str:
        """Return a choice in words."""
        engines, found = choice["engines"], row.result
        what = "tokens" if found.saved is None else "prefill"
        tier = "" if row.tier is None else f", tier {row.tier}"
        whose = "in all" if self.is_total else "each"
        text = (
            f"Enough for {plural(engines, 'engine')}: {choice['router']}, "
            f"{choice['policy']}, {row.given} {whose}{tier}. It saves "
            f"{percent_text(choice['saving'])} of the {what}, the best saves "
            f"{percent_text(choice['best'])}"
        )
        if choice["router"] != ROUND_ROBIN and choice["round_robin"] is not None:
            text += f", {ROUND_ROBIN} {percent_text(choice['round_robin'])}"
        if choice["twice"] is not None:
            text += f", twice the memory {percent_text(choice['twice'])}"
        if found.ttft_p95 is not None:
            time, error = seconds(found.ttft_p95), seconds(p95_error(found))
            text += f"; 95 % of the first tokens come within {time} ± {error} s"
        return f"{text}."


def pooled_of(fleet: Configuration) -> list[Configuration]:
    """Return one cache of the same total memory, and its ceilings."""
    host = min(fleet.engines * fleet.host, MAX_NUM_BLOCKS)  # more than a trace has
    device = fleet.engines * fleet.device
    groups = fleet.groups
    return [
        Configuration(policy=fleet.policy, host=host, device=device, groups=groups),
        Configuration(policy=BELADY, host=host + device, groups=groups),
        Configuration(policy=INFINITE, host=1, groups=groups),
    ]
