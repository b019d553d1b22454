"""The advice on a fleet as text and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

import click

from kvoffload.advise.configuration import vllm_arguments
from kvoffload.advise.fleet_subject import FleetSubject, Heat
from kvoffload.advise.fleet_wording import each_text, p95_text, tier_text
from kvoffload.advise.fleets import FleetCase, saving
from kvoffload.advise.units import bytes_text, latency_text, percent_text
from kvoffload.replay.groups import GroupChunks

from ._fields import Row, as_object, columns
from ._terminal import Column, print_prose, print_tables

OF_CASE = (
    *("token_hit_ratio", "missed_p50", "missed_p95", "honest_hit_ratio", "liar_hit_ratio"),
    *("saved", "ttft_p50", "ttft_p95", "ttft_p95_error", "ttft_mean", "imbalance"),
)
"""The figures of a case that JSON has."""


def fleet_advice_object(subject: FleetSubject) -> dict[str, object]:
    """Return the advice as ``--json`` prints it, without what it prints of every result."""
    advice, setup = subject.advice, subject.advice.setup
    groups = GroupChunks.of_blocks(setup.block_tokens, block_bytes=setup.block_bytes)
    arguments = vllm_arguments(advice.case.fleet.policy, advice.case.memory, groups)
    engine = setup.engine
    return {
        "requests": advice.requests,
        "input_tokens": advice.input_tokens,
        "blocks": advice.blocks,
        "unique_blocks": advice.unique_blocks,
        "unbounded_hit_ratio": advice.reuse,
        "model": None if subject.model is None else subject.model.name,
        "block_tokens": setup.block_tokens,
        "block_tokens_from": subject.block_tokens_from,
        "block_bytes": setup.block_bytes,
        "engines": setup.engines,
        "memory": setup.memory,
        "device_memory": setup.device_memory,
        "device_memory_assumed": setup.device_is_assumed,
        "loop": setup.loop,
        "prefill_tokens_per_second": setup.rate,
        "prefill_given": None if engine is None else engine.prefill_given,
        "link_bandwidth": setup.link,
        "tier_bandwidth": setup.tier_bandwidth,
        "prices": None if setup.prices is None else asdict(setup.prices),
        "pays": "unknown" if advice.pays is None else advice.pays,
        "recommendation": _case(subject, advice.case) if subject.is_recommended else None,
        "best": _case(subject, advice.best),
        "objections": list(advice.objections),
        "headline": subject.headline(),
        "findings": [asdict(finding) for finding in subject.findings()],
        "configuration": {"vllm": arguments} if subject.offloads else None,
        "knee": None if subject.knee is None else asdict(subject.knee),
        "changes": None if subject.since is None else asdict(subject.since),
        "not_modelled": subject.not_modelled,
        "results": [
            {
                **as_object(Row(case.fleet, advice.results[case.fleet], bytes_text(case.memory))),
                "memory": case.memory,
                "tier_memory": case.tier.memory if case.tier else None,
            }
            for case in advice.cases
        ],
    }


def _case(subject: FleetSubject, case: FleetCase) -> dict[str, Any]:
    result = subject.advice.results[case.fleet]
    found = as_object(Row(case.fleet, result, bytes_text(case.memory)))
    return {
        "router": case.fleet.router,
        "policy": case.fleet.policy if case.offloads else None,
        "memory": case.memory,
        "tier": None if case.tier is None else tier_text(case.tier),
        "tier_memory": None if case.tier is None else case.tier.memory,
        **{name: found[name] for name in OF_CASE},
    }


def print_fleet_advice(subject: FleetSubject) -> None:
    """Print the advice: the replay, the tables, the findings, the configuration."""
    print_prose(subject.headline())
    click.echo()
    heats = list(subject.heats())
    _print_heat(subject, heats[0], [subject.name, subject.trace_text(), subject.memory_text()])
    click.echo()
    _print_routers(subject)
    for heat in heats[1:]:
        click.echo()
        _print_heat(subject, heat, [])
    for finding in subject.findings():
        click.echo()
        print_prose(f"{finding.title}: {finding.text}", "  ")
    click.echo()
    for remark in subject.remarks():
        print_prose(remark)
    vllm = subject.vllm_text()
    if vllm is not None:
        click.echo("\nvLLM, each engine, --kv-transfer-config:\n")
        click.echo(textwrap.indent(vllm, "    "))


def _print_heat(subject: FleetSubject, heat: Heat, title: list[str]) -> None:
    advice = subject.advice
    tiers = f", {tier_text(heat.tier)}" if len(advice.setup.tiers) > 1 else ""
    title.append(f"{advice.setup.saved} saved with {heat.policy}{tiers}, by memory of each engine")

    def text(name: str, index: int) -> str:
        result, memory = heat.rows[name][index], advice.setup.memories()[index]
        is_enough = subject.is_recommended and subject.is_enough(heat, name, memory)
        mark = " *" if is_enough else ""
        return "-" if result is None else f"{percent_text(saving(result))}{mark}"

    columns = [
        Column(
            bytes_text(memory) if memory else "no\noffloading",
            [text(name, index) for name in heat.rows],
        )
        for index, memory in enumerate(advice.setup.memories())
    ]
    print_tables(title, [Column("router", list(heat.rows), numeric=False)], [columns])


def _print_routers(subject: FleetSubject) -> None:
    """Print the results of each router with the policy, memory and tier that are enough."""
    advice = subject.advice
    found = {name: advice.like(router=name) for name in subject.routers()}
    rows = [Row(one.configuration, one, "") for one in found.values() if one is not None]
    results = [row.result for row in rows]
    shown = columns(rows, "token_hit_ratio", "missed_p50", "missed_p95")
    shown += columns(rows, "honest_hit_ratio", "liar_hit_ratio")
    if advice.setup.rate is not None:
        shown += [
            Column("first token\np50", [latency_text(one.ttft_p50 or 0) for one in results]),
            Column("\np95", [p95_text(one) for one in results]),
            *columns(rows, "busy"),
        ]
    shown += columns(rows, "imbalance")
    title = "without offloading"
    if advice.case.offloads:
        title = f"with {advice.case.fleet.policy} in {each_text(advice.case.memory)}"
    if advice.case.tier is not None:
        title += f" and {tier_text(advice.case.tier)}"
    print_tables([title], columns(rows, "router"), [shown])
