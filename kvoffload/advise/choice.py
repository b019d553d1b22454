"""The choices: of a policy, hit density or LRU where it hits as much; and of a whole fleet.

The cheapest fleet that saves about as much as the best is enough (`choose_fleet`).

*Policies.* Of `POLICIES`, hit density is recommended, or LRU if it is at most `LEAST_NOISE` behind.
Noise often decides which of many policies hits most on one trace: chosen by one half of a public
trace, the best of all loses more on the other half than hit density does. So any other policy must
be ahead of both by more than noise. Without either among the candidates, the one with the most hits
is recommended.

*Noise.* The trace is one sample of the traffic to come. It is divided into five parts of equally
many requests (the cache is kept between them), and two results are compared part by part. The error
of their difference is half of its 98 % confidence interval by Student's t (batch means; Law,
"Simulation Modeling and Analysis", chapter 9). Consecutive parts are not independent, so the
interval holds the mean less often than that; a test requires nine cases of ten on generated
traffic. A difference is noise up to its error, and always up to `LEAST_NOISE`, which is too little
to notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvoffload.replay import Configuration, Result
from kvoffload.replay.results import ERROR_PARTS
from kvoffload.replay.routers import ROUTERS

POLICIES = ("lru", "hit-density")
"""The policies that are compared if none is named."""

LEAST_NOISE = 0.002
"""Difference of two hit ratios that is too small to notice."""

STUDENT_T = 3.747
"""Student's t for a 98 % interval of the mean of `ERROR_PARTS` values."""

ROUND_ROBIN = "round-robin"

ENOUGH = 0.01
"""Share of the prefill, or of the tokens, that a fleet may save less than the best.

It is also the noise between routers, and between policies other than those of `POLICIES`.
"""

SLOWER = 1.25
"""Factor by which 95 % of the first tokens may take longer than in the surest fleet."""

EVEN = 1.5
"""Greatest share of the busiest engine, in means, of a fleet whose load is balanced."""

_GIB = 2**30

AnyCase = TypeVar("AnyCase")


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy to take at one capacity.

    Attributes
    ----------
    policy : str
        The recommended candidate.
    best : str
        The candidate with the most hits.
    behind : dict of str to float
        By policy, how much lower its hit ratio is than the best one's; below 0 for one that hits
        more and is no candidate.
    noise : dict of str to float
        By policy, the greatest difference to the best that is noise.
    candidates : tuple of str
        The policies that were chosen from: those that save more prefill than moving blocks takes,
        where that is known and there are any.
    pays : bool or None
        Whether there are any; None if that is not known.
    """

    policy: str
    best: str
    behind: Mapping[str, float]
    noise: Mapping[str, float]
    candidates: tuple[str, ...]
    pays: bool | None = None

    def within_noise(self) -> list[str]:
        """Return the candidates that are within noise of the best."""
        return [p for p in self.candidates if self.behind[p] <= self.noise[p]]


def noise(one: Sequence[Result], other: Sequence[Result]) -> float:
    """Return the greatest difference of two hit ratios that is noise, from their parts."""
    return max(LEAST_NOISE, difference_error(one, other))


def difference_error(one: Sequence[Result], other: Sequence[Result]) -> float:
    """Return the error of the difference of two hit ratios, from parts of the trace.

    It is half of the 98 % confidence interval of the ratio of summed differences to summed tokens
    asked for. `ERROR_PARTS` divides the number of parts; the error is infinite if nothing is asked
    for.
    """
    asked = _in_error_parts([part.asked_tokens for part in one])
    pairs = zip(one, other, strict=True)
    differences = _in_error_parts([a.offloaded_tokens - b.offloaded_tokens for a, b in pairs])
    whole = sum(asked)
    if not whole:
        return math.inf
    mean = sum(differences) / whole
    residues = [d - mean * count for d, count in zip(differences, asked, strict=True)]
    return _half_width(residues) * ERROR_PARTS / whole


def _in_error_parts(counts: Sequence[int]) -> list[int]:
    size = len(counts) // ERROR_PARTS
    return [sum(counts[size * part : size * (part + 1)]) for part in range(ERROR_PARTS)]


def _half_width(residues: Sequence[float]) -> float:
    """Return half of the 98 % confidence interval of a mean.

    `residues` are the differences of its `ERROR_PARTS` values from it.
    """
    squares = sum(residue**2 for residue in residues)
    return STUDENT_T * math.sqrt(squares / (ERROR_PARTS - 1) / ERROR_PARTS)


def choose_policy(ratios: Mapping[str, float], noise_of: Callable[[str, str], float]) -> str:
    """Choose a policy by hit ratios, or by other shares.

    Parameters
    ----------
    ratios : mapping of str to float
        By candidate, the share that it hits or saves; of equal others the first is taken.
    noise_of : callable
        Returns the greatest difference of two candidates that is noise.
    """
    usual = [policy for policy in POLICIES if policy in ratios]
    others = [
        policy
        for policy in ratios
        if policy not in usual
        and all(ratios[policy] - ratios[one] > noise_of(policy, one) for one in usual)
    ]
    if others:
        return max(others, key=ratios.__getitem__)
    return usual[0] if ratios[usual[-1]] - ratios[usual[0]] <= LEAST_NOISE else usual[-1]


def choose(results: Sequence[Result], paying: Sequence[str] | None = None) -> Choice:
    """Choose a policy at one capacity, from all that were replayed in parts.

    If it is known which are `paying`, and there are any, choose from these.
    """
    ratios = {result.configuration.policy: result.hit_ratio for result in results}
    parts = {result.configuration.policy: result.parts for result in results}
    candidates = tuple(paying or ratios)

    def noise_of(one: str, other: str) -> float:
        return noise(parts[one], parts[other])

    best = max(candidates, key=ratios.__getitem__)
    return Choice(
        policy=choose_policy({policy: ratios[policy] for policy in candidates}, noise_of),
        best=best,
        behind={policy: ratios[best] - ratios[policy] for policy in ratios},
        noise={policy: noise_of(best, policy) for policy in ratios},
        candidates=candidates,
        pays=None if paying is None else bool(paying),
    )


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of memory per GiB, in any money.

    Attributes
    ----------
    host, tier : float
        That of host memory, and of a tier.
    """

    host: float
    tier: float


def saving(result: Result) -> float:
    """Return the share of the prefill that is saved; without a rate, that of the tokens."""
    return result.token_hit_ratio or 0.0 if result.saved is None else result.saved


def balanced(results: Mapping[AnyCase, Result]) -> dict[AnyCase, Result]:
    """Return the fleets that may be recommended; all, if there are times, which show queues.

    Without times of first tokens, a fleet is left out if its busiest engine computes more than 1.5
    times the mean (if each does, more than in the most balanced one), and more tokens than the
    busiest engine of a fleet that is not left out.
    """
    most = max(EVEN, min(found.imbalance for found in results.values()))
    even = [_busiest(found) for found in results.values() if found.imbalance <= most]
    return {
        fleet: found
        for fleet, found in results.items()
        if found.ttft_p95 is not None or found.imbalance <= most or _busiest(found) <= min(even)
    }


def _busiest(result: Result) -> float:
    """Return what the busiest engine computes, as a multiple of an engine's share of the tokens."""
    return result.imbalance * (1 - saving(result))


def choose_fleet(results: Mapping[AnyCase, Result], prices: Prices | None = None) -> AnyCase:
    """Choose the cheapest fleet that is enough.

    A fleet is enough if it saves within .01 of the best and, among those that do, gives 95 % of
    the first tokens within 1.25 times the least time. To each of these times its error is added: a
    router that is fast by chance does not win. Without times, only the `balanced` fleets are
    compared. Of equally cheap fleets, the policy is chosen as by `choose_policy`, then the router
    that is higher in the table.

    Parameters
    ----------
    results : mapping to Result
        Those of fleets of one number of engines over one trace, at least one.
    prices : Prices, optional
        Without them the least host memory is cheapest, then the smallest tier.
    """
    results = balanced(results)
    best = max(map(saving, results.values()))
    enough = [fleet for fleet in results if saving(results[fleet]) >= best - ENOUGH]
    times = {
        fleet: (results[fleet].ttft_p95 or 0.0) + p95_error(results[fleet]) for fleet in enough
    }
    enough = [fleet for fleet in enough if times[fleet] <= SLOWER * min(times.values())]
    costs = {fleet: _cost(results[fleet].configuration, prices) for fleet in enough}
    least = min(costs.values())
    cheapest = [fleet for fleet in enough if costs[fleet] == least]
    policies = {fleet: results[fleet].configuration.policy for fleet in cheapest}
    most: dict[str, float] = {}
    for fleet, policy in policies.items():
        most[policy] = max(most.get(policy, 0.0), saving(results[fleet]))
    chosen = choose_policy(most, lambda *_: ENOUGH)
    return min(
        (fleet for fleet, policy in policies.items() if policy == chosen),
        key=lambda fleet: list(ROUTERS).index(results[fleet].configuration.spec.name),
    )


def _cost(fleet: Configuration, prices: Prices | None) -> tuple[float, float]:
    host = fleet.engines * fleet.host
    tier = 0
    if fleet.tier is not None:
        tier = fleet.tier.slots * (fleet.engines if fleet.tier.kind == "private" else 1)
    if prices is None:
        return host, tier
    return (prices.host * host + prices.tier * tier) * fleet.block_bytes / _GIB, 0.0


def p95_error(result: Result) -> float:
    """Return the error of the 95th percentile of first tokens, seconds; 0 without a rate.

    It is half of the 98 % confidence interval of the mean over parts of the trace.
    """
    values = result.ttft_p95_of_parts
    mean = sum(values) / (len(values) or 1)
    return _half_width([value - mean for value in values])
