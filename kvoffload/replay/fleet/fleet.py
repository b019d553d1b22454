"""A fleet: engines behind a router, their requests in simulated time.

An engine computes one prompt at a time, first come first served. Blocks that its caches hit are
read instead: from host memory, and from a tier behind it, private or shared by all. The router
sends each request to an engine when it arrives. The how-to lists what the model omits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import numpy as np

from kvoffload import BlockHash, CPUOffloadingManager
from kvoffload.errors import describe
from kvoffload.replay.arrivals import NONE
from kvoffload.replay.hints import Told
from kvoffload.replay.policies import is_own, new_manager, new_miniature
from kvoffload.replay.requests import DecodedTrace

from .counts import FleetResult, Log
from .engine import Engine, RowEngine
from .events import ARRIVAL, FINISH, INDEX_HEARS, NANOSECONDS, PREFILL_END, Events, duration
from .index import DEVICE, Change
from .routers import Costs, Router, RouterSpec, new_router, parse_router
from .rows import FleetRows

__all__ = [
    "DECODE_NS",
    "MOST_ENGINES",
    "Fleet",
    "Loop",
    "Tier",
    "replay_fleet",
    "replay_rows",
    "run_engines",
]

MOST_ENGINES = 256
DECODE_NS = 20 * 10**6
_NS_A_MS = 10**6

Loop = Literal["open", "closed", "recorded"]
"""Arrivals of a session's later requests: as recorded; each after its wait from the finish of the
previous one; or after its wait and the recorded service from the arrival of the previous one."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier behind host memory.

    Attributes
    ----------
    kind : {"shared", "private"}
        One tier for all engines, or one per engine.
    blocks : int
        Its capacity; per engine if it is private.
    policy : str
        Its policy.
    """

    kind: Literal["shared", "private"]
    blocks: int
    policy: str = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines behind a router.

    Attributes
    ----------
    engines : int
        Number of engines, 1 to 256.
    router : str
        ``name`` or ``name?option=value&...``; see `kvoffload.replay.fleet.ROUTERS`.
    policy : str
        The policy of host memory.
    host_blocks, device_blocks : int
        Capacity of each engine's host memory, and of its accelerator's own cache, blocks.
    tier : Tier or None
        The tier behind host memory.
    rate : int or None
        Prompt tokens that an engine computes per second; None: no time passes.
    link, tier_link : int or None
        Bytes per second from host memory and from the tier; None: at once.
    block_bytes, block_tokens : int
        Bytes and tokens of a block.
    decode_ns : int
        Nanoseconds per token of an answer, with a rate; answers do not wait for each other.
    slots : int
        Most requests of an engine between the beginning of their prefill and their finish; 0:
        unlimited.
    loop : {"open", "closed", "recorded"}
        Arrivals of a session's later requests.
    seed : int
        Seed of the router's random choices.

    Raises
    ------
    ValueError
        If a value breaks its rule, or the router needs a tier or a rate that is missing.
    """

    engines: int
    router: str = "round-robin"
    policy: str = "lru"
    host_blocks: int
    device_blocks: int = 0
    tier: Tier | None = None
    rate: int | None = None
    link: int | None = None
    tier_link: int | None = None
    block_bytes: int = 0
    block_tokens: int = 1
    decode_ns: int = DECODE_NS
    slots: int = 0
    loop: Loop = "open"
    seed: int = 0
    spec: RouterSpec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.engines <= MOST_ENGINES:
            raise ValueError(f"engines must be 1 ... {MOST_ENGINES}, got {describe(self.engines)}")
        spec = parse_router(self.router)
        object.__setattr__(self, "spec", spec)
        if spec.options.get("sees") == "tier" and self.tier is None:
            raise ValueError(f"router {self.router!r} must have a tier to see, got none")
        if spec.options.get("lag_ms", 0) and self.rate is None:
            raise ValueError(f"router {self.router!r} must have a rate for its lag, got none")

    @property
    def costs(self) -> Costs:
        """The costs of computing and reading."""
        return Costs(self.rate, self.link, self.tier_link, self.block_bytes)

    def check_trace(self, trace: DecodedTrace) -> None:
        """Raise if a trace cannot be replayed: without times, or without sessions for a loop."""
        if trace.arrivals is None:
            raise ValueError("trace must have arrivals, got none")
        if self.loop != "open":
            trace.arrivals.check_sessions()
        if self.rate is not None and not trace.arrivals.recorded.any():
            raise ValueError("trace must have times of arrival with a rate, got 0 in all requests")


def replay_fleet(trace: DecodedTrace, keys: list[BlockHash], fleet: Fleet) -> FleetResult:
    """Replay a trace through a fleet.

    Parameters
    ----------
    trace : DecodedTrace
        The requests, with their `arrivals`; host memory receives its hints.
    keys : list of BlockHash
        ``trace.keys()``, computed once for many calls.
    fleet : Fleet
        The engines.

    Returns
    -------
    FleetResult

    Raises
    ------
    ValueError
        As from `Fleet.check_trace`; `NoSessionsError` if a loop has no sessions.

    Complexity: O(blocks) besides the policy; with an index O(blocks + engines) per request.
    """
    fleet.check_trace(trace)
    return replay_rows(trace, FleetRows(trace, keys, fleet.block_tokens), fleet)


def replay_rows(trace: DecodedTrace, rows: FleetRows, fleet: Fleet) -> FleetResult:
    """Replay a trace whose requests are already numbered, as `replay_fleet` does."""
    router = new_router(
        fleet.spec,
        rows,
        fleet.engines,
        costs=fleet.costs,
        seed=fleet.seed,
        shared_tier=fleet.tier is not None and fleet.tier.kind == "shared",
    )
    engines = list(_engines(fleet, rows, has_hints=trace.hints is not None))
    log = run_engines(trace, rows, fleet, engines, router)
    uncached = None
    if fleet.rate is not None:
        uncached = sum(duration(length, fleet.rate) for length in rows.lengths)
    stored = [(engine.host_stored, engine.tier_stored) for engine in engines]
    liars = None
    if trace.hints is not None:
        hits = np.empty_like(rows.order)
        hits[rows.order] = log.found()
        liars = trace.hints.of_liars(np.diff(trace.starts), hits)
    return FleetResult.of(
        log, rows.lengths, trace.num_blocks, stored, uncached_ns=uncached, liars=liars
    )


def _engines(fleet: Fleet, rows: FleetRows, *, has_hints: bool) -> Iterator[Engine | RowEngine]:
    behind: CPUOffloadingManager | None = None
    device, sees = fleet.device_blocks, fleet.spec.sees or DEVICE
    for _ in range(fleet.engines):
        if fleet.tier is None and not has_hints and not is_own(fleet.policy):
            host = new_miniature(fleet.policy, fleet.host_blocks)
            yield RowEngine(rows, device, host, sees=sees)
            continue
        host = new_manager(fleet.policy, fleet.host_blocks)
        if fleet.tier is not None:
            host.policy._set_declining(False)
            if behind is None or fleet.tier.kind == "private":
                behind = new_manager(fleet.tier.policy, fleet.tier.blocks)
        yield Engine(rows, device, host, behind, sees=sees)


def run_engines(
    trace: DecodedTrace,
    rows: FleetRows,
    fleet: Fleet,
    engines: Sequence[Engine | RowEngine],
    router: Router,
    *,
    progress: Callable[[], object] | None = None,
) -> Log:
    """Let all rows arrive, be computed and finish; return their log.

    `progress` is called after each row's prefill.
    """
    log = Log(len(rows))
    told: list[Told] | None = None
    if trace.hints is not None:
        told = list(trace.hints.of_each())
        told = [told[place] for place in rows.order.tolist()]
    costs, size, loop = fleet.costs, rows.block_tokens, fleet.loop
    lag = round(Fraction(str(fleet.spec.options.get("lag_ms", 0))) * _NS_A_MS)
    wait, following = rows.wait, rows.following
    queues = [deque[int]() for _ in engines]
    is_computing, running = [False] * len(engines), [0] * len(engines)
    messages: dict[int, tuple[int, list[Change]]] = {}
    events, published = Events(), 0

    has_before = {row for row in following if row != NONE} if loop != "open" else set()
    coming = (row for row in range(len(rows)) if row not in has_before)

    def let_one_come() -> None:  # rows are in the order of their arrival: one at a time is enough
        for row in coming:
            events.push(rows.recorded[row], ARRIVAL, 0, row)
            break

    let_one_come()
    while events:
        now, kind, place, row = events.pop()
        if kind == INDEX_HEARS:
            engine, changes = messages.pop(place)
            router.hear(engine, changes)
            continue
        if kind == ARRIVAL:
            if row not in has_before:
                let_one_come()
            engine = router.route(row)
            log.engines[row], log.arrived[row] = engine, now
            queues[engine].append(row)
            after = following[row]
            if loop == "recorded" and after != NONE:
                events.push(now + rows.service[row] + wait[after], ARRIVAL, 0, after)
        elif kind == PREFILL_END:
            engine = place
            changes = engines[engine].end()
            is_computing[engine] = False
            log.first_tokens[row] = now - log.arrived[row]
            router.prefilled(row, engine)
            if lag:
                messages[published] = engine, changes
                events.push(now + lag, INDEX_HEARS, published, row)
                published += 1
            else:
                router.hear(engine, changes)
            answer = 0 if fleet.rate is None else rows.answers[row] * fleet.decode_ns
            events.push(now + answer, FINISH, engine, row)
            if progress is not None:
                progress()
        else:
            engine = place
            running[engine] -= 1
            log.latencies[row], log.ended = now - log.arrived[row], now
            router.finishes(row, engine)
            after = following[row]
            if loop == "closed" and after != NONE:
                events.push(now + wait[after], ARRIVAL, 0, after)
        queue = queues[engine]
        if queue and not is_computing[engine] and not 0 < fleet.slots <= running[engine]:
            row = queue.popleft()
            is_computing[engine] = True
            running[engine] += 1
            router.begins(engine)
            said = None if told is None else told[row]._replace(now_s=now / NANOSECONDS)
            length = rows.lengths[row]
            hits = engines[engine].begin(row, said)
            missed = max(0, length - sum(hits) * size)
            needed = costs.prefill_ns(missed, hits.host, hits.tier)
            log.begins(row, hits, missed, needed)
            events.push(now + needed, PREFILL_END, engine, row)
    return log
