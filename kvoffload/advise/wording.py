"""Phrases that the verdict, the findings and the tables share."""

from __future__ import annotations

from collections import Counter

from kvoffload.replay import Result
from kvoffload.replay.groups import GroupChunks

from .choice import p95_error
from .setup import Case, FleetTier
from .units import bytes_text, latency_text

PROMPT_TOKENS = 8192
"""Tokens of the prompt whose slots `prompt_text` counts."""


def points(difference: float) -> str:
    """Return a difference of two hit ratios in points, hundredths of the blocks or tokens."""
    text = f"{difference * 100:.1f}"
    return "less than 0.1 points" if float(text) == 0 and difference else f"{text} points"


def tier_text(tier: FleetTier | None) -> str:
    """Return a tier in words."""
    if tier is None:
        return "no tier"
    kind = "shared by all" if tier.kind == "shared" else "of each engine's own"
    return f"a tier of {bytes_text(tier.memory)} {kind}, {tier.policy}"


def each_text(memory: int) -> str:
    """Return the host memory of each engine in words."""
    return f"{bytes_text(memory)} each" if memory else "no offloading"


def deployed_text(case: Case) -> str:
    """Return what each engine of a fleet has, in words."""
    behind = "" if case.tier is None else f" and {tier_text(case.tier)}"
    return f"{case.policy} in {each_text(case.memory)}{behind}"


def p95_text(result: Result) -> str:
    """Return the 95th percentile of first tokens with its error."""
    return f"{latency_text(result.ttft_p95 or 0)} ± {latency_text(p95_error(result))}"


def percentiles_text(p50: str, p95: str) -> str:
    """Return two percentiles, each with its name."""
    return f"{p50} (median) and {p95} (95th percentile)"


def busiest_text(result: Result) -> str:
    """Return how much the busiest engine computes."""
    return f"The busiest engine computes {result.imbalance:.2f} times the mean"


def case_text(case: Case) -> str:
    """Return a fleet in words."""
    if not case.offloads:
        return f"{case.router}, {each_text(0)}"
    text = f"{case.router}, {case.policy}, {each_text(case.memory)}"
    return text if case.tier is None else f"{text}, {tier_text(case.tier)}"


def prompt_text(groups: GroupChunks) -> str:
    """Return the slots that a prompt takes, and those of its windows and states, in words."""
    length = max(PROMPT_TOKENS, *groups.chunk_tokens)
    kinds = [group.kind for group in groups.layout.groups]
    indexes = {index for call in groups.offers(length, 0, 0) for index in call}
    slots = Counter(kinds[index.group] for index in indexes)
    texts = [str(slots["full"] + slots["chunked"])]
    for kind in ("window", "state"):
        count = kinds.count(kind)
        if count:
            texts.append(f"{slots[kind]} for its {kind}{'s' if count > 1 else ''}")
    if not slots["full"] + slots["chunked"]:
        texts = texts[1:]
    return f"a prompt of {length:,} tokens takes {', and '.join(texts)}"
