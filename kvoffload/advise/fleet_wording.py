"""Advice on a fleet in sentences, which the command and the page share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload.replay import Result

from .fleets import BUSY, ENOUGH, ROUND_ROBIN, SLOWER, FleetAdvice, FleetCase, p95_error, saving
from .setup import FleetTier
from .units import bytes_text, latency_text, percent_text
from .wording import Finding, gpu_text, objections_text, points

__all__ = [
    "NOT_MODELLED",
    "case_text",
    "each_text",
    "fleet_findings",
    "fleet_headline",
    "p95_text",
    "tier_text",
]

NOT_MODELLED = (
    "Simplifications: an engine computes one prompt at a time, without chunks, batches, preemption "
    "or slower decoding; running requests take no accelerator memory; links are not shared; "
    "stores, routing, tokenizing and the network take no time; nothing fails, scales or fetches "
    "from its peers. Times compare designs and do not predict milliseconds; differences of .01 "
    "between routers are noise."
)


def tier_text(tier: FleetTier | None) -> str:
    """Return a tier in words."""
    if tier is None:
        return "no tier"
    kind = "shared by all" if tier.kind == "shared" else "of each engine's own"
    return f"a tier of {bytes_text(tier.memory)} {kind}, {tier.policy}"


def each_text(memory: int) -> str:
    """Return the host memory of each engine in words."""
    return f"{bytes_text(memory)} each" if memory else "no offloading"


def p95_text(result: Result) -> str:
    """Return the 95th percentile of first tokens with its error."""
    return f"{latency_text(result.ttft_p95 or 0)} ± {latency_text(p95_error(result))}"


def case_text(case: FleetCase) -> str:
    """Return a fleet in words."""
    if not case.offloads:
        return f"{case.fleet.router}, {each_text(0)}"
    text = f"{case.fleet.router}, {case.fleet.policy}, {each_text(case.memory)}"
    return text if case.tier is None else f"{text}, {tier_text(case.tier)}"


def fleet_headline(advice: FleetAdvice) -> str:
    """Return the advice in one sentence."""
    if advice.objections:
        return objections_text(advice.objections, lacks_reuse=advice.lacks_reuse)
    case, setup = advice.case, advice.setup
    engines = f"{case.fleet.router} in front of {setup.engines:,} engines"
    saved = f"saves {percent_text(saving(advice.result))} of the {setup.saved}"
    none = advice.like(memory=0)
    if case.offloads:
        behind = "" if case.tier is None else f" and {tier_text(case.tier)}"
        each = f"{case.fleet.policy} in {each_text(case.memory)}{behind}"
        text = f"Take {engines} with {each}: it {saved}"
        if setup.engine is not None and setup.rate is not None and none is not None:
            gained = (saving(advice.result) - saving(none)) * advice.result.tokens / setup.rate
            time = gpu_text(gained, setup.engine, advice.facts.seconds)
            text = f"Offloading pays: {each}, {engines}, saves {time}. It {saved}"
    else:
        text = f"Offloading does not pay: without offloading {engines} {saved}"
    by_turns = advice.like(router=ROUND_ROBIN)
    if by_turns is not None and case.fleet.router != ROUND_ROBIN:
        text += f", {_more(saving(advice.result) - saving(by_turns))} than {ROUND_ROBIN}"
    if not case.offloads:
        most = advice.results[advice.offloading.fleet]
        text += (
            f"; {case_text(advice.offloading)} would save "
            f"{_more(saving(most) - saving(advice.result))}"
        )
        return f"{text}."
    if none is not None:
        text += f", {_more(saving(advice.result) - saving(none))} than without offloading"
    memories = setup.memories()
    more = memories[memories.index(case.memory) + 1 :]
    twice = advice.like(memory=more[0]) if more else None
    if twice is not None:
        text += f"; twice the memory would save {_more(saving(twice) - saving(advice.result))}"
    return f"{text}."


def _more(difference: float) -> str:
    return f"{points(abs(difference))} {'more' if difference >= 0 else 'less'}"


def fleet_findings(advice: FleetAdvice) -> list[Finding]:
    """Return the findings, the most important first."""
    setup, offloads = advice.setup, advice.case.offloads
    routers = {case.fleet.router: case.fleet.router for case in advice.cases}
    tiers = {tier: f"{tier_text(tier)}:" for tier in setup.tiers}
    policies = {policy: policy for policy in setup.policies}
    found = [
        Finding("Enough", _enough(advice)),
        Finding(
            "Router", f"With the same policy and memory: {_savings(advice, 'router', routers)}."
        ),
        Finding("Memory", _memory(advice)),
    ]
    if offloads and len(setup.tiers) > 1:
        text = f"With the same router, policy and memory, {_savings(advice, 'tier', tiers, '; ')}."
        found.append(Finding("Tier", text))
    if offloads and len(setup.policies) > 1:
        text = f"With the same router and memory: {_savings(advice, 'policy', policies)}."
        found.append(Finding("Policy", text))
    if setup.rate:
        found.append(Finding("First token", _first_token(advice)))
    ceiling = (
        f"A cache without bounds would hit {percent_text(advice.reuse)} of the blocks; the fleet "
        f"hits {percent_text(advice.result.hit_ratio)}."
    )
    return [*found, Finding("Balance", _balance(advice)), Finding("Ceiling", ceiling)]


def _savings(advice: FleetAdvice, part: str, texts: Mapping[Any, str], between: str = ", ") -> str:
    """Return what the fleet that is enough saves with each of some values of a part of it."""
    results = {text: advice.like(**{part: value}) for value, text in texts.items()}
    found = [(text, saving(result)) for text, result in results.items() if result is not None]
    if part == "router":  # the best first
        found.sort(key=lambda pair: -pair[1])
    return between.join(f"{text} {percent_text(saved)}" for text, saved in found)


def _enough(advice: FleetAdvice) -> str:
    best = advice.best
    cheapest = (
        "least host memory, then the smallest tier,"
        if advice.setup.prices is None
        else "lowest price"
    )
    times = (
        f", with 95 % of its first tokens, error added, within {SLOWER:g} times the least time,"
        if advice.setup.rate
        else ""
    )
    return (
        f"The best of {len(advice.candidates):,} fleets is {case_text(best)}: it saves "
        f"{percent_text(saving(advice.results[best.fleet]))} of the {advice.setup.saved}. A fleet "
        f"within {points(ENOUGH)} of it{times} is enough; the one with the {cheapest} is taken."
    )


def _memory(advice: FleetAdvice) -> str:
    memories = advice.setup.memories()
    sizes = {memory: bytes_text(memory) if memory else each_text(0) for memory in memories}
    text = f"Per engine, behind the same router: {_savings(advice, 'memory', sizes)}."
    if advice.case.memory == memories[1]:
        text += " The smallest memory compared is enough; a smaller --capacity may be, too."
    elif advice.may_need_more:
        text += " The largest memory compared is needed; a larger --capacity may save more."
    return text


def _first_token(advice: FleetAdvice) -> str:
    def within(found: Result) -> str:
        p50 = latency_text(found.ttft_p50 or 0)
        return f"{p50} (median) and {p95_text(found)} (95th percentile)"

    result = advice.result
    text = f"The first token takes {within(result)} from arrival"
    by_turns = advice.like(router=ROUND_ROBIN)
    if by_turns is not None and advice.case.fleet.router != ROUND_ROBIN:
        text += f"; behind {ROUND_ROBIN} {within(by_turns)}"
    return f"{text}. Queueing is included."


def _balance(advice: FleetAdvice) -> str:
    result = advice.result
    text = f"The busiest engine computes {result.imbalance:.2f} times the mean"
    if result.busy is not None:
        text += f"; engines compute prompts {percent_text(result.busy)} of the time"
        if advice.setup.loop == "open" and result.busy >= BUSY:
            text += ": too much for an open loop, whose queues only grow"
    return f"{text}."
