"""The choice of a policy: the simplest that is within noise of the best.

*Noise.* The trace is one sample of the traffic to come. It is divided into ten parts of equally
many requests (the cache is kept between them), and the best policy is compared with another part by
part: another day's traffic may well reverse a difference of up to twice the standard error of the
mean difference (batch means; Law, "Simulation Modeling and Analysis", chapter 9). A difference
counts as noise up to that, but always up to `LEAST_NOISE`, which is too little to notice, and never
above `MOST_NOISE`, which is too much to give away for simplicity.

*Simplicity.* The registry ranks the policies by what explains an eviction: first the resident
blocks, then the history of evicted blocks, last what was learned from all traffic so far. How well
a policy does has no influence on the ranking; the trace measures that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoffload.policies import registry
from kvoffload.replay import ReplayResult

from .grid import Outcome

__all__ = ["LEAST_NOISE", "MOST_NOISE", "Choice", "choose", "difference_error", "noise"]

LEAST_NOISE = 0.002
MOST_NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy to take at one capacity.

    Attributes
    ----------
    policy : str
        The simplest candidate within noise of the best.
    best : str
        The candidate with the most hits.
    behind : dict of str to float
        By policy, how much lower its hit ratio is than the best one's; below 0 for one that hits
        more and is no candidate.
    noise : dict of str to float
        By policy, the greatest difference that is noise.
    candidates : tuple of str
        The policies that were chosen from.
    """

    policy: str
    best: str
    behind: Mapping[str, float]
    noise: Mapping[str, float]
    candidates: tuple[str, ...]

    def within_noise(self) -> list[str]:
        """Return the candidates that are within noise of the best, the simplest first."""
        return by_simplicity([p for p in self.candidates if self.behind[p] <= self.noise[p]])


def by_simplicity(policies: Sequence[str]) -> list[str]:
    """Return policies, the simplest first; the user's own come last."""

    def rank(policy: str) -> float:
        name = policy.partition("?")[0]
        known = name in registry.names()
        return registry.parse(policy).kind.simplicity if known else math.inf

    return sorted(policies, key=rank)


def noise(best: Sequence[ReplayResult], other: Sequence[ReplayResult]) -> float:
    """Return the greatest difference of two hit ratios that is noise, from their parts.

    Its `difference_error`, at least `LEAST_NOISE` and at most `MOST_NOISE`.
    """
    return min(MOST_NOISE, max(LEAST_NOISE, difference_error(best, other)))


def difference_error(best: Sequence[ReplayResult], other: Sequence[ReplayResult]) -> float:
    """Return twice the standard error of the difference of two hit ratios, from their parts.

    It is that of the ratio of summed differences to summed tokens asked for; infinite where there
    are too few parts, or nothing is asked for.
    """
    asked_of_parts = [part.asked_tokens or 0 for part in best]
    asked, count = sum(asked_of_parts), len(best)
    if not asked or count < 2:
        return math.inf
    pairs = zip(best, other, strict=True)
    differences = [(a.loaded_tokens or 0) - (b.loaded_tokens or 0) for a, b in pairs]
    mean = sum(differences) / asked
    squares = sum(
        (difference - mean * of_part) ** 2
        for difference, of_part in zip(differences, asked_of_parts, strict=True)
    )
    return 2 * math.sqrt(squares * count / (count - 1)) / asked


def choose(outcomes: Sequence[Outcome], among: Sequence[str] = ()) -> Choice:
    """Choose a policy at one capacity, from all that were replayed or from `among`.

    Of two that hit equally often the simpler one is the best.
    """
    hits = {outcome.policy: outcome.hit_tokens for outcome in outcomes}
    parts = {outcome.policy: outcome.parts for outcome in outcomes}
    asked = outcomes[0].asked_tokens
    candidates = tuple(among) or tuple(hits)
    best = max(by_simplicity(candidates), key=lambda policy: hits[policy])
    behind = {p: (hits[best] - hits[p]) / asked if asked else 0.0 for p in hits}
    limits = {p: noise(parts[best], parts[p]) for p in hits}
    simplest = by_simplicity([p for p in candidates if behind[p] <= limits[p]])[0]
    return Choice(simplest, best, behind, limits, candidates)
