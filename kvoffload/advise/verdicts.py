"""The verdict on offloading: the first sentence of an advice, and its short forms."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.replay import Result

from .advice import Advice
from .choice import EVEN, ROUND_ROBIN, saving
from .economy import Balance, Engine, balance
from .setup import VLLM_DEFAULT
from .units import bytes_text, count_text, duration_text, percent_text
from .wording import case_text, each_text, gpu_text, points, tier_text

__all__ = ["best_balance", "headline", "side_by_side", "verdict"]


def headline(advice: Advice) -> str:
    """Return the advice in one sentence: against the default, and against no offloading."""
    setup = advice.setup
    if advice.objections:
        verdict = "Offloading does not pay" if advice.lacks_reuse else "No recommendation"
        return f"{verdict}: {'; '.join(advice.objections)}."
    if setup.engines:
        return _of_fleet(advice) + _lopsided(advice.result)
    result, engine = advice.result, setup.rates
    if not advice.case.offloads:
        return _does_not_pay(advice)
    text = f"Take {advice.policy}: with {bytes_text(setup.memory)} it hits "
    if engine is not None:
        saved = gpu_text(balance(setup, result, engine).net_seconds, engine, advice.facts.seconds)
        text = (
            f"Offloading pays: {advice.policy} in {bytes_text(setup.memory)} saves {saved}. "
            "It hits "
        )
    default = "and it is vLLM's default"
    if advice.policy != VLLM_DEFAULT:
        gained = result.hit_ratio - advice.vllm_default.hit_ratio
        default = f"{_more(gained)} than vLLM's default, {VLLM_DEFAULT}, in the same memory"
    tokens, whole = count_text(result.offloaded_tokens), advice.facts.input_tokens
    if whole and setup.full_blocks:
        share = percent_text(result.offloaded_tokens / whole)
        tokens += f" of {count_text(whole)} prompt tokens ({share})"
    else:
        tokens += " prompt tokens"
    return (
        f"{text}{percent_text(result.hit_ratio)} of the {setup.counted}, {default}; {tokens} skip "
        "prefill thanks to offloading."
    )


def best_balance(advice: Advice, engine: Engine) -> tuple[str, Balance]:
    """Return the policy that saves most time, and its balance."""
    balances = {p: balance(advice.setup, advice.of(p), engine) for p in advice.setup.policies}
    best = max(balances, key=lambda policy: balances[policy].net_seconds)
    return best, balances[best]


def _does_not_pay(advice: Advice) -> str:
    text = f"Offloading does not pay: with {bytes_text(advice.setup.memory)}"
    engine = advice.setup.rates
    if engine is None:
        return f"{text} no policy saves more prefill than moving the blocks takes."
    best, found = best_balance(advice, engine)
    return (
        f"{text} on {engine.name} no policy saves more prefill than moving the blocks takes; "
        f"{best}, the best, saves {duration_text(found.prefill_seconds)} and takes "
        f"{duration_text(found.moving_seconds)}. So no policy is recommended."
    )


def _of_fleet(advice: Advice) -> str:
    case, setup, result = advice.case, advice.setup, advice.result
    engines = f"{case.router} in front of {setup.engines:,} engines"
    saved = f"saves {percent_text(saving(result))} of the {setup.saved}"
    none, by_turns = advice.like(memory=0), advice.like(router=ROUND_ROBIN)

    def gained(other: Result) -> float:
        return saving(result) - saving(other)

    text = f"Offloading does not pay: without offloading {engines} {saved}"
    if case.offloads:
        behind = "" if case.tier is None else f" and {tier_text(case.tier)}"
        each = f"{case.policy} in {each_text(case.memory)}{behind}"
        text = f"Take {engines} with {each}: it {saved}"
        if setup.engine is not None and setup.rate is not None and none is not None:
            seconds = gained(none) * result.tokens / setup.rate
            time = gpu_text(seconds, setup.engine, advice.facts.seconds)
            text = f"Offloading pays: {each}, {engines}, saves {time}. It {saved}"
    if by_turns is not None and case.router != ROUND_ROBIN:
        text += f", {_more(gained(by_turns))} than {ROUND_ROBIN}"
    if not case.offloads:
        most = advice.rows[advice.offloading]
        return f"{text}; {case_text(advice.offloading)} would save {_more(-gained(most))}."
    if none is not None:
        text += f", {_more(gained(none))} than without offloading"
    more = [memory for memory in setup.memories() if memory > case.memory]
    twice = advice.like(memory=more[0]) if more else None
    if twice is not None:
        text += f"; twice the memory would save {_more(-gained(twice))}"
    return f"{text}."


def _lopsided(result: Result) -> str:
    """Return how much the busiest engine computes, if that is far from the mean."""
    text = f" The busiest engine computes {result.imbalance:.2f} times the mean."
    return text if result.imbalance > EVEN else ""


def _more(difference: float) -> str:
    return f"{points(abs(difference))} {'more' if difference >= 0 else 'less'}"


def side_by_side(advice: Advice, alone: Advice, shares: Sequence[Advice] = ()) -> str:
    """Return the answers with and without a cache on the accelerator, and what decides."""
    engine = advice.setup.rates
    device = bytes_text(advice.setup.device_memory)
    if advice.setup.device_is_assumed:
        device = f"an assumed {device}"
    where = f" on {engine.name}" if engine is not None and engine.accelerator else ""
    return (
        f"Behind {device} of prefix cache{where}, which serves "
        f"{percent_text(advice.device_hit_ratio)} of the {advice.setup.counted} first: "
        f"{_short(advice)}. Without that cache: {_short(alone)}. "
        f"{_what_decides([alone, *shares, advice])}"
    )


def _what_decides(found: Sequence[Advice]) -> str:
    """Return how the recommendation depends on the accelerator's cache, and how to measure that."""
    verdicts: dict[str, list[str]] = {}
    for one in found:
        size = one.setup.device_memory
        verdicts.setdefault(verdict(one), []).append(bytes_text(size) if size else "no cache")
    if len(verdicts) == 1:
        text = "The recommendation is the same for all compared sizes of that cache"
    else:
        each = (f"{name} with {', '.join(sizes)}" for name, sizes in verdicts.items())
        text = f"The recommendation depends on the size of that cache: {'; '.join(each)}"
    whole = bytes_text(max(one.setup.device_memory for one in found))
    return (
        f"{text}. Running requests share that memory. Give --device-memory what they leave under "
        f"load: {whole} × (1 - vllm:kv_cache_usage_perc)."
    )


def verdict(advice: Advice) -> str:
    """Return the recommendation in a word or two."""
    if advice.policy is not None:
        return advice.policy
    return "does not pay" if advice.pays is False else "none"


def _short(advice: Advice) -> str:
    case, result, default = advice.offloading, advice.result, ""
    hits = f"{percent_text(result.hit_ratio)} of the {advice.setup.counted} asked for"
    if advice.policy is None:
        verdict = "it does not pay" if advice.pays is False else "no recommendation"
        return f"{verdict}, {case.policy} hits {hits}"
    if case.policy != VLLM_DEFAULT:
        difference = result.hit_ratio - advice.vllm_default.hit_ratio
        word = "less" if difference >= 0 else "more"
        default = f" ({VLLM_DEFAULT} {points(abs(difference))} {word})"
    saved = count_text(result.offloaded_tokens)
    return f"{case.policy}, {hits}, {saved} tokens saved{default}"
