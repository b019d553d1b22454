"""The findings in sentences, which the command and the report share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload.replay import Result

from .advice import Advice
from .choice import ENOUGH, EVEN, LEAST_NOISE, POLICIES, ROUND_ROBIN, SLOWER, saving
from .details import LITTLE, Details, DiskCell
from .economy import Engine, balance
from .knee import Knee
from .retention import or_none, vllm_flag, worth
from .setup import VLLM_DEFAULT, Setup
from .subject import Subject
from .units import bytes_text, count_text, duration_text, latency_text, percent_text, rate_text
from .verdicts import best_balance, side_by_side
from .wording import (
    busiest_text,
    case_text,
    each_text,
    p95_text,
    percentiles_text,
    points,
    tier_text,
)

FEW_STORES = 0.5
"""Share of the chosen policy's stores up to which one within noise is mentioned."""

MUCH_MORE = 1.1
"""Multiple of the chosen policy's gain in time from which another is mentioned."""

BUSY = 0.9
"""Share of the engines' time in prefill from which on queues of an open loop only grow."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding: a title of a word or two, and a text."""

    title: str
    text: str


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
        f"{behind}, and twice the memory would gain {round(rung.gain * 100, 1) + 0:.1f} ± "
        f"{rung.error * 100:.1f} points"
    )
    if knee.is_shown and knee.least < knee.most:
        low, high = bytes_text(knee.least), bytes_text(knee.most)
        text += f"; within the curve's error the knee lies between {low} and {high}"
    if setup.engines > 1:
        each = bytes_text(knee.memory / setup.engines)
        text += f". That is of one cache of all engines: {each} each"
    return f"{text}."


def findings(subject: Subject) -> list[Finding]:
    """Return the findings, the most important first.

    Without a recommendation for one engine, only those that hold for every policy.
    """
    texts: dict[str, Any] = {
        "Changes": subject.since and f"{subject.since}",
        "Capacity": subject.knee and capacity_text(subject.knee, subject.setup),
        "Prefixes": subject.breaks_text and f"Broken by {subject.breaks_text}",
    }
    texts |= _of_fleet(subject.advice) if subject.setup.engines else _of_engine(subject)
    return [Finding(title, text) for title, text in texts.items() if text]


def _of_engine(subject: Subject) -> dict[str, Any]:
    advice, engine, details = subject.advice, subject.setup.rates, subject.details
    policy = advice.policy
    texts: dict[str, Any] = {
        "Reason": policy and _reason(advice, policy),
        "Time": policy and engine and _time(advice, policy, engine),
        "Retention": subject.retentions and _retention(subject),
        "Accelerator": subject.by_device and side_by_side(subject),
    }
    if policy is None:
        texts["More memory"] = not advice.objections and _memory_that_pays(advice)
        return texts | {"Ceiling": _ceiling_of_all(advice)}
    texts |= {
        "Fewer stores": _fewer_stores(advice, policy),
        "More memory": _more_memory(advice, policy),
        "Ceiling": _ceiling(advice, policy),
        "Traffic": _traffic(advice, policy),
    }
    if details is None:
        return texts
    return texts | {
        "First token": engine and details.first_tokens and _first_token(engine, details),
        "Warm-up": _warm_up(details),
        "Requests": _requests(advice, details),
        "Reuse": _reuse(advice, details),
        "Disk": details.disk and _disk(advice, details),
    }


def _reason(advice: Advice, policy: str) -> str:
    choice = advice.choice
    left_out = [p for p in advice.ranking() if p not in choice.candidates]
    among = _reason_among(advice, policy)
    if not left_out:
        return among
    pronoun = "it is" if len(left_out) == 1 else "they are"
    text = (
        f"With {', '.join(left_out)} moving blocks takes longer than the prefill that is saved, so "
        f"{pronoun} left out"
    )
    hits_more = choice.behind[left_out[0]] < 0
    if hits_more:
        text += f", though {left_out[0]} hits {percent_text(advice.of(left_out[0]).hit_ratio)}"
    if len(choice.candidates) == 1:
        return f"{policy} is the only policy that pays. {text}."
    return f"{'Of the policies that pay: ' * hits_more}{among} {text}."


def _reason_among(advice: Advice, policy: str) -> str:
    """Return why the policy was chosen from the candidates."""
    choice = advice.choice
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


def _time(advice: Advice, policy: str, engine: Engine) -> str:
    """Return prefill saved against time on the link, for the policy and for vLLM's default."""
    found = balance(advice.setup, advice.of(policy), engine)
    text = (
        f"On {engine.name} hits save {duration_text(found.prefill_seconds)} of prefill over the "
        f"trace; loading takes {duration_text(found.load_seconds)} of the link and storing "
        f"{duration_text(found.store_seconds)}: {duration_text(found.net_seconds)} gained."
    )
    best, most = best_balance(advice, engine)
    if most.net_seconds > MUCH_MORE * found.net_seconds:
        text += f" {best} gains most, {duration_text(most.net_seconds)}."
    if policy != VLLM_DEFAULT:
        default = balance(advice.setup, advice.vllm_default, engine)
        word = "gains" if default.pays else "loses"
        text += (
            f" vLLM's default, {VLLM_DEFAULT}, {word} {duration_text(abs(default.net_seconds))}."
        )
    return text


def _retention(subject: Subject) -> str:
    """Return the hits at several retention intervals, and the argument that gains a point."""
    setup, cells = subject.setup, subject.retentions
    given = setup.chunks.retention
    hits = ", ".join(f"{percent_text(c.hit_ratio)} at {or_none(c.interval)}" for c in cells)
    text = (
        "A prompt with windows or states can be resumed only at its end (0, vLLM's default), "
        "also at every multiple of an interval, or everywhere (none). With "
        f"{subject.advice.offloading.policy} {bytes_text(setup.memory)} hit {hits}"
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


def _fewer_stores(advice: Advice, policy: str) -> str | None:
    """Return a sentence on the policy within noise that stores much less, if there is one."""

    def stored(name: str) -> int:
        return advice.of(name).stored

    least = min(advice.choice.within_noise(), key=stored)
    if least == policy or stored(least) > FEW_STORES * stored(policy):
        return None
    share = percent_text(stored(least) / stored(policy))
    return (
        f"{least} hits as much within noise and stores {share} of the {advice.setup.kept_in} "
        f"that {policy} does; take it if the link to host memory is the bottleneck."
    )


def _more_memory(advice: Advice, policy: str) -> str:
    memories, memory = advice.setup.memories(), advice.setup.memory
    now, texts = advice.of(policy), []
    larger = [other for other in memories if other > memory]
    smaller = [other for other in memories if other < memory]
    if larger:
        more = advice.of(policy, larger[0])
        gain = more.hit_ratio - now.hit_ratio
        next_memory = bytes_text(larger[0])
        if larger[0] == 2 * memory:
            next_memory = f"doubling it to {next_memory}"
        if gain <= -LITTLE:
            texts.append(f"{next_memory} would lose {points(-gain)}")
        elif gain < LITTLE:
            texts.append(f"{next_memory} buys hardly anything ({points(gain)})")
        else:
            tokens = count_text(more.offloaded_tokens - now.offloaded_tokens)
            texts.append(
                f"{next_memory} buys {points(gain)}, to {percent_text(more.hit_ratio)}: {tokens} "
                "prefill tokens more over the trace"
            )
    if smaller:
        loss = now.hit_ratio - advice.of(policy, smaller[-1]).hit_ratio
        less_memory = bytes_text(smaller[-1])
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
    for other, choice in advice.choices.items():
        if choice.pays is False:
            others.setdefault("none, because none pays,", []).append(bytes_text(other))
        elif choice.policy != policy:
            others.setdefault(choice.policy, []).append(bytes_text(other))
    if others:
        choices = "; ".join(f"{name} with {' or '.join(m)}" for name, m in others.items())
        text += f" Memory changes the choice: {choices}."
    return text


def _memory_that_pays(advice: Advice) -> str:
    """Return the other memories in which a policy pays."""
    texts = [
        f"{choice.policy} with {bytes_text(memory)}"
        for memory, choice in advice.choices.items()
        if choice.pays
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


def _ceiling(advice: Advice, policy: str) -> str:
    """Return the ceiling of all policies, and how much of it one reaches."""
    ceiling, unbounded = advice.ceilings[advice.setup.memory], percent_text(advice.unbounded)
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
    reached = percent_text(advice.of(policy).hit_ratio / ceiling) if ceiling else "all"
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


def _traffic(advice: Advice, policy: str) -> str:
    result, text, facts = advice.of(policy), "", advice.facts
    per_hit, rates = advice.stored_per_hit(result), advice.rates(result)
    if per_hit is not None:
        each = (
            "hit" if advice.setup.chunks.is_plain else f"{advice.setup.block_tokens:,} tokens hit"
        )
        text = f"{per_hit:.2f} {advice.setup.kept_in} are stored per {each}. "
    if rates.store is None:
        return text + "The trace has no times, so there are no rates."
    text += (
        f"At the trace's rate ({facts.requests / facts.seconds:.3g} requests per second) that is "
        f"{rate_text(rates.store)} to host memory and {rate_text(rates.load)} from it"
    )
    if rates.busiest_store is not None:
        text += (
            f"; in the busiest tenth {rate_text(rates.busiest_store)} and "
            f"{rate_text(rates.busiest_load)}"
        )
    return text + "."


def _first_token(engine: Engine, found: Details) -> str:
    """Return how long prompts take, and what offloading saves of that."""
    *policies, without = found.first_tokens
    first = policies[0]
    within = {
        one: percentiles_text(latency_text(one.p50), latency_text(one.p95))
        for one in found.first_tokens
    }
    text = (
        f"On {engine.name} loading and computing a prompt takes {within[first]} with "
        f"{first.policy} instead of {within[without]} without offloading, "
        f"{latency_text(without.p50 - first.p50)} and {latency_text(without.p95 - first.p95)} less"
    )
    for one in policies[1:]:
        text += f"; {within[one]} with {one.policy}, vLLM's default"
    computed = " instead of ".join(
        percentiles_text(f"{one.missed_p50:,}", f"{one.missed_p95:,}") for one in (first, without)
    )
    return (
        f"{text}. {computed} of its tokens are computed. Queueing is not included; kvoffload "
        "advise --engines adds it."
    )


def _warm_up(found: Details) -> str:
    first = found.policies[0]
    return (
        f"In the first tenth of the requests {first.policy} hits "
        f"{percent_text(first.first_tenth)}, in the second half {percent_text(first.second_half)}."
    )


def _requests(advice: Advice, found: Details) -> str:
    first = found.policies[0]
    counts = first.requests_by_share
    whole = sum(counts) or 1
    who = "requests"
    if whole < advice.facts.requests:  # the others lack blocks for it
        who = f"{whole:,} requests that ask host memory"
    most = percent_text(sum(counts[6:]) / whole)
    text = (
        f"With {first.policy} {percent_text(counts[0] / whole)} of the {who} hit nothing, "
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
    if setup.device_memory and not setup.chunks.is_plain:  # these ratios are not those of the table
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


def _of_fleet(advice: Advice) -> dict[str, Any]:
    setup, offloads, result = advice.setup, advice.case.offloads, advice.result
    hits, whole = result.device_hits + result.hits, result.device_hits + result.asked
    routers = {case.router: case.router for case in advice.rows}
    tiers = {tier: f"{tier_text(tier)}:" for tier in setup.tiers}
    policies = {policy: policy for policy in setup.policies}
    same = "With the same router"
    return {
        "Enough": _enough(advice),
        "Router": f"With the same policy and memory: {_savings(advice, 'router', routers)}.",
        "Memory": _memory(advice),
        "Tier": f"{same}, policy and memory, {_savings(advice, 'tier', tiers, '; ')}."
        if offloads and len(tiers) > 1
        else "",
        "Policy": f"{same} and memory: {_savings(advice, 'policy', policies)}."
        if offloads and len(policies) > 1
        else "",
        "First token": _first_token_of_fleet(advice) if setup.rate else "",
        "Balance": _balance(advice),
        "Ceiling": f"A cache without bounds would hit {percent_text(advice.reuse)} of the blocks; "
        f"all caches of the fleet hit {percent_text(hits / whole if whole else 0.0)}.",
    }


def _savings(advice: Advice, part: str, texts: Mapping[Any, str], between: str = ", ") -> str:
    """Return what the fleet that is enough saves with each of some values of a part of it."""
    results = {text: advice.like(**{part: value}) for value, text in texts.items()}
    found = [(text, saving(result)) for text, result in results.items() if result is not None]
    if part == "router":  # the best first
        found.sort(key=lambda pair: -pair[1])
    return between.join(f"{text} {percent_text(saved)}" for text, saved in found)


def _enough(advice: Advice) -> str:
    best = advice.best
    cheapest = (
        "least host memory, then the smallest tier,"
        if advice.setup.prices is None
        else "lowest price"
    )
    times = (
        ", with 95 % of its first tokens, error added, within "
        f"{SLOWER:g} times the least time of such fleets,"
        if advice.setup.rate
        else ""
    )
    is_even = not advice.setup.rate and advice.rows[best].imbalance <= EVEN
    even = " that balance the load" if is_even else ""
    return (
        f"The best of {len(advice.candidates):,} fleets{even} is {case_text(best)}: it saves "
        f"{percent_text(saving(advice.rows[best]))} of the {advice.setup.saved}. A fleet "
        f"within {points(ENOUGH)} of it{times} is enough; the one with the {cheapest} is taken."
    )


def _memory(advice: Advice) -> str:
    memories = advice.setup.memories()
    sizes = {memory: bytes_text(memory) if memory else each_text(0) for memory in memories}
    text = f"Per engine, behind the same router: {_savings(advice, 'memory', sizes)}."
    if advice.case.memory == memories[1]:
        text += " The smallest memory compared is enough; a smaller --capacity may be, too."
    elif advice.may_need_more:
        text += " The largest memory compared is needed; a larger --capacity may save more."
    return text


def _first_token_of_fleet(advice: Advice) -> str:
    def within(found: Result) -> str:
        return percentiles_text(latency_text(found.ttft_p50 or 0), p95_text(found))

    text = f"The first token takes {within(advice.result)} from arrival"
    by_turns = advice.like(router=ROUND_ROBIN)
    if by_turns is not None and advice.case.router != ROUND_ROBIN:
        text += f"; behind {ROUND_ROBIN} {within(by_turns)}"
    return f"{text}. Queueing is included."


def _balance(advice: Advice) -> str:
    result = advice.result
    text = busiest_text(result)
    if result.busy is not None:
        text += f"; engines compute prompts {percent_text(result.busy)} of the time"
        if advice.setup.loop == "open" and result.busy >= BUSY:
            text += ": too much for an open loop, whose queues only grow"
    return f"{text}."
