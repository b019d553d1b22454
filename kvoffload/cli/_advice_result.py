"""The advice as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import click

from kvoffload.advise import Advice
from kvoffload.advise.answer import column
from kvoffload.advise.configuration import python_text, vllm_arguments
from kvoffload.advise.details import Details
from kvoffload.advise.economy import Engine, balance
from kvoffload.advise.findings import findings
from kvoffload.advise.remarks import NOT_MODELLED, remarks
from kvoffload.advise.retention import or_none
from kvoffload.advise.setup import Case
from kvoffload.advise.subject import Subject
from kvoffload.advise.tables import tables
from kvoffload.advise.units import bytes_text
from kvoffload.advise.verdicts import DOES_NOT_PAY, headline
from kvoffload.advise.wording import tier_text
from kvoffload.replay import Result

from ._fields import Row
from ._fields import as_object as row_object
from ._model_options import groups_object
from ._terminal import print_prose, print_tables

OF_DISK = ("asked", "host_hits", "tier_hits", "stored", "tier_stored", "hit_ratio")
"""The counts of a disk that JSON has."""

OF_CASE = (
    *("token_hit_ratio", "missed_p50", "missed_p95", "honest_hit_ratio", "liar_hit_ratio"),
    *("saved", "ttft_p50", "ttft_p95", "ttft_p95_error", "ttft_mean", "imbalance"),
)
"""The figures of a case that JSON has."""


def as_object(subject: Subject) -> dict[str, object]:
    """Return the advice as ``--json`` prints it, without what it prints of every result."""
    setup = subject.setup
    own = _fleet_object if setup.engines else _engine_object
    return {
        **asdict(subject.advice.facts),
        "model": None if subject.model is None else subject.model.name,
        "block_tokens": setup.block_tokens,
        "block_tokens_from": subject.block_tokens_from,
        "block_bytes": setup.block_bytes,
        "memory": setup.memory,
        "device_memory": setup.device_memory,
        "device_memory_assumed": setup.device_is_assumed,
        **own(subject),
        "headline": headline(subject),
        "findings": [asdict(finding) for finding in findings(subject)],
        "knee": None if subject.knee is None else asdict(subject.knee),
        "changes": None if subject.since is None else asdict(subject.since),
    }


def _engine_object(subject: Subject) -> dict[str, object]:
    advice, setup = subject.advice, subject.setup
    policy, is_plain = advice.policy, setup.chunks.is_plain
    configuration = None
    if policy is not None:
        slots = setup.capacity(setup.memory)
        configuration = {
            "python": python_text(policy, slots, setup.block_tokens),
            "vllm": vllm_arguments(policy, setup.memory, setup.chunks, subject.disk()),
            **({} if is_plain else {"vllm_argument": subject.vllm_flag()}),
        }
    retentions = [
        asdict(cell) | {"interval": or_none(cell.interval)} for cell in subject.retentions
    ]
    return {
        "asked": advice.vllm_default.asked,
        "full_blocks": setup.full_blocks,
        "token_bytes": setup.token_bytes if is_plain else None,
        **groups_object(setup.chunks),
        "step_tokens": setup.step_tokens,
        "device_hit_ratio": advice.device_hit_ratio,
        **_recommendation(advice),
        "configuration": configuration,
        "engine": _engine(setup.rates),
        "unbounded_hit_ratio": advice.unbounded,
        "unbounded_is_ceiling": advice.unbounded_is_ceiling,
        "memories": _memories(advice),
        "without_device_memory": None
        if not subject.by_device
        else {**_recommendation(subject.by_device[0]), "memories": _memories(subject.by_device[0])},
        "by_device_memory": [
            {
                "device_memory": one.setup.device_memory,
                "device_hit_ratio": one.device_hit_ratio,
                **_recommendation(one),
                **_memory(one, one.setup.memory),
            }
            for one in subject.by_device
        ],
        "details": None if subject.details is None else _details(subject.details),
        **({} if is_plain else {"retentions": retentions}),
    }


def _recommendation(advice: Advice) -> dict[str, object]:
    """Return whether offloading pays, the recommended policy, or why there is none."""
    return {
        "pays": "unknown" if advice.pays is None else advice.pays,
        "recommendation": advice.policy,
        "objections": advice.objections or [DOES_NOT_PAY] * (advice.pays is False),
    }


def _details(details: Details) -> dict[str, object]:
    """Return the details; of a disk's counts, its hits and what was written."""
    cells = []
    for cell in details.disk_cells:
        names = [field.name for field in fields(cell) if field.name != "counts"]
        counts = {name: getattr(cell.counts, name) for name in OF_DISK}
        cells.append({name: getattr(cell, name) for name in names} | {"counts": counts})
    return {**asdict(replace(details, disk_cells=[])), "disk_cells": cells}


def _engine(engine: Engine | None) -> dict[str, object] | None:
    if engine is None:
        return None
    chip = engine.accelerator
    return {
        "accelerator": None if chip is None else chip.name,
        "source": None if chip is None else chip.source,
        "workers": engine.workers,
        "prefill_tokens_per_second": engine.prefill_rate or None,
        "prefill_given": engine.prefill_given,
        "link_bandwidth": engine.link_bandwidth or None,
        "link_given": engine.link_given,
    }


def _memories(advice: Advice) -> list[dict[str, object]]:
    return [_memory(advice, memory) for memory in advice.setup.memories()]


def _memory(advice: Advice, memory: int) -> dict[str, object]:
    choice = advice.choices[memory]
    return {
        "memory": memory,
        "capacity": advice.setup.capacity(memory),
        "best_possible_hit_ratio": advice.ceilings[memory],
        "best": choice.best,
        "choice": choice.policy,
        "policies": {
            policy: _result(advice, advice.of(policy, memory))
            | {"behind": choice.behind[policy], "noise": choice.noise[policy]}
            for policy in advice.setup.policies
        },
    }


def _result(advice: Advice, result: Result) -> dict[str, object]:
    """Return the figures of a policy in one memory; null what is not known.

    Slots loaded are there only with groups, and hit ratios apart only if some sessions lie.
    """
    engine = advice.setup.rates
    found: dict[str, object] = {
        "hit_ratio": result.hit_ratio,
        "saved_tokens": result.offloaded_tokens,
        "stored": result.stored,
        "stored_per_hit": advice.stored_per_hit(result),
        **{f"{name}_rate": rate for name, rate in advice.rates(result)._asdict().items()},
    }
    if not advice.setup.chunks.is_plain:
        found["loaded"] = result.loaded
    if result.liar_hit_ratio is not None:
        found |= {name: getattr(result, name) for name in ("honest_hit_ratio", "liar_hit_ratio")}
    if engine is None:
        times = ("prefill_seconds", "load_seconds", "store_seconds", "net_seconds")
        return found | dict.fromkeys(times)
    one = balance(advice.setup, result, engine)
    return found | asdict(one) | {"net_seconds": one.net_seconds}


def _fleet_object(subject: Subject) -> dict[str, object]:
    advice, setup, case = subject.advice, subject.setup, subject.advice.case
    arguments = vllm_arguments(case.policy, case.memory, setup.chunks)
    engine = setup.engine
    return {
        "unbounded_hit_ratio": advice.reuse,
        "engines": setup.engines,
        "loop": setup.loop,
        "prefill_tokens_per_second": setup.rate,
        "prefill_given": None if engine is None else engine.prefill_given,
        "link_bandwidth": setup.link,
        "tier_bandwidth": setup.tier_bandwidth,
        "prices": None if setup.prices is None else asdict(setup.prices),
        "pays": "unknown" if advice.pays is None else advice.pays,
        "recommendation": None if advice.objections else _case(advice, case),
        "best": _case(advice, advice.best),
        "objections": list(advice.objections),
        "configuration": {"vllm": arguments} if advice.policy is not None else None,
        "not_modelled": NOT_MODELLED,
        "results": [
            {
                **_row(case, result),
                "memory": case.memory,
                "tier_memory": case.tier.memory if case.tier else None,
            }
            for case, result in advice.rows.items()
        ],
    }


def _row(case: Case, result: Result) -> Mapping[str, Any]:
    return row_object(Row(result.configuration, result, bytes_text(case.memory)))


def _case(advice: Advice, case: Case) -> dict[str, Any]:
    found = _row(case, advice.rows[case])
    return {
        "router": case.router,
        "policy": case.policy if case.offloads else None,
        "memory": case.memory,
        "tier": None if case.tier is None else tier_text(case.tier),
        "tier_memory": None if case.tier is None else case.tier.memory,
        **{name: found[name] for name in OF_CASE},
    }


def print_answer(answer: Subject) -> None:
    """Print the verdict, the tables, the findings, the remarks, and what to paste."""
    print_prose(headline(answer))
    above = [answer.name, answer.trace_text(), answer.memory_text()]
    for table in tables(answer):
        click.echo()
        chosen = None if table.kind else table.chosen  # else a cell has the mark
        rows = [f"{name} *" if name == chosen else name for name in table.rows]
        leading = [column(table.name, rows, numeric=False)]
        print_tables([*above, table.title], leading, table.groups)
        above = []
    for finding in findings(answer):
        click.echo()
        print_prose(f"{finding.title}: {finding.text}", "  ")
    click.echo()
    for remark in remarks(answer):
        print_prose(remark)
    for snippet in answer.snippets():
        click.echo(f"\n{snippet.title}:\n")
        click.echo(textwrap.indent(snippet.text, "    "))
