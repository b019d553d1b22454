"""Advice on a fleet with its context, as the command and the page present it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvoffload.replay import Result
from kvoffload.replay.policies import is_own

from .answer import Answer, Column, Curve, Curves, Snippet, Table, TableCell, column
from .configuration import vllm_text
from .fleet_wording import (
    NOT_MODELLED,
    each_text,
    fleet_findings,
    fleet_headline,
    p95_text,
    tier_text,
)
from .fleets import FleetAdvice, saving
from .setup import FleetTier
from .units import bytes_text, count_text, latency_text, percent_text
from .wording import (
    Finding,
    assumed_workers_text,
    fits_text,
    rates_text,
    workers_text,
)

__all__ = ["FleetSubject", "Heat"]

SHADES = 10
"""The darkest shade of a heat map: everything is saved."""


@dataclass(frozen=True, slots=True)
class Heat:
    """The savings of fleets with one policy and one tier: a row per router, by memory.

    `rows` are ascending by memory, None for what was not compared.
    """

    policy: str
    tier: FleetTier | None
    rows: dict[str, list[Result | None]]


@dataclass(frozen=True, slots=True)
class FleetSubject(Answer):
    """Advice on a fleet and its context."""

    FIRST = ("Changes", "Capacity", "Prefixes", "Router", "Memory", "Tier", "First token")

    advice: FleetAdvice

    @property
    def heading(self) -> str:
        """The heading of a page."""
        return f"Advice for {self.setup.engines} engines behind a router"

    @property
    def is_recommended(self) -> bool:
        """Whether the trace suffices for a recommendation, be it not to offload."""
        return not self.advice.objections

    @property
    def offloads(self) -> bool:
        """Whether offloading is recommended."""
        return self.is_recommended and self.advice.case.offloads

    def is_enough(self, heat: Heat, router: str, memory: int) -> bool:
        """Return whether a cell of a heat map is the fleet that is enough."""
        case = self.advice.case
        same = not case.offloads or (heat.tier, heat.policy) == (case.tier, case.fleet.policy)
        return same and (router, memory) == (case.fleet.router, case.memory)

    def headline(self) -> str:
        """Return the advice in one sentence."""
        text = fleet_headline(self.advice)
        return text if self.offloads else text + fits_text(self.setup, self.advice.facts)

    def own_findings(self) -> list[Finding]:
        """Return the findings on what is recommended."""
        return fleet_findings(self.advice)

    def heats(self) -> Iterator[Heat]:
        """Yield the savings by router and memory, first with the policy and tier of `offloading`.

        The others follow, by tier, then policy.
        """
        advice, setup = self.advice, self.setup
        chosen = advice.offloading.tier, advice.offloading.fleet.policy
        pairs = [(tier, policy) for tier in setup.tiers for policy in setup.policies]
        for tier, policy in dict.fromkeys((chosen, *pairs)):
            rows = {
                router: [
                    advice.like(memory=memory, tier=tier, policy=policy, router=router)
                    for memory in setup.memories()
                ]
                for router in self.routers()
            }
            yield Heat(policy, tier, rows)

    def routers(self) -> list[str]:
        """Return the routers that were compared, in order."""
        return list(dict.fromkeys(case.fleet.router for case in self.advice.cases))

    def memory_text(self) -> str:
        """Return the bytes per block, and how much of the trace the memory holds."""
        setup, model = self.setup, self.model_text
        blocks = setup.memory // setup.block_bytes
        share = blocks * setup.engines / (self.advice.facts.unique_blocks or 1)
        part = f"{share * 100:.3g} % of the distinct blocks" if share < 1 else "more than all"
        return (
            f"{model}{bytes_text(setup.block_bytes)} per block; {setup.engines:,} engines of "
            f"{bytes_text(setup.memory)} hold {blocks:,} blocks each, "
            f"{count_text(blocks * setup.block_tokens)} tokens, together {part}"
        )

    def curves(self) -> Curves:
        """Return what fleets save over memory, a line per router."""
        setup, case = self.setup, self.advice.case
        heat, memories = next(self.heats()), setup.memories()
        behind = "" if heat.tier is None else f" and {tier_text(heat.tier)}"
        lines = [
            Curve(router, [None if one is None else saving(one) for one in results])
            for router, results in heat.rows.items()
        ]
        return Curves(
            f"{setup.saved.capitalize()} saved over memory",
            f"With {heat.policy} in the memory of each engine{behind}.",
            [bytes_text(memory) if memory else "none" for memory in memories],
            memories.index(case.memory),
            "enough" if self.is_recommended else "",
            case.fleet.router if self.is_recommended else None,
            lines,
        )

    def tables(self) -> list[Table]:
        """Return what fleets save by memory and router, and the routers of the one enough."""
        first, *others = self.heats()
        return [
            self._heat(first, "Routers and memory"),
            self._routers(),
            *(self._heat(heat, "", is_detail=True) for heat in others),
        ]

    def _heat(self, heat: Heat, heading: str, *, is_detail: bool = False) -> Table:
        setup = self.setup
        tiers = f", {tier_text(heat.tier)}" if len(setup.tiers) > 1 else ""
        title = f"{setup.saved} saved with {heat.policy}{tiers}, by memory of each engine"

        def cell(router: str, index: int, memory: int) -> TableCell:
            result = heat.rows[router][index]
            if result is None:
                return TableCell("-", shade=0)
            share = saving(result)
            return TableCell(
                percent_text(share),
                shade=round(SHADES * min(1.0, max(0.0, share))),
                enough=self.is_recommended and self.is_enough(heat, router, memory),
            )

        columns = [
            Column(
                bytes_text(memory) if memory else "no\noffloading",
                [cell(router, index, memory) for router in heat.rows],
            )
            for index, memory in enumerate(setup.memories())
        ]
        return Table(
            heading, title, "router", list(heat.rows), [columns], kind="heat", is_detail=is_detail
        )

    def _routers(self) -> Table:
        """Return the routers, all else as in the fleet that is enough."""
        advice, case = self.advice, self.advice.case
        found = {router: advice.like(router=router) for router in self.routers()}
        known = {router: result for router, result in found.items() if result is not None}
        results = list(known.values())
        columns = [
            column(
                "tokens\nhit", [percent_text(one.token_hit_ratio) for one in results], first=True
            )
        ]
        for title, name, text in (
            ("tokens missed\np50", "missed_p50", "{:,}".format),
            ("\np95", "missed_p95", "{:,}".format),
            ("hit ratio\nhonest", "honest_hit_ratio", percent_text),
            ("hit ratio\nliars", "liar_hit_ratio", percent_text),
        ):
            values = [getattr(one, name) for one in results]
            if any(value is not None for value in values):
                columns.append(column(title, ["-" if v is None else text(v) for v in values]))
        if advice.setup.rate is not None:
            p50s, p95s = ([getattr(one, f"ttft_p{n}") or 0.0 for one in results] for n in (50, 95))
            columns += [
                _bars("first token\np50", p50s, [*map(latency_text, p50s)]),
                _bars("\np95", p95s, [*map(p95_text, results)]),
                column("busy", [percent_text(one.busy) for one in results]),
            ]
        balance = [one.imbalance for one in results]
        columns.append(_bars("busiest\nengine/mean", balance, [f"{one:.2f}" for one in balance]))
        title = "without offloading"
        if case.offloads:
            title = f"with {case.fleet.policy} in {each_text(case.memory)}"
        if case.tier is not None:
            title += f" and {tier_text(case.tier)}"
        heading, chosen = "First tokens and balance", case.fleet.router
        return Table(heading, title, "router", list(known), [columns], chosen, kind="bars")

    def snippets(self) -> list[Snippet]:
        """Return vLLM's configuration of each engine."""
        case, groups = self.advice.case, self.setup.chunks
        vllm = vllm_text(case.fleet.policy, case.memory, groups) if self.offloads else None
        if vllm is None:
            return []
        return [Snippet("vLLM, each engine, --kv-transfer-config", "vllm", vllm)]

    def remarks(self) -> list[str]:
        """Return the assumptions behind the figures."""
        setup = self.setup
        if setup.device_memory:
            on_device = self.advice.result.device_hits / (self.advice.facts.blocks or 1)
            device = (
                f"An LRU prefix cache of {bytes_text(setup.device_memory)} on each accelerator "
                f"{'is assumed to be' if setup.device_is_assumed else 'is'} asked first and serves "
                f"{percent_text(on_device)} of the blocks. Running requests share that memory; "
                "--device-memory sets what they leave, 0 leaves it out."
            )
        else:
            device = "No accelerator's own cache is modelled; --device-memory adds one."
        loops = {
            "open": "Requests come as recorded, however long the queues.",
            "closed": "Each request of a session comes once the previous one is answered.",
            "recorded": "Requests of a session keep their recorded waits.",
        }
        found = [device, loops[setup.loop]]
        if self.hints_text is not None:
            found.append(f"Replayed with {self.hints_text}.")
        if setup.rate is None:
            found.append(
                "No prefill rate is known, so prompts take no time: --accelerator or "
                "--prefill-tokens-per-second gives times to first tokens."
            )
        elif setup.engine is not None and setup.engine.is_known:
            found.append(f"Each engine: {rates_text(setup.engine)}")
        found += [*assumed_workers_text(setup.engine, self.model), NOT_MODELLED]
        if self.offloads and not is_own(self.advice.case.fleet.policy):
            found.append(workers_text(setup.engine))
        if self.offloads and self.advice.case.tier is not None:
            found.append("This configuration does not include the tier; see the pages on tiers.")
        return found


def _bars(title: str, values: Sequence[float], texts: Sequence[str]) -> Column:
    """Return a column with a bar for each value, as long as its share of the greatest."""
    longest = max(values) or 1.0
    pairs = zip(texts, values, strict=True)
    cells = [TableCell(text, bar=round(one / longest, 3)) for text, one in pairs]
    return Column(title, cells, first=True)
