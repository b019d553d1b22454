"""Phrases that the verdict, the findings and the tables share."""

from __future__ import annotations

from collections import Counter

from kvoffload.replay import Result
from kvoffload.replay.groups import GroupChunks
from kvoffload.replay.results import ERROR_PARTS

from .accelerators import SHARE_OF_LINK, SHARE_OF_PEAK
from .advice import LEAST_SECONDS, Facts
from .choice import LEAST_NOISE, POLICIES, p95_error
from .details import SECONDS_PER_DAY
from .economy import Engine
from .model_shape import ModelShape
from .setup import Case, FleetTier, Setup
from .units import bytes_text, count_text, duration_text, latency_text, rate_text

__all__ = [
    "assumed_workers_text",
    "case_text",
    "each_text",
    "fits_text",
    "gpu_text",
    "noise_text",
    "p95_text",
    "points",
    "prompt_text",
    "rates_text",
    "tier_text",
    "workers_text",
]


PROMPT_TOKENS = 8192
"""Tokens of the prompt whose slots `prompt_text` counts."""


def points(difference: float) -> str:
    """Return a difference of two hit ratios in points, hundredths of the blocks or tokens."""
    text = f"{difference * 100:.1f}"
    return "less than 0.1 points" if text == "0.0" and difference > 0 else f"{text} points"


def gpu_text(seconds: float, engine: Engine, span: float) -> str:
    """Return a time that an engine saves as that of its accelerators.

    Over the trace, and per day at its rate if it has times: `span` are its seconds.
    """
    of_all = seconds * engine.workers
    text = f"{duration_text(of_all)} of GPU time over the trace"
    if span < LEAST_SECONDS:
        return text
    return f"{text}, {duration_text(of_all / span * SECONDS_PER_DAY)} a day at its rate"


def rates_text(engine: Engine) -> str:
    """Return the rates that the times are based on, and their origin."""
    prefill = f"prefill {count_text(round(engine.prefill_rate))} tokens/s"
    link = f"link {rate_text(engine.link_bandwidth)} each way"
    if engine.accelerator is None or (engine.prefill_given and engine.link_given):
        return f"Times: {prefill} and {link}, as given."
    share, part = f"{SHARE_OF_PEAK * 100:g} %", f"{SHARE_OF_LINK * 100:g} %"
    source = f"the data sheet, {engine.accelerator.source}"
    if engine.prefill_given:
        return f"Times: {prefill} as given; {link}, estimated as {part} of {source}."
    if engine.link_given:
        return f"Times: {link} as given; {prefill}, estimated as {share} of the peak of {source}."
    return (
        f"Times are estimated: {prefill}, {share} of the peak, and {link}, {part} of the nominal "
        f"rate, of {source}; --prefill-tokens-per-second and --link-bandwidth take measured ones."
    )


def workers_text(engine: Engine | None) -> str:
    """Return whose memory ``cpu_bytes_to_use`` of vLLM's configuration is."""
    workers = 1 if engine is None else engine.workers
    return (
        "vLLM's cpu_bytes_to_use is the memory of all workers of an engine together, not of each: "
        f"of {workers} here, --tensor-parallel {workers}."
    )


def assumed_workers_text(engine: Engine | None, model: ModelShape | None) -> list[str]:
    """Return that a number of accelerators was chosen to hold the model, if it was."""
    if engine is None or model is None or engine.workers == 1 or engine.workers_given:
        return []
    return [
        f"{engine.name} per engine, to hold {model.name}; --tensor-parallel sets another number."
    ]


def fits_text(setup: Setup, facts: Facts) -> str:
    """Return that an assumed cache on the accelerator holds the whole trace; else nothing."""
    nbytes = facts.unique_blocks * setup.block_bytes
    if not setup.device_is_assumed or not setup.chunks.is_plain or nbytes > setup.device_memory:
        return ""
    return (
        f" All blocks of this trace, {bytes_text(nbytes)}, fit into the cache assumed on each "
        "accelerator; those of more traffic may not."
    )


def noise_text() -> str:
    """Return how a policy is chosen, with the definition of noise."""
    lru, density = POLICIES
    return (
        f"{density} is recommended, or {lru} where it is at most {points(LEAST_NOISE)} behind; any "
        "other policy must be ahead of both by more than noise. Noise: half of the 98 % confidence "
        f"interval of a difference over {ERROR_PARTS} consecutive parts of the trace, at least "
        f"{points(LEAST_NOISE)}."
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
