"""The advice on a fleet as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvoffload.advise.configuration import vllm_arguments
from kvoffload.advise.fleet_subject import FleetSubject
from kvoffload.advise.fleet_wording import NOT_MODELLED, tier_text
from kvoffload.advise.fleets import FleetCase
from kvoffload.advise.units import bytes_text
from kvoffload.replay.groups import GroupChunks

from ._fields import Row, as_object

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
        "requests": advice.facts.requests,
        "input_tokens": advice.facts.input_tokens,
        "blocks": advice.facts.blocks,
        "unique_blocks": advice.facts.unique_blocks,
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
        "not_modelled": NOT_MODELLED,
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
