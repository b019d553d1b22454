"""The tables of an advice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvoffload.replay import Result

from .advice import Advice
from .answer import Column, Table, TableCell, column
from .choice import saving
from .economy import balance
from .setup import FleetTier
from .subject import Subject
from .units import bytes_text, count_text, duration_text, latency_text, percent_text, rate_text
from .verdicts import verdict
from .wording import deployed_text, p95_text, tier_text

_Behind = tuple[FleetTier | None, str]
"""A tier and the policy of host memory."""

SHADES = 10
"""The darkest shade of a heat map: everything is saved."""


def tables(subject: Subject) -> list[Table]:
    """Return the policies, the sizes of the accelerator's cache, and those of a disk.

    Of a fleet, what it saves by memory and router, and the routers of the one that is enough.
    """
    if not subject.setup.engines:
        return [_policies(subject), *_devices(subject), *_disks(subject)]
    advice = subject.advice
    first, *others = (_heat(advice, *heat) for heat in heats(advice).items())
    return [first, _routers(advice), *others]


def _policies(subject: Subject) -> Table:
    advice, setup, engine = subject.advice, subject.setup, subject.setup.rates
    ranking, asked = advice.ranking(), bytes_text(setup.memory)
    results = [advice.of(policy) for policy in ranking]

    def of_results(title: str, texts: Iterable[str], values: Sequence[float] = ()) -> Column:
        return column(title, [*texts, "-", "-"], values)  # nothing of the ceilings

    ratios = [
        replace(
            _ratios(advice, memory, f"hit ratio\n{bytes_text(memory)}", ranking),
            first=memory == setup.memory,
        )
        for memory in setup.memories()
    ]
    if subject.by_device:
        alone = subject.by_device[0]
        ratios.append(_ratios(alone, setup.memory, f"{asked}, no\ndevice cache", ranking))
    rest = [
        of_results(f"hit ratio\n{who}", [percent_text(getattr(one, name)) for one in results])
        for who, name in (("honest", "honest_hit_ratio"), ("liars", "liar_hit_ratio"))
        if any(one.liar_hit_ratio is not None for one in results)
    ]
    apart = "hit ratios of honest sessions and liars, " if rest else ""
    saved = [count_text(one.offloaded_tokens) for one in results]
    saved += ["-" if n is None else count_text(n) for n in advice.ceiling_tokens()]
    per_hit = [advice.stored_per_hit(one) for one in results]
    rates = [advice.rates(one) for one in results]
    rest += [
        column("tokens saved", saved, [one.offloaded_tokens for one in results], first=True),
        of_results(
            "stored\nper hit",
            ["-" if n is None else f"{n:.2f}" for n in per_hit],
            [-(n or math.inf) for n in per_hit],
        ),
        of_results(
            "to host",
            [rate_text(one.store) for one in rates],
            [-one.stored for one in results],
        ),
        of_results("from host", [rate_text(one.load) for one in rates]),
    ]
    if engine is not None:
        found = [balance(setup, one, engine) for one in results]
        saves = [one.prefill_seconds for one in found]
        takes = [one.moving_seconds for one in found]
        rest.append(of_results("prefill\nsaved", map(duration_text, saves), saves))
        rest.append(of_results("moving\nblocks", map(duration_text, takes), [-n for n in takes]))
    return Table(
        "Policies",
        f"{apart}tokens saved, stores and rates are for {asked}",
        "policy",
        [*ranking, "belady", "infinite"],
        [ratios, rest],
        advice.policy,
    )


def _devices(subject: Subject) -> list[Table]:
    """Return the advice by sizes of the accelerator's cache; nothing if none is assumed."""
    found, engine = subject.by_device, subject.setup.rates
    if not found:
        return []
    whole = subject.setup.device_memory
    columns = [
        column("serves", [percent_text(one.device_hit_ratio) for one in found]),
        column("recommended", [verdict(one) for one in found], numeric=False),
        column("hit ratio", [percent_text(one.result.hit_ratio) for one in found]),
        column("tokens saved", [count_text(one.result.offloaded_tokens) for one in found]),
    ]
    if engine is not None:
        gained = [balance(one.setup, one.result, engine).net_seconds for one in found]
        columns.append(column("time gained", [*map(duration_text, gained)]))
    sizes = [one.setup.device_memory for one in found]
    names = [
        f"{bytes_text(size)}, {size / whole * 100:.0f} %" if size else "none" for size in sizes
    ]
    asked = bytes_text(subject.setup.memory)
    title = f"with {asked} of host memory, for sizes of the accelerator's own prefix cache"
    return [_detail("Accelerator", title, "prefix cache", names, columns)]


def _disks(subject: Subject) -> list[Table]:
    """Return the disk's hits and what is written to it; nothing without one."""
    details = subject.details
    if details is None or details.disk is None:
        return []
    cells = details.disk_cells
    written = ["-" if c.bytes_per_day is None else bytes_text(c.bytes_per_day) for c in cells]
    wear = ["-" if c.writes_per_day is None else f"{c.writes_per_day:.3g}" for c in cells]
    columns = [
        column("host", [cell.host_policy for cell in cells], numeric=False),
        column("host memory", [bytes_text(cell.memory) for cell in cells]),
        column("hit ratio\nof both", [percent_text(cell.counts.hit_ratio) for cell in cells]),
        column("written\nper day", written),
        column("times\nits size", wear),
    ]
    title = f"with a disk of {bytes_text(details.disk.size)} behind host memory"
    return [_detail("Disk", title, "disk", [cell.policy for cell in cells], columns)]


def _ratios(advice: Advice, memory: int, title: str, ranking: Sequence[str]) -> Column:
    """Return the hit ratios of policies and ceilings in one memory as a column."""
    ratios = [advice.of(policy, memory).hit_ratio for policy in ranking]
    texts = [percent_text(ratio) for ratio in (*ratios, advice.ceilings[memory], advice.unbounded)]
    return column(title, texts, ratios)


def _detail(
    heading: str, title: str, name: str, rows: Sequence[str], columns: Sequence[Column]
) -> Table:
    return Table(heading, title, name, rows, [columns], kind="plain", is_detail=True)


def heats(advice: Advice) -> dict[_Behind, dict[str, list[Result | None]]]:
    """Return what fleets save by tier and policy, by router: by memory, None if not compared.

    First with the tier and policy of `offloading`.
    """
    setup, chosen = advice.setup, (advice.offloading.tier, advice.offloading.policy)
    pairs = [(tier, policy) for tier in setup.tiers for policy in setup.policies]
    return {
        (tier, policy): {
            router: [
                advice.like(memory=memory, tier=tier, policy=policy, router=router)
                for memory in setup.memories()
            ]
            for router in routers(advice)
        }
        for tier, policy in dict.fromkeys((chosen, *pairs))
    }


def routers(advice: Advice) -> list[str]:
    """Return the routers that were compared, in order."""
    return list(dict.fromkeys(case.router for case in advice.rows))


def _heat(advice: Advice, behind: _Behind, found: dict[str, list[Result | None]]) -> Table:
    """Return the map of what fleets save; that of the fleet that is enough is no detail."""
    setup, chosen, (tier, policy) = advice.setup, advice.case, behind
    tiers = f", {tier_text(tier)}" if len(setup.tiers) > 1 else ""
    title = f"{setup.saved} saved with {policy}{tiers}, by memory of each engine"
    is_first = behind == (advice.offloading.tier, advice.offloading.policy)
    is_chosen = behind == (chosen.tier, chosen.policy) or not chosen.offloads

    def cell(router: str, index: int, memory: int) -> TableCell:
        result = found[router][index]
        if result is None:
            return TableCell("-", shade=0)
        share = saving(result)
        enough = is_chosen and (memory, router) == (chosen.memory, chosen.router)
        return TableCell(
            percent_text(share),
            shade=round(SHADES * min(1.0, max(0.0, share))),
            enough=enough and not advice.objections,
        )

    columns = [
        Column(
            bytes_text(memory) if memory else "no\noffloading",
            [cell(router, index, memory) for router in found],
        )
        for index, memory in enumerate(setup.memories())
    ]
    return Table(
        "Routers and memory" if is_first else "",
        title,
        "router",
        list(found),
        [columns],
        kind="heat",
        is_detail=not is_first,
    )


def _routers(advice: Advice) -> Table:
    """Return the routers, all else as in the fleet that is enough."""
    case, found = advice.case, {router: advice.like(router=router) for router in routers(advice)}
    known = {router: result for router, result in found.items() if result is not None}
    results = list(known.values())
    columns = [
        column("tokens\nhit", [percent_text(one.token_hit_ratio) for one in results], first=True)
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
    title = f"with {deployed_text(case)}" if case.offloads else "without offloading"
    heading = "First tokens and balance"
    return Table(heading, title, "router", list(known), [columns], case.router, kind="bars")


def _bars(title: str, values: Sequence[float], texts: Sequence[str]) -> Column:
    """Return a column with a bar for each value, as long as its share of the greatest."""
    longest = max(values) or 1.0
    pairs = zip(texts, values, strict=True)
    cells = [TableCell(text, bar=round(one / longest, 3)) for text, one in pairs]
    return Column(title, cells, first=True)
