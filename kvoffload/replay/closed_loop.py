"""A replay in which sessions wait for their answers before their next request.

One engine computes prompts one at a time, first come first served, at a rate; blocks that its
caches hit are not computed. A waiting request delays its session, so a cache with more hits
receives more requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvoffload import BlockHash, OffloadingManager

from .fleet.counts import Log
from .fleet.engine import Engine
from .fleet.events import NANOSECONDS
from .fleet.fleet import DECODE_NS, Fleet, run_engines
from .fleet.routers import new_router
from .fleet.rows import FleetRows
from .groups import GroupChunks
from .requests import DecodedTrace
from .results import LoopTimes, ReplayResult, nearest_rank
from .simulate import COUNTED, PROGRESS_REQUESTS, Demand, counted

__all__ = ["ClosedLoop", "replay_closed"]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """The speed of the engine of a closed loop.

    Attributes
    ----------
    rate : int or None
        Prompt tokens computed per second. None: requests take as long as recorded, and no times are
        measured.
    decode_ns : int
        Nanoseconds per token of an answer; answers do not wait for each other.
    """

    rate: int | None
    decode_ns: int = DECODE_NS


def replay_closed(
    trace: DecodedTrace,
    keys: list[BlockHash],
    manager: OffloadingManager,
    loop: ClosedLoop,
    *,
    groups: GroupChunks,
    device_blocks: int = 0,
    progress: Callable[[int], object] | None = None,
) -> ReplayResult:
    """Replay a trace in a closed loop.

    A session's first request arrives at its recorded time, each later one after its wait from the
    end of the previous one; a request without a session arrives at its recorded time. Of requests
    that arrive at the same time, the one recorded first is served first, and of those recorded at
    the same time the first in the trace. With hints the clock is that of the loop.

    Parameters
    ----------
    trace : DecodedTrace
        The requests, with their `arrivals`.
    keys : list of BlockHash
        ``trace.keys()``.
    manager : OffloadingManager
        An empty manager with the counters of ``stats``.
    loop : ClosedLoop
        The engine.
    groups : GroupChunks
        A model with one group, of a known block size if the loop has a rate.
    device_blocks : int
        Capacity of the accelerator's own cache; 0 for none.
    progress : callable, optional
        Called every 64 requests with the number of requests so far.

    Returns
    -------
    ReplayResult
        With the times of the loop if it has a rate.

    Raises
    ------
    ValueError
        If the trace has no arrivals or no sessions, or the model several groups.
    """
    if not groups.is_plain:
        raise ValueError("groups must be one in a closed loop, got several")
    fleet = Fleet(
        engines=1,
        host_blocks=0,  # the caller owns the manager
        rate=loop.rate,
        block_tokens=groups.block_tokens,
        decode_ns=loop.decode_ns,
        loop="recorded" if loop.rate is None else "closed",
    )
    fleet.check_trace(trace)
    rows = FleetRows(trace, keys, groups.block_tokens)
    engine = Engine(rows, device_blocks, manager)
    router = new_router(fleet.spec, rows, 1, costs=fleet.costs)
    log = run_engines(trace, rows, fleet, [engine], router, progress=_regularly(progress))
    demand = Demand(trace, groups, *(np.zeros(len(rows), dtype=np.int64) for _ in range(2)))
    demand.device_hits[rows.order] = log.device
    hits = np.zeros(len(rows), dtype=np.int64)
    hits[rows.order] = log.host
    counts = {field: manager.stats()[name] for field, name in COUNTED.items()}  # type: ignore[attr-defined]
    everything = slice(0, trace.num_requests)
    result = counted(demand, everything, hits * groups.block_tokens, **counts)
    result.times = engine.times
    result.loop = None if loop.rate is None else _times(log, sum(rows.lengths), sum(rows.answers))
    return result


def _regularly(progress: Callable[[int], object] | None) -> Callable[[], object] | None:
    """Return a function to call after each request, which calls `progress` every 64."""
    if progress is None:
        return None
    counts = itertools.count(1)

    def one_more() -> None:
        count = next(counts)
        if count % PROGRESS_REQUESTS == 0:
            progress(count)

    return one_more


def _times(log: Log, prompt_tokens: int, answer_tokens: int) -> LoopTimes:
    """Return the times in seconds, and the rates per second."""
    count, span = len(log.latencies), log.span / NANOSECONDS
    ordered = sorted(log.first_tokens)
    return LoopTimes(
        ttft_p50=nearest_rank(ordered, 50) / NANOSECONDS,
        ttft_p95=nearest_rank(ordered, 95) / NANOSECONDS,
        ttft_mean=sum(ordered) / count / NANOSECONDS,
        latency_mean=sum(log.latencies) / count / NANOSECONDS,
        requests_per_second=count / span if span else 0.0,
        tokens_per_second=(prompt_tokens + answer_tokens) / span if span else 0.0,
        busy=sum(log.prefill) / log.span if span else 0.0,
    )
