"""What the figures mean, in sentences that the command and the report share."""

from __future__ import annotations

from dataclasses import dataclass

from .advice import Advice
from .choice import LEAST_NOISE, MOST_NOISE
from .grid import PARTS
from .units import bytes_text, count_text, percent_text, rate_text

__all__ = ["Finding", "findings", "headline", "noise_text", "points"]

FEW_STORES = 0.5
"""A policy within noise is worth a word if it stores at most this share of the chosen one's."""

LITTLE = 0.005
"""A gain in hit ratio below this is called hardly any."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A title of a word or two, and what is to be said under it."""

    title: str
    text: str


def points(difference: float) -> str:
    """Return a difference of two hit ratios in points, hundredths of the blocks."""
    text = f"{difference * 100:.1f}"
    return "less than 0.1 points" if text == "0.0" and difference > 0 else f"{text} points"


def headline(advice: Advice) -> str:
    """Return the advice in one sentence."""
    if advice.policy is None:
        return "No recommendation: " + "; ".join(advice.objections) + "."
    found = advice.cell(advice.policy)
    return (
        f"Take {advice.policy}: with {bytes_text(advice.setup.memory)} it hits "
        f"{percent_text(found.hit_ratio)} of the blocks."
    )


def findings(advice: Advice) -> list[Finding]:
    """Return what follows from the figures, the most important first.

    Where there is no recommendation, only what holds of every policy.
    """
    policy = advice.policy
    if policy is None:
        ideal = percent_text(advice.unbounded)
        return [
            Finding("Ceiling", f"A cache without bounds would hit {ideal} of the trace's blocks.")
        ]
    return [
        Finding("Reason", _reason(advice, policy)),
        *_fewer_stores(advice, policy),
        Finding("More memory", _more_memory(advice, policy)),
        Finding("Ceiling", _ceiling(advice, policy)),
        Finding("Saved", _saved(advice, policy)),
        Finding("Traffic", _traffic(advice, policy)),
    ]


def noise_text() -> str:
    """Return what is meant by noise."""
    return (
        f"Noise: twice the standard error of the difference to the best policy over {PARTS} "
        f"consecutive parts of the trace, at least {points(LEAST_NOISE)} and at most "
        f"{points(MOST_NOISE)}."
    )


def _reason(advice: Advice, policy: str) -> str:
    choice = advice.choices[advice.asked]
    within = choice.within_noise()
    if policy != choice.best:
        return (
            f"{choice.best} hits most, {percent_text(advice.cell(choice.best).hit_ratio)}; "
            f"{policy} is {points(choice.behind[policy])} behind, which is within noise "
            f"({points(choice.noise[policy])}), and it is the simplest of the {len(within)} "
            f"policies that are: {', '.join(within)}."
        )
    if len(within) > 1:
        others = ", ".join(p for p in within if p != policy)
        return f"It hits most, and it is simpler than those within noise of it: {others}."
    if len(choice.behind) == 1:
        return "It is the only policy that was compared."
    second = advice.ranking()[1]
    return (
        f"It hits most. The next, {second}, is {points(choice.behind[second])} behind, which is "
        f"more than noise ({points(choice.noise[second])})."
    )


def _fewer_stores(advice: Advice, policy: str) -> list[Finding]:
    """Name the policy within noise that stores least, if that is much less than the chosen one."""

    def stored(name: str) -> float:
        cell = advice.cell(name)
        return (cell.stored_per_hit or 0.0) * cell.hit_ratio

    least = min(advice.choices[advice.asked].within_noise(), key=stored)
    if least == policy or stored(least) > FEW_STORES * stored(policy):
        return []
    share = percent_text(stored(least) / stored(policy))
    return [
        Finding(
            "Fewer stores",
            f"{least} hits as much within noise and stores {share} of the blocks that {policy} "
            "does; take it where the way to host memory is what is scarce.",
        )
    ]


def _more_memory(advice: Advice, policy: str) -> str:
    asked = advice.asked
    now = advice.cell(policy, asked)
    texts = []
    if asked + 1 < len(advice.memories):
        more = advice.cell(policy, asked + 1)
        gain = more.hit_ratio - now.hit_ratio
        next_memory = bytes_text(advice.memories[asked + 1])
        if advice.memories[asked + 1] == 2 * advice.memories[asked]:
            next_memory = f"doubling it to {next_memory}"
        if gain < LITTLE:
            texts.append(f"{next_memory} buys hardly anything ({points(gain)})")
        else:
            tokens = count_text(more.saved_tokens - now.saved_tokens)
            texts.append(
                f"{next_memory} buys {points(gain)}, to {percent_text(more.hit_ratio)}: {tokens} "
                "prefill tokens more over the trace"
            )
    if asked > 0:
        loss = now.hit_ratio - advice.cell(policy, asked - 1).hit_ratio
        less_memory = bytes_text(advice.memories[asked - 1])
        if loss < LITTLE:
            texts.append(f"{less_memory} would do, at a loss of {points(loss)}")
        else:
            texts.append(f"with {less_memory} it would lose {points(loss)}")
    if not texts:
        return "No other memory was compared."
    text = "; ".join(texts) + "."
    text = text[0].upper() + text[1:]
    others: dict[str, list[str]] = {}
    for memory, choice in zip(advice.memories, advice.choices, strict=True):
        if choice.policy != policy:
            others.setdefault(choice.policy, []).append(bytes_text(memory))
    if others:
        choices = "; ".join(f"{name} with {' or '.join(m)}" for name, m in others.items())
        text += f" Memory changes the choice: {choices}."
    return text


def _ceiling(advice: Advice, policy: str) -> str:
    ceiling = advice.ceilings[advice.asked]
    reached = percent_text(advice.cell(policy).hit_ratio / ceiling) if ceiling else "all"
    text = (
        f"With {bytes_text(advice.setup.memory)} no policy can hit more than "
        f"{percent_text(ceiling)} (Belady's choice with bypass, which knows the future)"
    )
    if advice.unbounded - ceiling < LEAST_NOISE:
        text += ", and more memory would not raise that."
    else:
        text += f", and with any memory none more than {percent_text(advice.unbounded)}."
    return f"{text} {policy} reaches {reached} of it."


def _saved(advice: Advice, policy: str) -> str:
    cell = advice.cell(policy)
    saved = count_text(cell.saved_tokens)
    whole = advice.facts.input_tokens
    if whole and advice.setup.full_blocks:
        return (
            f"{saved} of {count_text(whole)} prompt tokens need no prefill "
            f"({percent_text(cell.saved_tokens / whole)})."
        )
    return f"{saved} prompt tokens need no prefill."


def _traffic(advice: Advice, policy: str) -> str:
    cell = advice.cell(policy)
    text = ""
    if cell.stored_per_hit is not None:
        text = f"{cell.stored_per_hit:.2f} blocks are stored for each that is hit. "
    if cell.store_rate is None:
        return text + "The trace has no times, so there are no rates."
    requests = advice.facts.requests / advice.facts.seconds
    text += (
        f"At the trace's rate ({requests:.3g} requests a second) that is "
        f"{rate_text(cell.store_rate)} to host memory and {rate_text(cell.load_rate)} from it"
    )
    if cell.busiest_store_rate is not None:
        text += (
            f"; in the busiest tenth {rate_text(cell.busiest_store_rate)} and "
            f"{rate_text(cell.busiest_load_rate)}"
        )
    return text + "."
