"""The verdict on offloading: the first sentence of an advice, and its short forms."""

from __future__ import annotations

from kvoffload._printable import plural
from kvoffload.replay import Result

from .advice import LEAST_SECONDS, Advice
from .choice import EVEN, ROUND_ROBIN, saving
from .details import SECONDS_PER_DAY
from .economy import Balance, Engine, balance
from .setup import VLLM_DEFAULT
from .subject import Subject
from .units import bytes_text, count_text, duration_text, percent_text
from .wording import busiest_text, case_text, deployed_text, points

DOES_NOT_PAY = "no policy saves more prefill than moving the blocks takes"
"""The reason not to offload, if rates are known."""


def headline(subject: Subject) -> str:
    """Return the advice in a sentence or two: against the default, and against no offloading."""
    advice, setup = subject.advice, subject.setup
    if advice.objections:
        answer = "No recommendation" if advice.pays is None else "Offloading does not pay"
        text = f"{answer}: {'; '.join(advice.objections)}."
    elif setup.engines:
        text = _of_fleet(advice)
        if advice.result.imbalance > EVEN:
            text += f" {busiest_text(advice.result)}."
    elif advice.case.offloads or setup.rates is None:
        text = _pays(advice)
    else:
        text = _does_not_pay(advice, setup.rates)
    device = bytes_text(setup.device_memory)
    if len({*map(verdict, subject.by_device)}) > 1:
        text += (
            f" This holds with {device} of prefix cache on the accelerator; with less of it the "
            "recommendation differs."
        )
    nbytes = advice.facts.unique_blocks * setup.block_bytes
    fits = setup.device_is_assumed and setup.chunks.is_plain and nbytes <= setup.device_memory
    if fits and advice.policy is None:
        text += (
            f" All blocks of this trace, {bytes_text(nbytes)}, fit into the cache assumed on each "
            "accelerator; those of more traffic may not."
        )
    return text


def _pays(advice: Advice) -> str:
    result, setup, facts = advice.result, advice.setup, advice.facts
    text = f"Take {advice.policy}: with {bytes_text(setup.memory)} it hits "
    if setup.rates is not None:
        seconds = balance(setup, result, setup.rates).net_seconds
        text = (
            f"Offloading pays: {advice.policy} in {bytes_text(setup.memory)} saves "
            f"{_gpu_text(advice, setup.rates, seconds)}. It hits "
        )
    default = "and it is vLLM's default"
    if advice.policy != VLLM_DEFAULT:
        gained = result.hit_ratio - advice.vllm_default.hit_ratio
        default = f"{_more(gained)} than vLLM's default, {VLLM_DEFAULT}, in the same memory"
    tokens, whole = count_text(result.offloaded_tokens), facts.input_tokens
    if whole and setup.full_blocks:
        share = percent_text(result.offloaded_tokens / whole)
        tokens += f" of {count_text(whole)} prompt tokens ({share})"
    else:
        tokens += " prompt tokens"
    return (
        f"{text}{percent_text(result.hit_ratio)} of the {setup.counted}, {default}; {tokens} skip "
        "prefill thanks to offloading."
    )


def _gpu_text(advice: Advice, engine: Engine, seconds: float) -> str:
    """Return a time that an engine saves as that of its accelerators.

    Over the trace, and per day at its rate if it has times.
    """
    of_all, span = seconds * engine.workers, advice.facts.seconds
    text = f"{duration_text(of_all)} of GPU time over the trace"
    if span < LEAST_SECONDS:
        return text
    return f"{text}, {duration_text(of_all / span * SECONDS_PER_DAY)} a day at its rate"


def best_balance(advice: Advice, engine: Engine) -> tuple[str, Balance]:
    """Return the policy that saves most time, and its balance."""
    balances = {p: balance(advice.setup, advice.of(p), engine) for p in advice.setup.policies}
    best = max(balances, key=lambda policy: balances[policy].net_seconds)
    return best, balances[best]


def _does_not_pay(advice: Advice, engine: Engine) -> str:
    best, found = best_balance(advice, engine)
    return (
        f"Offloading does not pay: with {bytes_text(advice.setup.memory)} on {engine.name} "
        f"{DOES_NOT_PAY}; {best}, the best, saves {duration_text(found.prefill_seconds)} and takes "
        f"{duration_text(found.moving_seconds)}. So no policy is recommended."
    )


def _of_fleet(advice: Advice) -> str:
    case, setup, result = advice.case, advice.setup, advice.result
    engines = f"the router {case.router} in front of {plural(setup.engines, 'engine')}"
    saved = f"saves {percent_text(saving(result))} of the {setup.saved}"
    none, without = advice.like(memory=0), "without offloading"
    if none is None:  # a router that sees a tier was not compared without one
        none, without = advice.like(memory=0, router=ROUND_ROBIN), f"{ROUND_ROBIN} {without}"
    by_turns = advice.like(router=ROUND_ROBIN)

    def gained(other: Result) -> float:
        return saving(result) - saving(other)

    text = f"Offloading does not pay: without it, {engines} {saved}"
    if case.offloads:
        each = deployed_text(case)
        text = f"Take {engines} with {each}: it {saved}"
        if setup.engine is not None and setup.rate is not None and none is not None:
            time = _gpu_text(advice, setup.engine, gained(none) * result.tokens / setup.rate)
            text = f"Offloading pays: {each}, {engines}, saves {time}. It {saved}"
    if by_turns is not None and case.router != ROUND_ROBIN:
        text += f", {_more(gained(by_turns))} than {ROUND_ROBIN}"
    if not case.offloads:
        most = advice.rows[advice.offloading]
        return f"{text}; {case_text(advice.offloading)} would save {_more(-gained(most))}."
    if none is not None:
        text += f", {_more(gained(none))} than {without}"
    more = [memory for memory in setup.memories() if memory > case.memory]
    twice = advice.like(memory=more[0]) if more else None
    if twice is not None:
        text += f"; twice the memory would save {_more(-gained(twice))}"
    return f"{text}."


def _more(difference: float) -> str:
    return f"{points(abs(difference))} {'more' if difference >= 0 else 'less'}"


def side_by_side(subject: Subject) -> str:
    """Return the answers by the cache on the accelerator, and how to measure that."""
    advice, setup, found = subject.advice, subject.setup, subject.by_device
    engine, device = setup.rates, bytes_text(setup.device_memory)
    if setup.device_is_assumed:
        device = f"an assumed {device}"
    where = f" on {engine.name}" if engine is not None and engine.accelerator else ""
    verdicts: dict[str, list[str]] = {}
    for one in found:
        size = one.setup.device_memory
        verdicts.setdefault(verdict(one), []).append(bytes_text(size) if size else "no cache")
    text = "The recommendation is the same for all compared sizes of that cache"
    if len(verdicts) > 1:
        each = (f"{name} with {', '.join(sizes)}" for name, sizes in verdicts.items())
        text = f"The recommendation depends on the size of that cache: {'; '.join(each)}"
    whole = bytes_text(max(one.setup.device_memory for one in found))
    return (
        f"Behind {device} of prefix cache{where}, which serves "
        f"{percent_text(advice.device_hit_ratio)} of the {setup.counted} first: {_short(advice)}. "
        f"Without that cache: {_short(found[0])}. {text}. Running requests share that memory. Give "
        f"--device-memory what they leave under load: {whole} × (1 - vllm:kv_cache_usage_perc)."
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
