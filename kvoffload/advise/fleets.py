"""Which of several fleets is enough: the cheapest that saves about as much as the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvoffload.policies import registry
from kvoffload.replay.fleet import ROUTERS, Fleet, FleetResult
from kvoffload.replay.policies import is_own

__all__ = ["FleetChoice", "Prices", "choose_fleet"]

ENOUGH = 0.01
"""Share of the prefill, or of the tokens, by which less is as good as the best."""

SLOWER = 1.25
"""Factor by which 95 % of the first tokens may take longer than in the fastest fleet."""

_GIB = 2**30
_ROUND_ROBIN = "round-robin"


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


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """The fleet that is enough, and what it is compared with.

    Attributes
    ----------
    fleet : Fleet
        The choice.
    result : FleetResult
        What it did.
    best : FleetResult
        What the fleet that saves most did.
    by_turns : FleetResult or None
        What the same engines did behind ``round-robin``; None where that was not compared.
    twice : FleetResult or None
        What the same fleet did with twice the host memory; None where that was not compared.
    """

    fleet: Fleet
    result: FleetResult
    best: FleetResult
    by_turns: FleetResult | None
    twice: FleetResult | None


def saving(result: FleetResult) -> float:
    """Return the share of the prefill that is saved, without a rate that of the tokens."""
    return result.token_hit_ratio if result.saved is None else result.saved


def choose_fleet(
    results: Mapping[Fleet, FleetResult], prices: Prices | None = None
) -> FleetChoice | None:
    """Choose the cheapest fleet that is enough.

    Enough is what saves within .01 of the best, and of those what gives 95 % of the first tokens
    within 1.25 times the least time. Of equally cheap fleets the one with the simpler policy is
    chosen, then that with the router higher in the table.

    Parameters
    ----------
    results : mapping of Fleet to FleetResult
        Fleets of one number of engines over one trace.
    prices : Prices, optional
        Without them the least host memory is cheapest, then the smallest tier.

    Returns
    -------
    FleetChoice or None
        None of no fleets.
    """
    if not results:
        return None
    best = max(results.values(), key=saving)
    enough = [fleet for fleet in results if saving(results[fleet]) >= saving(best) - ENOUGH]
    least = min(results[fleet].ttft_p95 or 0.0 for fleet in enough)
    enough = [fleet for fleet in enough if (results[fleet].ttft_p95 or 0.0) <= SLOWER * least]
    chosen = min(enough, key=lambda fleet: (_cost(fleet, prices), *_simplicity(fleet)))

    return FleetChoice(
        chosen,
        results[chosen],
        best,
        results.get(replace(chosen, router=_ROUND_ROBIN)),
        results.get(replace(chosen, host_blocks=2 * chosen.host_blocks)),
    )


def _cost(fleet: Fleet, prices: Prices | None) -> tuple[float, float]:
    host = fleet.engines * fleet.host_blocks
    tier = 0
    if fleet.tier is not None:
        tier = fleet.tier.blocks * (fleet.engines if fleet.tier.kind == "private" else 1)
    if prices is None:
        return host, tier
    return (prices.host * host + prices.tier * tier) * fleet.block_bytes / _GIB, 0.0


def _simplicity(fleet: Fleet) -> tuple[float, int]:
    """Return how much has to be known of a fleet's policy, and the router's place in the table."""
    policy = float("inf") if is_own(fleet.policy) else registry.parse(fleet.policy).kind.simplicity
    return policy, list(ROUTERS).index(fleet.spec.name)
