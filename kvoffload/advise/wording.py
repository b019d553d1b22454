"""The findings in sentences, which the command and the report share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoffload.replay.results import ERROR_PARTS

from .accelerators import SHARE_OF_LINK, SHARE_OF_PEAK
from .advice import LEAST_SECONDS, Advice, Cell, Facts
from .choice import LEAST_NOISE, POLICIES, Choice
from .details import LITTLE, SECONDS_PER_DAY, Details, DiskCell, FirstTokens
from .economy import Balance, Engine, balance
from .knee import Knee
from .model_shape import ModelShape
from .retention import RetentionCell, or_none, vllm_flag, worth
from .setup import VLLM_DEFAULT, Setup
from .units import bytes_text, count_text, duration_text, latency_text, percent_text, rate_text

__all__ = [
    "Finding",
    "assumed_workers_text",
    "capacity_text",
    "detail_findings",
    "findings",
    "fits_text",
    "gpu_text",
    "headline",
    "noise_text",
    "objections_text",
    "points",
    "rates_text",
    "side_by_side",
    "verdict",
    "workers_text",
]

FEW_STORES = 0.5
"""Share of the chosen policy's stores up to which one within noise is mentioned."""

MUCH_MORE = 1.1
"""Multiple of the chosen policy's gain in time from which another is mentioned."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding: a title of a word or two, and a text."""

    title: str
    text: str


def points(difference: float) -> str:
    """Return a difference of two hit ratios in points, hundredths of the blocks or tokens."""
    text = f"{difference * 100:.1f}"
    return "less than 0.1 points" if text == "0.0" and difference > 0 else f"{text} points"


def headline(advice: Advice) -> str:
    """Return the advice in one sentence: against vLLM's default, and against no offloading."""
    if advice.pays is False:
        return _does_not_pay(advice)
    if advice.policy is None:
        return objections_text(advice.objections, lacks_reuse=advice.lacks_reuse)
    cell, engine = advice.cell(advice.policy), advice.setup.rates
    text = f"Take {advice.policy}: with {bytes_text(advice.setup.memory)} it hits "
    if engine is not None:
        saved = gpu_text(balance(advice, cell, engine).net_seconds, engine, advice.facts.seconds)
        text = (
            f"Offloading pays: {advice.policy} in {bytes_text(advice.setup.memory)} saves {saved}. "
            "It hits "
        )
    return (
        f"{text}{percent_text(cell.hit_ratio)} of the {advice.setup.counted}, "
        f"{_against_default(advice, cell)}; "
        f"{_saved_tokens(advice, cell)} skip prefill thanks to offloading."
    )


def objections_text(objections: Iterable[str], *, lacks_reuse: bool) -> str:
    """Return why there is no recommendation, or, if nothing could come back, that none pays."""
    verdict = "Offloading does not pay" if lacks_reuse else "No recommendation"
    return f"{verdict}: {'; '.join(objections)}."


def gpu_text(seconds: float, engine: Engine, span: float) -> str:
    """Return a time that an engine saves as that of its accelerators.

    Over the trace, and per day at its rate if it has times: `span` are its seconds.
    """
    of_all = seconds * engine.workers
    text = f"{duration_text(of_all)} of GPU time over the trace"
    if span < LEAST_SECONDS:
        return text
    return f"{text}, {duration_text(of_all / span * SECONDS_PER_DAY)} a day at its rate"


def _against_default(advice: Advice, cell: Cell) -> str:
    """Return how a policy compares with vLLM's default in the same memory."""
    if advice.policy == VLLM_DEFAULT:
        return "and it is vLLM's default"
    difference = cell.hit_ratio - advice.vllm_default.hit_ratio
    word = "more" if difference >= 0 else "less"
    return (
        f"{points(abs(difference))} {word} than vLLM's default, {VLLM_DEFAULT}, in the same memory"
    )


def _saved_tokens(advice: Advice, cell: Cell) -> str:
    saved, whole = count_text(cell.saved_tokens), advice.facts.input_tokens
    if whole and advice.setup.full_blocks:
        return (
            f"{saved} of {count_text(whole)} prompt tokens "
            f"({percent_text(cell.saved_tokens / whole)})"
        )
    return f"{saved} prompt tokens"


def _best_balance(advice: Advice, engine: Engine) -> tuple[str, Balance]:
    """Return the policy that saves most time, and its balance."""
    balances = {p: balance(advice, advice.cell(p), engine) for p in advice.setup.policies}
    best = max(balances, key=lambda policy: balances[policy].net_seconds)
    return best, balances[best]


def _does_not_pay(advice: Advice) -> str:
    text = f"Offloading does not pay: with {bytes_text(advice.setup.memory)}"
    engine = advice.setup.rates
    if engine is None:
        return f"{text} no policy saves more prefill than moving the blocks takes."
    best, found = _best_balance(advice, engine)
    return (
        f"{text} on {engine.name} no policy saves more prefill than moving the blocks takes; "
        f"{best}, the best, saves {duration_text(found.prefill_seconds)} and takes "
        f"{duration_text(found.moving_seconds)}. So no policy is recommended."
    )


def _time(advice: Advice, policy: str, engine: Engine) -> str:
    """Return prefill saved against time on the link, for the policy and for vLLM's default."""
    found = balance(advice, advice.cell(policy), engine)
    text = (
        f"On {engine.name} hits save {duration_text(found.prefill_seconds)} of prefill over the "
        f"trace; loading takes {duration_text(found.load_seconds)} of the link and storing "
        f"{duration_text(found.store_seconds)}: {duration_text(found.net_seconds)} gained."
    )
    best, most = _best_balance(advice, engine)
    if most.net_seconds > MUCH_MORE * found.net_seconds:
        text += f" {best} gains most, {duration_text(most.net_seconds)}."
    if policy != VLLM_DEFAULT:
        default = balance(advice, advice.vllm_default, engine)
        word = "gains" if default.pays else "loses"
        text += (
            f" vLLM's default, {VLLM_DEFAULT}, {word} {duration_text(abs(default.net_seconds))}."
        )
    return text


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


def side_by_side(advice: Advice, alone: Advice, shares: Sequence[Advice] = ()) -> str:
    """Return the answers with and without a cache on the accelerator, and what decides."""
    engine = advice.setup.rates
    device = bytes_text(advice.setup.device_memory)
    if advice.setup.device_is_assumed:
        device = f"an assumed {device}"
    where = f" on {engine.name}" if engine is not None and engine.accelerator else ""
    with_one = _short(advice)
    without = _short(alone)
    share = percent_text(advice.device_hit_ratio)
    return (
        f"Behind {device} of prefix cache{where}, which serves {share} of the "
        f"{advice.setup.counted} first: {with_one}. Without that cache: {without}. "
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
    policy, counted = advice.policy, advice.setup.counted
    if policy is None:
        best = advice.choices[advice.memory_index].best
        hits = f"{best} hits {percent_text(advice.cell(best).hit_ratio)} of the {counted} asked for"
        return f"{'it does not pay' if advice.pays is False else 'no recommendation'}, {hits}"
    cell = advice.cell(policy)
    difference = cell.hit_ratio - advice.vllm_default.hit_ratio
    default = f"{points(abs(difference))} {'less' if difference >= 0 else 'more'}"
    return (
        f"{policy}, {percent_text(cell.hit_ratio)} of the {counted} asked for, "
        f"{count_text(cell.saved_tokens)} tokens saved"
        + ("" if policy == VLLM_DEFAULT else f" ({VLLM_DEFAULT} {default})")
    )


def capacity_text(knee: Knee, setup: Setup) -> str:
    """Return where the knee of the hits over memory lies, and how certain that is.

    With several engines the curve is of one cache of all of them.
    """
    rung, memory, behind = knee.rung, bytes_text(knee.memory), ""
    if setup.device_is_assumed:
        behind = " without the accelerator's own cache, which was only assumed"
    elif setup.engines > 1 and setup.device_memory:
        behind = " behind one accelerator's own cache"
    if knee.is_shown:
        text = (
            f"{memory} is the knee of the hits over memory: from there on twice the memory gains "
            "less than a point"
        )
    else:
        text = (
            "the trace does not show the knee of the hits over memory, because in its first half "
            f"nothing is evicted from more than {memory}; record for longer, or give --capacity"
        )
    text = (
        f"--capacity auto: {text}. There {rung.policy} hits {percent_text(rung.hit_ratio)}"
        f"{behind}, and twice the memory would gain {rung.gain * 100:.1f} ± "
        f"{rung.error * 100:.1f} points"
    )
    if knee.least < knee.most:
        low, high = bytes_text(knee.least), bytes_text(knee.most)
        text += f"; within the curve's error the knee lies between {low} and {high}"
    if setup.engines > 1:
        each = bytes_text(knee.memory / setup.engines)
        text += f". That is of one cache of all engines: {each} each"
    return f"{text}."


def _first_token(advice: Advice, found: Details) -> str:
    """Return how long prompts take, and what offloading saves of that."""
    engine = advice.setup.rates
    *policies, without = found.first_tokens
    first = policies[0]

    def within(one: FirstTokens) -> str:
        return f"{latency_text(one.p50)} (median) and {latency_text(one.p95)} (95th percentile)"

    text = (
        f"On {engine.name if engine else 'the engine'} loading and computing a prompt takes "
        f"{within(first)} with {first.policy} instead of {within(without)} without offloading, "
        f"{latency_text(without.p50 - first.p50)} and {latency_text(without.p95 - first.p95)} less"
    )
    for one in policies[1:]:
        text += f"; {within(one)} with {one.policy}, vLLM's default"
    computed = " instead of ".join(
        f"{one.missed_p50:,} (median) and {one.missed_p95:,} (95th percentile)"
        for one in (first, without)
    )
    text += f". {computed} of its tokens are computed"
    return f"{text}. Queueing is not included; kvoffload advise --engines adds it."


def findings(
    advice: Advice,
    alone: Advice | None = None,
    found: Details | None = None,
    retentions: Sequence[RetentionCell] = (),
    *,
    shares: Sequence[Advice] = (),
) -> list[Finding]:
    """Return the findings, the most important first.

    Without a recommendation, only those that hold for every policy.
    """
    policy, engine = advice.policy, advice.setup.rates
    accelerator = [Finding("Accelerator", side_by_side(advice, alone, shares))] if alone else []
    retention = [Finding("Retention", _retention(advice, retentions))] if retentions else []
    if policy is None:
        return [
            *retention,
            *accelerator,
            *([Finding("More memory", _memory_that_pays(advice))] if advice.pays is False else []),
            Finding("Ceiling", _ceiling_of_all(advice)),
        ]
    return [
        Finding("Reason", _reason(advice, policy)),
        *([Finding("Time", _time(advice, policy, engine))] if engine else []),
        *retention,
        *accelerator,
        *_fewer_stores(advice, policy),
        Finding("More memory", _more_memory(advice, policy)),
        Finding("Ceiling", _ceiling(advice, policy)),
        Finding("Traffic", _traffic(advice, policy)),
        *(detail_findings(advice, found) if found else []),
    ]


def _retention(advice: Advice, cells: Sequence[RetentionCell]) -> str:
    """Return the hits at several retention intervals, and the argument that gains a point."""
    setup = advice.setup
    given = setup.chunks.retention
    policy = advice.policy or advice.choices[advice.memory_index].best
    hits = ", ".join(f"{percent_text(c.hit_ratio)} at {or_none(c.interval)}" for c in cells)
    text = (
        "A prompt with windows or states can be resumed only at its end (0, vLLM's default), "
        f"also at every multiple of an interval, or everywhere (none). With {policy} "
        f"{bytes_text(setup.memory)} hit {hits}"
    )
    if setup.device_memory:
        both = ", ".join(percent_text(cell.served) for cell in cells)
        text += f"; with the accelerator's own cache both have {both} of all tokens"
    best = worth(cells, given)
    if best is None:
        return f"{text}. None of these gains a point over {or_none(given)}."
    now = next(cell for cell in cells if cell.interval == given)
    return (
        f"{text}. {or_none(best.interval)} gains {points(best.served - now.served)}: "
        f"vllm serve {vllm_flag(best.interval)}."
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


def _memory_that_pays(advice: Advice) -> str:
    """Return the other memories in which a policy pays."""
    texts = [
        f"{choice.policy} with {bytes_text(memory)}"
        for memory, choice, paying in zip(
            advice.memories, advice.choices, advice.paying or (), strict=True
        )
        if paying
    ]
    if not texts:
        return "No policy pays in any memory that was compared."
    return f"It pays in other memories: {'; '.join(texts)}."


def _ceiling_of_all(advice: Advice) -> str:
    """Return the ceiling of all caches."""
    ideal, counted = percent_text(advice.unbounded), advice.setup.counted
    if not advice.setup.device_memory:
        return f"A cache without bounds would hit {ideal} of the trace's {counted}."
    behind = (
        f"A cache without bounds would hit {ideal} of the {counted} that the accelerator's own "
        "cache lacks; "
    )
    if not advice.setup.chunks.is_plain:  # the accelerator's cache may resume at more places
        return f"{behind}without that cache it would hit {percent_text(advice.reuse)} of all."
    return f"{behind}{percent_text(advice.reuse)} of all {counted} are reuse."


def _reason(advice: Advice, policy: str) -> str:
    choice = advice.choices[advice.memory_index]
    left_out = [p for p in advice.ranking() if p not in choice.candidates]
    if not left_out:
        return _reason_among(advice, choice, policy)
    pronoun = "it is" if len(left_out) == 1 else "they are"
    text = (
        f"With {', '.join(left_out)} moving blocks takes longer than the prefill that is saved, so "
        f"{pronoun} left out"
    )
    hits_more = choice.behind[left_out[0]] < 0
    if hits_more:
        text += f", though {left_out[0]} hits {percent_text(advice.cell(left_out[0]).hit_ratio)}"
    if len(choice.candidates) == 1:
        return f"{policy} is the only policy that pays. {text}."
    among = "Of the policies that pay: " if hits_more else ""
    return f"{among}{_reason_among(advice, choice, policy)} {text}."


def _reason_among(advice: Advice, choice: Choice, policy: str) -> str:
    """Return why the policy was chosen from the candidates."""
    if len(choice.candidates) == 1:
        return "It is the only policy that was compared."
    usual = [p for p in POLICIES if p in choice.candidates]
    ahead = {p: choice.behind[p] - choice.behind[policy] for p in choice.candidates}
    if policy not in usual:
        if not usual:
            return "It hits most."
        leads = " and ".join(f"{points(ahead[p])} ahead of {p}" for p in usual)
        return f"It is {leads}, which is more than noise."
    found = []
    if len(usual) > 1:
        (other,) = (p for p in usual if p != policy)
        by = points(abs(ahead[other]))
        if policy != POLICIES[0]:
            found.append(f"It hits more than {other}, which is {by} behind.")
        elif ahead[other] < 0:
            found.append(
                f"It is {by} behind {other}, which is too little to notice, and the simpler."
            )
        else:
            found.append(f"It hits at least as much as {other}.")
    more = [p for p in advice.ranking() if p in choice.candidates and ahead[p] < 0]
    more = [p for p in more if p not in usual]
    if more:
        leads = ", ".join(f"{p} {points(-ahead[p])}" for p in more)
        found.append(f"Ahead of it, but not of both by more than noise: {leads}.")
    return " ".join(found) or "No other policy is ahead of it by more than noise."


def _fewer_stores(advice: Advice, policy: str) -> list[Finding]:
    """Return a sentence on the policy within noise that stores much less, if there is one."""

    def stored(name: str) -> float:
        cell = advice.cell(name)
        return (cell.stored_per_hit or 0.0) * cell.hit_ratio

    least = min(advice.choices[advice.memory_index].within_noise(), key=stored)
    if least == policy or stored(least) > FEW_STORES * stored(policy):
        return []
    share = percent_text(stored(least) / stored(policy))
    return [
        Finding(
            "Fewer stores",
            f"{least} hits as much within noise and stores {share} of the {advice.setup.kept_in} "
            f"that {policy} does; take it if the link to host memory is the bottleneck.",
        )
    ]


def _more_memory(advice: Advice, policy: str) -> str:
    index = advice.memory_index
    now = advice.cell(policy, index)
    texts = []
    if index + 1 < len(advice.memories):
        more = advice.cell(policy, index + 1)
        gain = more.hit_ratio - now.hit_ratio
        next_memory = bytes_text(advice.memories[index + 1])
        if advice.memories[index + 1] == 2 * advice.memories[index]:
            next_memory = f"doubling it to {next_memory}"
        if gain <= -LITTLE:
            texts.append(f"{next_memory} would lose {points(-gain)}")
        elif gain < LITTLE:
            texts.append(f"{next_memory} buys hardly anything ({points(gain)})")
        else:
            tokens = count_text(more.saved_tokens - now.saved_tokens)
            texts.append(
                f"{next_memory} buys {points(gain)}, to {percent_text(more.hit_ratio)}: {tokens} "
                "prefill tokens more over the trace"
            )
    if index > 0:
        loss = now.hit_ratio - advice.cell(policy, index - 1).hit_ratio
        less_memory = bytes_text(advice.memories[index - 1])
        if loss <= -LITTLE:
            texts.append(f"with {less_memory} it would hit {points(-loss)} more")
        elif loss < LITTLE:
            texts.append(f"{less_memory} would do, at a loss of {points(loss)}")
        else:
            texts.append(f"with {less_memory} it would lose {points(loss)}")
    if not texts:
        return "No other memory was compared."
    text = "; ".join(texts) + "."
    text = text[0].upper() + text[1:]
    others: dict[str, list[str]] = {}
    for other, (memory, choice) in enumerate(zip(advice.memories, advice.choices, strict=True)):
        if advice.paying is not None and not advice.paying[other]:
            others.setdefault("none, because none pays,", []).append(bytes_text(memory))
        elif choice.policy != policy:
            others.setdefault(choice.policy, []).append(bytes_text(memory))
    if others:
        choices = "; ".join(f"{name} with {' or '.join(m)}" for name, m in others.items())
        text += f" Memory changes the choice: {choices}."
    return text


def _ceiling(advice: Advice, policy: str) -> str:
    """Return the ceiling of all policies, and how much of it one reaches."""
    ceiling, unbounded = advice.ceilings[advice.memory_index], percent_text(advice.unbounded)
    memory, groups = bytes_text(advice.setup.memory), advice.setup.chunks
    at = " at this retention interval" if groups.layout.is_sparse else ""
    text = f"With any memory no policy can hit more than {unbounded}{at}."
    if not advice.unbounded_is_ceiling:
        text = (
            f"A cache without bounds would hit {unbounded} at this retention interval, which "
            "limits no policy: one that hits less computes more and may store other windows and "
            "states."
        )
    if ceiling is None:
        return (
            f"{text} The most that one can hit with {memory} is unknown, because no group is full."
        )
    reached = percent_text(advice.cell(policy).hit_ratio / ceiling) if ceiling else "all"
    best = f"With {memory} no policy can hit more than {percent_text(ceiling)}"
    if not advice.unbounded_is_ceiling:
        return (
            f"{text} {best} (Belady's choice with bypass over a full group). {policy} reaches "
            f"{reached} of it."
        )
    if groups.is_plain or ceiling != advice.unbounded:  # else Belady's choice is of full groups
        text = f"{best}{at} (Belady's choice with bypass, which knows the future)"
        if advice.unbounded - ceiling < LEAST_NOISE:
            text += ", and more memory would not raise that."
        else:
            text += f", and with any memory none more than {unbounded}."
    return f"{text} {policy} reaches {reached} of the ceiling with {memory}."


def detail_findings(advice: Advice, found: Details) -> list[Finding]:
    """Return the findings on warm-up, requests, reuse and a disk."""
    return [
        *([Finding("First token", _first_token(advice, found))] if found.first_tokens else []),
        Finding("Warm-up", _warm_up(found)),
        Finding("Requests", _requests(advice, found)),
        Finding("Reuse", _reuse(advice, found)),
        *([Finding("Disk", _disk(advice, found))] if found.disk else []),
    ]


def _warm_up(found: Details) -> str:
    first = found.policies[0]
    tenth = max(1, len(first.over_time) // 10)
    early, late = first.over_time[:tenth], first.over_time[len(first.over_time) // 2 :]
    return (
        f"In the first tenth of the requests {first.policy} hits "
        f"{percent_text(sum(early) / (len(early) or 1))}, in the second half "
        f"{percent_text(sum(late) / (len(late) or 1))}."
    )


def _requests(advice: Advice, found: Details) -> str:
    first = found.policies[0]
    counts = first.requests_by_share
    whole = sum(counts) or 1
    most = percent_text(sum(counts[6:]) / whole)
    text = (
        f"With {first.policy} {percent_text(counts[0] / whole)} of the requests hit nothing, "
        f"{most} more than half of their {advice.setup.counted}"
    )
    if not advice.setup.chunks.is_plain:  # of which none can hit the last token
        return f"{text}."
    return f"{text}, {percent_text(counts[-1] / whole)} all."


def _reuse(advice: Advice, found: Details) -> str:
    reuse = found.reuse
    if not reuse.bytes_at:
        return "No block is used twice."
    at = reuse.bytes_at
    groups, what = advice.setup.chunks, "to hit them"
    if not groups.is_plain:
        what = f"for their chunks of {'the full groups' if groups.num_full else 'one group'}"
    before = ", the accelerator's own cache left out" if advice.setup.device_memory else ""
    sample = "" if reuse.sampled == 1 else f" (from {percent_text(reuse.sampled)} of the blocks)"
    return (
        f"{percent_text(reuse.reused)} of the uses repeat a block{before}. Half of them come "
        f"within {bytes_text(at[50])} of other blocks, and 90 % within {bytes_text(at[90])}"
        f"{sample}; LRU needs that much memory {what}."
    )


def _disk(advice: Advice, found: Details) -> str:
    setup = advice.setup
    cells = [cell for cell in found.disk_cells if cell.memory == setup.memory]

    def added(cell: DiskCell) -> float:
        return cell.counts.hit_ratio - cell.alone

    most = max(cells, key=lambda cell: cell.counts.hit_ratio)
    loads = ""
    if setup.device_blocks and not setup.chunks.is_plain:  # these ratios are not those of the table
        loads = ", repeated loads of windows and states included"
    size = bytes_text(found.disk.size if found.disk else 0)
    if max(map(added, cells)) < LITTLE:
        return (
            f"A disk of {size} behind {bytes_text(setup.memory)} adds hardly any hits: both "
            f"hit {percent_text(most.counts.hit_ratio)} of the {setup.counted}, host memory on its "
            f"own {percent_text(most.alone)}{loads}; {_written(setup, most)}."
        )
    worth_it = [cell for cell in cells if added(cell) >= LITTLE]
    least = min([*worth_it, most], key=lambda cell: cell.counts.tier_stored)
    text = (
        f"With a disk of {size} behind {bytes_text(setup.memory)} both hit "
        f"{percent_text(most.counts.hit_ratio)} of the {setup.counted}, "
        + (f"host memory on its own {percent_text(most.alone)}{loads}, " if loads else "")
        + f"with {most.policy} on the disk and {most.host_policy} in memory; "
        f"{_written(setup, most)}"
    )
    if least is not most:
        text += (
            f"; fewest are written by {least.policy} behind {least.host_policy}: "
            f"{_written(setup, least)}, for {percent_text(least.counts.hit_ratio)}"
        )
    return f"{text}."


def _written(setup: Setup, cell: DiskCell) -> str:
    if cell.bytes_per_day is None or cell.writes_per_day is None:
        return f"{count_text(cell.counts.tier_stored)} {setup.kept_in} written"
    per_day = bytes_text(cell.bytes_per_day)
    return f"{per_day} written per day, {cell.writes_per_day:.3g} times its size"


def _traffic(advice: Advice, policy: str) -> str:
    cell = advice.cell(policy)
    text = ""
    if cell.stored_per_hit is not None:
        each = (
            "hit" if advice.setup.chunks.is_plain else f"{advice.setup.block_tokens:,} tokens hit"
        )
        text = f"{cell.stored_per_hit:.2f} {advice.setup.kept_in} are stored per {each}. "
    if cell.store_rate is None:
        return text + "The trace has no times, so there are no rates."
    requests = advice.facts.requests / advice.facts.seconds
    text += (
        f"At the trace's rate ({requests:.3g} requests per second) that is "
        f"{rate_text(cell.store_rate)} to host memory and {rate_text(cell.load_rate)} from it"
    )
    if cell.busiest_store_rate is not None:
        text += (
            f"; in the busiest tenth {rate_text(cell.busiest_store_rate)} and "
            f"{rate_text(cell.busiest_load_rate)}"
        )
    return text + "."
