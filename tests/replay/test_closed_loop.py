"""Closed loops, worked by hand; ``test_fleet`` compares them with a second program."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload import BlockHash, CPUOffloadingManager, Hints, LRUCachePolicy
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    GroupChunks,
    HintOptions,
    replay,
    replay_all,
)
from kvoffload.replay.arrivals import Arrivals
from kvoffload.replay.events import (
    ARRIVAL,
    FINISH,
    INDEX_HEARS,
    PREFILL_END,
    duration,
)
from kvoffload.traces import Request, TraceError

TOKENS = 16
MS = 10**6


def looped(**settings):
    """Return the configuration of a closed loop, with host memory of 6 slots by default."""
    groups = GroupChunks.of_blocks(TOKENS)
    return Configuration(**{"host": 6, "groups": groups, "loop": "closed"} | settings)


def closed(requests, **settings):
    """Replay a closed loop; return its result."""
    return replay(DecodedTrace.of(requests, arrivals=True), looped(**settings))


def test_each_request_waits_for_the_one_before() -> None:
    requests = [
        Request(0, 32, 2, (1, 2), "a"),
        Request(1000, 48, 0, (1, 2, 3), "a", think=500),
        Request(1000, 16, 1, (9,)),
    ]
    # 32 tokens at 16 a second: 2 s, two tokens of answer 40 ms; then half a second of thought.
    times = closed(requests, rate=16)
    # The request without a session waits from 1 s for the end of the first prefill, then 1 s.
    assert times.ttft_mean == pytest.approx((2.0 + 2.0 + (3.0 - 2.54) + 1.0) / 3)
    assert times.latency_mean == pytest.approx((2.04 + 2.02 + (3.0 - 2.54) + 1.0) / 3)
    assert times.requests_per_second == pytest.approx(3 / 4.0)
    assert times.tokens_per_second == pytest.approx((32 + 48 + 16 + 3) / 4.0)
    assert times.busy == pytest.approx(1.0)


def test_recorded_times_are_those_of_arrival_and_service() -> None:
    requests = [
        Request(5, 16, 0, (1,), "a", service=10),
        Request(90, 16, 0, (1,), "a", think=7, service=3),
        Request(20, 16, 0, (2,), "b"),
        Request(24, 16, 0, (2,), "b"),
    ]
    arrivals = Arrivals.of(requests)
    assert arrivals.recorded.tolist() == [5 * MS, 90 * MS, 20 * MS, 24 * MS]
    assert arrivals.wait.tolist() == [0, 7 * MS, 0, 4 * MS]
    assert arrivals.service.tolist() == [10 * MS, 3 * MS, 0, 0]
    assert arrivals.following.tolist() == [1, -1, 3, -1]
    assert arrivals.session_names() == [b"a", b"b"]


def test_order_and_rounding_of_times() -> None:
    assert FINISH < PREFILL_END < INDEX_HEARS < ARRIVAL
    assert duration(1, 3) == 333333334
    assert duration(10**18, 10**9) == 10**18
    assert duration(0, 7) == 0
    assert duration(5, None) == 0
    assert Arrivals.of(
        [Request(0.0000005, 1, 0, (), "a"), Request(0.0000015, 1, 0, (), "a")]
    ).recorded.tolist() == [0, 2]
    with pytest.raises(TraceError, match=r"^the trace: times must be below"):
        Arrivals.of([Request(2**62, 1, 0, (), "a"), Request(2**62, 1, 0, (), "a")])


class Clock(LRUCachePolicy):
    """A policy that notes when its requests begin, as the hints told it."""

    heard: list = []

    def begun(self, hashes: list[BlockHash], hints: Hints | None = None) -> None:
        self.heard.append(hints)
        super().begun(hashes, hints)


def test_hints_are_told_in_the_loop() -> None:
    requests = [Request(0, 16, 0, (1,), "a"), Request(50, 16, 0, (1,), "a")]
    Clock.heard.clear()
    trace = DecodedTrace.of(requests, arrivals=True, hints=HintOptions(told="expect"))
    manager = CPUOffloadingManager(TOKENS, 4, Clock)
    replay(trace, looped(host=4, rate=100), manager=manager)
    assert [hints.expect_s for hints in Clock.heard] == [0.05, 0.05]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_grid_of_closed_loops(jobs: int) -> None:
    requests = [Request(at, 32, 1, (at % 5, 7), f"s{at % 3}") for at in range(40)]
    trace = DecodedTrace.of(requests, arrivals=True)
    cells = [
        looped(policy=policy, host=size, rate=400)
        for policy in ("lru", "infinite")
        for size in (2, 6)
    ]
    found = {one.configuration: one for one in replay_all(trace, cells, jobs=jobs)}
    assert set(found) == set(cells)
    assert all(one == replay(trace, cell) for cell, one in found.items())
    small, large, first, second = (found[cell] for cell in cells)
    assert first == replace(second, configuration=first.configuration)
    assert first.hits == large.hits > small.hits  # all six blocks fit
