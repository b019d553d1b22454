"""Advice on engines behind a router: which router, policy, memory and tier are enough.

The cheapest fleet that saves about as much as the best is enough. Every router and policy is
compared in half, once, twice and four times the memory asked for, with each tier, and every router
without offloading, which is enough where host memory saves hardly more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvoffload.replay import Configuration, GroupChunks, Result, Tier, replay, replay_all
from kvoffload.replay.offline import INFINITE
from kvoffload.replay.processes import Elsewhere
from kvoffload.replay.routers import ROUTERS, parse_router

from .advice import (
    LEAST_REQUESTS,
    LEAST_REUSE,
    Facts,
    RecordedTrace,
    reuse_objection,
    too_few,
)
from .choice import POLICIES, choose_policy, half_width
from .setup import FleetTier, Prices, Setup

__all__ = [
    "FleetAdvice",
    "FleetCase",
    "FleetChoice",
    "advise_fleet",
    "cases_of",
    "choose_fleet",
    "fleets_of",
    "p95_error",
]

ENOUGH = 0.01
"""Share of the prefill, or of the tokens, that a fleet may save less than the best.

It is also the noise between routers, and between policies other than those of `POLICIES`.
"""

SLOWER = 1.25
"""Factor by which 95 % of the first tokens may take longer than in the surest fleet."""

BUSY = 0.9
"""Share of the engines' time in prefill from which on queues of an open loop only grow."""

_GIB = 2**30
ROUND_ROBIN = "round-robin"

UNUSED = POLICIES[0]
"""Policy in the fleets without host memory."""


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """The fleet that is enough, and what it is compared with.

    Attributes
    ----------
    fleet : Configuration
        The choice.
    result : Result
        Its result.
    best : Result
        The result of the fleet that saves most.
    by_turns : Result or None
        The result of the same engines behind ``round-robin``; None if not compared.
    twice : Result or None
        The result of the same fleet with twice the host memory; None if not compared.
    """

    fleet: Configuration
    result: Result
    best: Result
    by_turns: Result | None
    twice: Result | None


def saving(result: Result) -> float:
    """Return the share of the prefill that is saved; without a rate, that of the tokens."""
    return result.token_hit_ratio or 0.0 if result.saved is None else result.saved


def choose_fleet(
    results: Mapping[Configuration, Result], prices: Prices | None = None
) -> FleetChoice | None:
    """Choose the cheapest fleet that is enough.

    A fleet is enough if it saves within .01 of the best and, among those that do, gives 95 % of
    the first tokens within 1.25 times the least time. To each of these times its error is added: a
    router that is fast by chance does not win. Of equally cheap fleets, the policy is chosen as by
    `choose_policy`, then the router that is higher in the table.

    Parameters
    ----------
    results : mapping of Configuration to Result
        Fleets of one number of engines over one trace.
    prices : Prices, optional
        Without them the least host memory is cheapest, then the smallest tier.

    Returns
    -------
    FleetChoice or None
        None without fleets.
    """
    if not results:
        return None
    best = max(results.values(), key=saving)
    enough = [fleet for fleet in results if saving(results[fleet]) >= saving(best) - ENOUGH]
    times = {
        fleet: (results[fleet].ttft_p95 or 0.0) + p95_error(results[fleet]) for fleet in enough
    }
    enough = [fleet for fleet in enough if times[fleet] <= SLOWER * min(times.values())]
    least = min(_cost(fleet, prices) for fleet in enough)
    cheapest = [fleet for fleet in enough if _cost(fleet, prices) == least]
    most: dict[str, float] = {}
    for fleet in cheapest:
        most[fleet.policy] = max(most.get(fleet.policy, 0.0), saving(results[fleet]))
    policy = choose_policy(most, lambda *_: ENOUGH)
    chosen = min(
        (fleet for fleet in cheapest if fleet.policy == policy),
        key=lambda fleet: list(ROUTERS).index(fleet.spec.name),
    )
    return FleetChoice(
        chosen,
        results[chosen],
        best,
        results.get(replace(chosen, router=ROUND_ROBIN)),
        results.get(replace(chosen, host=2 * chosen.host)),
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
    return half_width([value - mean for value in values])


def cases_of(setup: Setup, unique_blocks: int) -> list[FleetCase]:
    """Return the fleets to compare over a trace with that many distinct blocks.

    The first are without offloading, one per router. A cache that holds all blocks never evicts, so
    no larger one is compared.
    """
    routers = dict.fromkeys((ROUND_ROBIN, *setup.routers))
    seeing = {one for one in routers if parse_router(one).options.get("sees") == "tier"}
    none, *memories = setup.memories()
    axes = memories, setup.tiers, dict.fromkeys(setup.policies), routers
    groups = GroupChunks.of_blocks(setup.block_tokens, block_bytes=setup.block_bytes)

    def blocks(memory: int) -> int:
        return min(setup.capacity(memory), max(1, unique_blocks))

    def fleet(memory: int, tier: FleetTier | None, policy: str, router: str) -> Configuration:
        return Configuration(
            engines=setup.engines,
            router=router,
            policy=policy,
            host=blocks(memory),
            device=blocks(setup.device_memory),
            tier=None if tier is None else Tier(tier.kind, blocks(tier.memory), tier.policy),
            rate=setup.rate,
            link=setup.link,
            tier_link=setup.tier_bandwidth,
            groups=groups,
            decode_ns=setup.decode_ns,
            slots=setup.slots,
            loop=setup.loop,
        )

    return [
        FleetCase(memory, tier, fleet(memory, tier, policy, router))
        for memory, tier, policy, router in itertools.chain(
            itertools.product([none], [None], [UNUSED], routers), itertools.product(*axes)
        )
        if tier is not None or router not in seeing or not any(setup.tiers)
    ]


def fleets_of(setup: Setup, unique_blocks: int) -> list[Configuration]:
    """Return the fleets to replay: those of `cases_of`, each once."""
    return list(dict.fromkeys(case.fleet for case in cases_of(setup, unique_blocks)))


@dataclass(frozen=True, slots=True)
class FleetCase:
    """A fleet, with its host memory and tier in bytes."""

    memory: int
    tier: FleetTier | None
    fleet: Configuration

    @property
    def offloads(self) -> bool:
        """Whether there is host memory."""
        return self.memory > 0


@dataclass(frozen=True, slots=True)
class FleetAdvice:
    """The advice that a trace gives on a fleet.

    Attributes
    ----------
    setup : Setup
        The question.
    facts : Facts
        Counts of the trace.
    cases : tuple of FleetCase
        The compared fleets, by memory, tier, policy and router.
    results : mapping of Configuration to Result
        The result of each.
    case : FleetCase
        The one of `candidates` that is enough, whether or not the trace suffices.
    offloading : FleetCase
        The one that is enough of those with host memory, likewise.
    reuse : float
        The share of the blocks that a cache without bounds would hit.
    objections : tuple of str
        Why the trace does not suffice for a recommendation; empty if it does.
    """

    setup: Setup
    facts: Facts
    cases: tuple[FleetCase, ...]
    results: Mapping[Configuration, Result] = field(repr=False)
    case: FleetCase
    offloading: FleetCase
    reuse: float
    objections: tuple[str, ...]

    @property
    def lacks_reuse(self) -> bool:
        """Whether a long enough trace has almost nothing that offloading could bring back."""
        return bool(self.objections) and self.facts.requests >= LEAST_REQUESTS

    @property
    def result(self) -> Result:
        """The result of the fleet that is enough."""
        return self.results[self.case.fleet]

    @property
    def pays(self) -> bool | None:
        """Whether offloading saves enough more than none to be recommended.

        None if the trace does not suffice, or if offloading saves tokens and no rate is known.
        """
        if self.objections or (self.case.offloads and self.setup.rate is None):
            return None
        return self.case.offloads

    @property
    def best(self) -> FleetCase:
        """The candidate that saves most; of equal ones the first."""
        return max(self.candidates, key=lambda case: saving(self.results[case.fleet]))

    @property
    def candidates(self) -> list[FleetCase]:
        """The cases that may be recommended; the others are compared with them."""
        return _candidates(self.cases, self.setup)

    @property
    def may_need_more(self) -> bool:
        """Whether the largest memory compared is needed, and does not hold all blocks."""
        most = self.setup.memories()[-1]
        return self.case.memory == most and self.setup.capacity(most) < self.facts.unique_blocks

    def like(
        self,
        *,
        memory: int | None = None,
        tier: FleetTier | Literal["same"] | None = "same",
        policy: str | None = None,
        router: str | None = None,
    ) -> Result | None:
        """Return the result of the fleet that is enough with a change; None if not compared.

        Without offloading, memory 0, tier and policy have no effect; if none is enough, other
        memories are those of `offloading`.
        """
        same = self.case if self.case.offloads or memory is None else self.offloading
        wanted = (
            same.memory if memory is None else memory,
            same.tier if tier == "same" else tier,
            same.fleet.policy if policy is None else policy,
            self.case.fleet.router if router is None else router,
        )
        if not wanted[0]:
            wanted = (0, None, UNUSED, wanted[3])
        for case in self.cases:
            if (case.memory, case.tier, case.fleet.policy, case.fleet.router) == wanted:
                return self.results[case.fleet]
        return None


def advise_fleet(
    recorded: RecordedTrace,
    setup: Setup,
    *,
    jobs: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Callable[[int], object] | None = None,
) -> FleetAdvice:
    """Replay a trace through every fleet and return the advice.

    Parameters
    ----------
    recorded : RecordedTrace
        The trace, with its arrivals.
    setup : Setup
        The question, with a number of engines; half of each memory must hold a block.
    jobs : int
        Number of processes that share the replays.
    elsewhere : Elsewhere, optional
        Other machines, which compute them instead.
    progress : callable, optional
        Called with the number of fleets done, out of those of `fleets_of`.

    Raises
    ------
    ValueError
        As `Configuration` and `Configuration.check_trace` do.
    """
    trace = recorded.trace
    cases = cases_of(setup, trace.unique_blocks)
    fleets = fleets_of(setup, trace.unique_blocks)
    fleets[0].check_trace(trace)
    found: dict[Configuration, Result] = {}
    for result in replay_all(trace, fleets, jobs=jobs, elsewhere=elsewhere, progress=progress):
        found[result.configuration] = result
    results = {fleet: found[fleet] for fleet in fleets}
    named = {case.fleet: results[case.fleet] for case in _candidates(cases, setup)}
    with_host = {fleet: result for fleet, result in named.items() if fleet.host}

    def enough(some: Mapping[Configuration, Result]) -> FleetCase:
        choice = choose_fleet(some, setup.prices)
        return next(case for case in cases if choice is None or case.fleet == choice.fleet)

    reuse = replay(trace, Configuration(policy=INFINITE, host=1)).hit_ratio
    return FleetAdvice(
        setup=setup,
        facts=recorded.facts(),
        cases=tuple(cases),
        results=results,
        case=enough(named),
        offloading=enough(with_host),
        reuse=reuse,
        objections=tuple(_objections(trace.num_requests, reuse, setup)),
    )


def _candidates(cases: Sequence[FleetCase], setup: Setup) -> list[FleetCase]:
    """Return the cases with a router that was named.

    If all of these see a tier, which needs host memory, those without offloading are added.
    """
    named = [case for case in cases if case.fleet.router in setup.routers]
    if all(case.offloads for case in named):
        named += [case for case in cases if not case.offloads]
    return named


def _objections(requests: int, reuse: float, setup: Setup) -> list[str]:
    if not requests:
        return ["the trace has no requests"]
    if reuse < LEAST_REUSE:
        return [reuse_objection(reuse, setup)]
    return too_few(requests)
