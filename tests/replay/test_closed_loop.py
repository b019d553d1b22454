"""Closed loops: what sessions wait for, against a second program, and what bounds it."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
from kvoffload.replay.arrivals import Arrivals, NoSessionsError
from kvoffload.replay.events import (
    ARRIVAL,
    FINISH,
    INDEX_HEARS,
    PREFILL_END,
    Events,
    duration,
)
from kvoffload.traces import Request

TOKENS = 16
MS = 10**6

rows = st.lists(
    st.builds(
        Request,
        st.integers(0, 400),
        st.integers(0, 90),
        st.integers(0, 9),
        st.lists(st.integers(0, 12), max_size=6, unique=True).map(tuple),
        st.sampled_from([None, "a", "b", "c"]),
        think=st.sampled_from([None, None, 0, 7, 2.5]),
        service=st.sampled_from([None, 0, 30]),
    ),
    min_size=1,
    max_size=14,
).map(
    lambda some: [
        *some,
        Request(3, 20, 1, (1,), "d"),
        Request(9, 40, 2, (1, 2), "d"),
    ]
)


def looped(**settings):
    """Return the configuration of a closed loop, with host memory of 6 slots by default."""
    groups = GroupChunks.of_blocks(TOKENS)
    return Configuration(**{"host": 6, "groups": groups, "loop": "closed"} | settings)


def closed(requests, hints=None, **settings):
    """Replay a closed loop; return its result."""
    return replay(DecodedTrace.of(requests, arrivals=True, hints=hints), looped(**settings))


def use(cache, keys):
    """Make the keys that a cache has its most recent, the first last."""
    for key in reversed(keys):
        if key in cache:
            cache.remove(key)
            cache.append(key)


def found_and_stored(cache, keys, capacity):
    """Serve a prompt by LRU, oldest first in a list; return how many leading keys it had."""
    use(cache, keys)
    found = 0
    while found < len(keys) and keys[found] in cache:
        found += 1
    missing = [key for key in keys if key not in cache]
    idle = [key for key in cache if key not in keys]
    short = max(0, len(missing) + len(cache) - capacity)
    if short <= len(idle):
        for key in idle[:short]:
            cache.remove(key)
        cache += missing
    use(cache, keys)
    return found


def naively(requests, capacity, rate, decode_ns):
    """Walk through time in small steps of thought: lists, no heap, LRU as a list of ids.

    Returns hits in blocks, first-token times and latencies by row, and the time in prefill.
    """
    order = sorted(range(len(requests)), key=lambda row: (requests[row].timestamp, row))
    before, last = {}, {}
    for row in order:
        session = requests[row].session
        if session is not None:
            before[row] = last.get(session)
            last[session] = row
    arrival = {}
    for row in order:
        if before.get(row) is None:
            arrival[row] = requests[row].timestamp * MS
    ended, begun, cache, free_at = {}, {}, [], 0
    hits = prefill = 0
    first, latency = {}, {}
    while len(ended) < len(requests):
        # Of the requests that have not begun, the one that arrived first; of two at once the one
        # recorded first.
        row = min((row for row in order if row in arrival and row not in begun), key=arrival.get)
        when = arrival[row]
        request = requests[row]
        start = max(when, free_at)
        keys = list(request.hash_ids)
        length = request.input_length or len(keys) * TOKENS
        found = found_and_stored(cache, keys, capacity)
        missed = max(0, length - found * TOKENS)
        needed = math.ceil(Fraction(missed * 10**9, rate))
        begun[row], free_at = start, start + needed
        hits += found
        prefill += needed
        first[row] = free_at - when
        ended[row] = free_at + request.output_length * decode_ns
        latency[row] = ended[row] - when
        for other, its in before.items():
            if its == row:
                think = requests[other].think
                gap = requests[other].timestamp - request.timestamp if think is None else think
                arrival[other] = ended[row] + round(gap * MS)
    return hits, first, latency, prefill


@given(
    requests=rows, rate=st.sampled_from([1, 90, 1000, 10**6]), decode=st.sampled_from([0, 5, 20])
)
@example(  # two arrive after a millisecond, of which the second in the trace was recorded first
    requests=[
        Request(3, 32, 0, (1, 0), "b", think=0),
        Request(1, 32, 0, (1, 2), "a"),
        Request(0, 16, 0, (0,), "b"),
    ],
    rate=16_000,
    decode=0,
)
def test_a_second_program_agrees(requests, rate, decode) -> None:
    result = closed(requests, rate=rate, decode_ns=decode * MS)
    hits, first, latency, prefill = naively(requests, 6, rate, decode * MS)
    assert result.hits == hits
    ordered = sorted(first.values())
    count = len(ordered)
    assert result.ttft_p50 == ordered[math.ceil(count * 0.5) - 1] / 1e9
    assert result.ttft_p95 == ordered[math.ceil(count * 0.95) - 1] / 1e9
    assert result.ttft_mean == sum(ordered) / count / 1e9
    assert result.latency_mean == sum(latency.values()) / count / 1e9
    assert result.log["host"].sum() == hits * TOKENS
    assert (result.log["first"] - result.log["arrival"]).tolist() == [
        first[row] for row in range(count)
    ]
    if result.busy is None:  # nothing took any time
        assert not any(latency.values())
    else:
        assert (result.busy > 0) == (prefill > 0)
        assert 0 <= result.busy <= 1


@pytest.mark.parametrize("policy", ["lru", "arc", "hit-density"])
@pytest.mark.parametrize("device", [0, 3])
@given(requests=rows)
def test_without_waits_it_is_the_open_replay(policy, device, requests) -> None:
    plain = [
        Request(row.timestamp, row.input_length, row.output_length, row.hash_ids, row.session)
        for row in sorted(requests, key=lambda row: row.timestamp)
    ]
    found = closed(plain, policy=policy, device=device, loop="recorded")
    opened = looped(policy=policy, device=device, loop="open")
    assert found == replace(replay(plain, opened), configuration=found.configuration)
    assert found.ttft_mean is None


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
    events = Events()
    for event in [
        (5, ARRIVAL, 0, 0),
        (5, FINISH, 0, 9),
        (5, PREFILL_END, 0, 3),
        (4, ARRIVAL, 0, 7),
        (5, FINISH, 1, 2),
        (5, INDEX_HEARS, 0, 1),
    ]:
        events.push(*event)
    events.push(5, ARRIVAL, 0, 1)
    taken = []
    while events:
        taken.append(events.pop())
    assert taken == [
        (4, ARRIVAL, 0, 7),
        (5, FINISH, 0, 9),
        (5, FINISH, 1, 2),
        (5, PREFILL_END, 0, 3),
        (5, INDEX_HEARS, 0, 1),
        (5, ARRIVAL, 0, 0),
        (5, ARRIVAL, 0, 1),
    ]
    assert duration(1, 3) == 333333334
    assert duration(10**18, 10**9) == 10**18
    assert duration(0, 7) == 0
    assert duration(5, None) == 0
    assert Arrivals.of(
        [Request(0.0000005, 1, 0, (), "a"), Request(0.0000015, 1, 0, (), "a")]
    ).recorded.tolist() == [0, 2]


def test_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(NoSessionsError, match="must have sessions of several requests, got 2"):
        closed([Request(0, 1, 0, (), "a"), Request(1, 1, 0, ())], rate=5)
    with pytest.raises(ValueError, match="times must be below"):
        Arrivals.of([Request(2**62, 1, 0, (), "a"), Request(2**62, 1, 0, (), "a")])
    trace = DecodedTrace.of([Request(0, 1, 0, (1,), "a")])
    with pytest.raises(ValueError, match="trace must have arrivals"):
        replay(trace, looped(rate=5))


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
    replay(trace, looped(rate=100), manager=manager)
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
