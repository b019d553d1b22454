"""A replay in which sessions wait for their answers: each request comes after the one before.

One engine computes prompts, one after the other, first come first served, at a rate; what its
caches hit need not be computed. A request that waits lets its session wait, so a cache that hits
more is asked more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from kvoffload import BlockHash, OffloadingManager

from .device import DeviceCache
from .fleet.arrivals import NONE, Arrivals
from .fleet.events import ARRIVAL, FINISH, NANOSECONDS, PREFILL_END, Events, duration
from .groups import GroupChunks
from .hints import Told
from .requests import DecodedTrace
from .results import DurationHistogram, LoopTimes, ReplayResult
from .serving import serve
from .simulate import COUNTED, PROGRESS_REQUESTS, Demand, counted

__all__ = ["ClosedLoop", "replay_closed"]

DECODE_NS = 20 * 10**6


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """How fast the engine of a closed loop is.

    Attributes
    ----------
    rate : int or None
        Tokens of prompts that it computes per second. None: requests take as long as recorded, and
        no times are found.
    decode_ns : int
        Nanoseconds for each token of an answer; answers do not wait for each other.
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

    A session's first request comes at its time, each later one its wait after the one before it has
    ended; one without a session comes at its time. With hints the clock is that of the loop.

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
        A model with one group, of a known block size where the loop has a rate.
    device_blocks : int
        Capacity of the accelerator's own cache; 0 for none.
    progress : callable, optional
        Called every 64 requests with the number of requests so far.

    Returns
    -------
    ReplayResult
        With the times of the loop where it has a rate.

    Raises
    ------
    ValueError
        If the trace has no arrivals, or the model several groups.
    """
    if trace.arrivals is None:
        raise ValueError("trace must have arrivals, got none")
    if not groups.is_plain:
        raise ValueError("groups must be one in a closed loop, got several")
    engine = _Engine(
        trace,
        keys,
        manager,
        DeviceCache(device_blocks, groups),
        block_tokens=groups.block_tokens,
        progress=progress,
    )
    found = _run(trace.arrivals, loop, engine.begin)
    demand = Demand(trace, groups, engine.on_device, np.zeros_like(engine.on_device))
    counts = {field: manager.stats()[name] for field, name in COUNTED.items()}  # type: ignore[attr-defined]
    everything = slice(0, trace.num_requests)
    result = counted(demand, everything, engine.hits * groups.block_tokens, **counts)
    result.times = engine.times
    result.loop = None if loop.rate is None else found.summary(engine.tokens)
    return result


class _Engine:
    """The caches of an engine, asked when it begins to compute a prompt.

    Nobody meets a store under way, as prompts are computed one after the other: a request is served
    as a whole when it begins.
    """

    def __init__(
        self,
        trace: DecodedTrace,
        keys: list[BlockHash],
        manager: OffloadingManager,
        device: DeviceCache,
        *,
        block_tokens: int,
        progress: Callable[[int], object] | None,
    ) -> None:
        self.hits = np.zeros(trace.num_requests, dtype=np.int64)
        self.on_device = np.zeros(trace.num_requests, dtype=np.int64)
        self.times = DurationHistogram()
        self.tokens = 0  # of prompts and answers
        self._keys = keys
        self._manager = manager
        self._device = device
        self._size = block_tokens
        self._progress = progress
        self._trace = trace
        self._starts, self._lengths = trace.starts.tolist(), trace.lengths.tolist()
        self._told: list[Told] | None = None
        if trace.hints is not None:
            self._told = list(trace.hints.of_each())

    def begin(self, row: int, now: int) -> int:
        """Serve a request at a time, nanoseconds; return the tokens that it has to compute."""
        blocks = self._trace.blocks[self._starts[row] : self._starts[row + 1]].tolist()
        hashes = [self._keys[block] for block in blocks]
        told = None
        if self._told is not None:
            told = self._told[row]._replace(now_s=now / NANOSECONDS)
        length = self._lengths[row] or len(blocks) * self._size
        on_device, _ = self._device.ask(hashes, length)
        start = perf_counter_ns()
        served = serve(self._manager, hashes, on_device, told)
        served.complete()
        self.times.add(perf_counter_ns() - start)
        self.on_device[row], self.hits[row] = on_device, served.hits
        if self._progress is not None and self.times.count % PROGRESS_REQUESTS == 0:
            self._progress(self.times.count)
        self.tokens += length
        found = (on_device + served.hits) * self._size
        return max(0, length - found)


@dataclass(slots=True)
class _Found:
    """Times of each request of a run, nanoseconds."""

    first_tokens: list[int]  # from its arrival to the end of its prefill
    latencies: list[int]  # from its arrival to its end
    prefill: int  # time in which prompts were computed
    span: int  # from the first arrival to the last end
    answers: int  # tokens

    def summary(self, prompt_tokens: int) -> LoopTimes:
        """Return the times in seconds, and what was done in one."""
        count, span = len(self.latencies), self.span / NANOSECONDS
        ordered = sorted(self.first_tokens)
        return LoopTimes(
            ttft_p50=_nearest_rank(ordered, 50) / NANOSECONDS,
            ttft_p95=_nearest_rank(ordered, 95) / NANOSECONDS,
            ttft_mean=sum(ordered) / count / NANOSECONDS,
            latency_mean=sum(self.latencies) / count / NANOSECONDS,
            requests_per_second=count / span if span else 0.0,
            tokens_per_second=(prompt_tokens + self.answers) / span if span else 0.0,
            busy=self.prefill / self.span if self.span else 0.0,
        )


def _nearest_rank(ordered: list[int], percent: int) -> int:
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def _run(arrivals: Arrivals, loop: ClosedLoop, begin: Callable[[int, int], int]) -> _Found:
    """Let all requests come, be computed and end; `begin` is asked as each begins."""
    recorded, wait, service = (
        column.tolist() for column in (arrivals.recorded, arrivals.wait, arrivals.service)
    )
    answers, following = arrivals.answers.tolist(), arrivals.following.tolist()
    arrived, first_tokens, latencies = ([0] * arrivals.num_requests for _ in range(3))
    events, queue, is_computing, prefill, now = Events(), deque[int](), False, 0, 0
    for row in arrivals.first():
        events.push(recorded[row], ARRIVAL, row)
    while events:
        now, kind, row = events.pop()
        next_row = following[row]
        if kind == ARRIVAL:
            arrived[row] = now
            queue.append(row)
            if loop.rate is None and next_row != NONE:
                events.push(now + service[row] + wait[next_row], ARRIVAL, next_row)
        elif kind == PREFILL_END:
            is_computing = False
            first_tokens[row] = now - arrived[row]
            answer = 0 if loop.rate is None else answers[row] * loop.decode_ns
            events.push(now + answer, FINISH, row)
        else:
            latencies[row] = now - arrived[row]
            if loop.rate is not None and next_row != NONE:
                events.push(now + wait[next_row], ARRIVAL, next_row)
        if queue and not is_computing:
            row = queue.popleft()
            is_computing = True
            needed = duration(begin(row, now), loop.rate)
            prefill += needed
            events.push(now + needed, PREFILL_END, row)
    return _Found(first_tokens, latencies, prefill, now - min(arrived), sum(answers))
