"""Fleets: against a second, naive program, published cells, and what bounds them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    GroupChunks,
    Tier,
    replay,
)
from kvoffload.replay.arrivals import NoSessionsError
from kvoffload.replay.loop import Replays
from kvoffload.replay.routers import ROUTERS, parse_router
from kvoffload.traces import Request, TraceError
from tests.conftest import read_budget
from tests.strategies import LETTERS

from . import test_golden as golden
from .naive_fleet import Simulation, nearest_rank

TOKENS = 16
MS = 10**6
COUNTS = ("device_hits", "host_hits", "tier_hits", "missed_tokens", "stored", "tier_stored")
SUMMED = ("asked", "hits", "loaded", "evicted", "refused", "not_admitted", "hit_tokens")
OF_TIMES = (
    *("saved", "ttft_p50", "ttft_p95", "ttft_mean", "latency_mean"),
    *("requests_per_second", "tokens_per_second", "busy"),
)

rows = st.lists(
    st.builds(
        Request,
        st.sampled_from([0, 0, 1, 1, 2.5, 0.0000025, 10, 40, 41, 300]),
        st.sampled_from([0, 0, 1, 40, 95]),
        st.integers(0, 9),
        st.lists(st.integers(0, 14), max_size=7, unique=True).map(tuple),
        st.sampled_from([None, "a", "b", "c", "d"]),
        think=st.sampled_from([None, None, 0, 7, 2.5]),
        service=st.sampled_from([None, 0, 30]),
    ),
    min_size=1,
    max_size=16,
).map(
    lambda some: [*some, Request(3, 20, 1, (1,), "e"), Request(9, 40, 2, (1, 2), "e")],
)
routers = st.sampled_from(
    [
        *ROUTERS,
        "session?blocks=1",
        "sticky?blocks=2",
        "prefix?abs=1&rel=1",
        "prefix?abs=0&rel=1.5&threshold=.3&index_blocks=4",
        "prefix?threshold=0&index_blocks=2",
        "scored?prefix=.7&queue=1&index_blocks=3",
        "scored?match_blocks=2",
        "events?lag_ms=3&host=50&tier=10",
        "events?sees=device&ahead=0",
        "events?sees=tier&prefix=1.5",
        "cost?sees=tier&weight=.3",
        "cost?ahead=1&lag_ms=20",
        "earliest?sees=tier",
        "earliest?sees=device&ahead=1&lag_ms=1",
    ]
)
fleets = st.builds(
    Configuration,
    engines=st.integers(1, 5),
    router=st.just("round-robin"),
    policy=st.sampled_from(["lru", "arc", "lru", "hit-density"]),
    host=st.integers(0, 12),
    device=st.sampled_from([0, 0, 2, 6]),
    tier=st.none()
    | st.builds(
        Tier,
        st.sampled_from(["shared", "private"]),
        st.integers(1, 20),
        st.sampled_from(["lru", "arc", "hit-density"]),
    ),
    rate=st.sampled_from([None, 100, 3000, 10**6]),
    link=st.sampled_from([None, 10**6, 10**9]),
    tier_link=st.sampled_from([None, 10**5]),
    groups=st.just(GroupChunks.of_blocks(TOKENS, block_bytes=1000)),
    decode_ns=st.sampled_from([0, MS]),
    slots=st.sampled_from([0, 0, 1, 2]),
    loop=st.sampled_from(["open", "open", "closed", "recorded"]),
    seed=st.integers(0, 3),
)


BLOCKS = GroupChunks.of_blocks(16)


def is_possible(router, fleet):
    """Return whether a fleet can have a router."""
    options = parse_router(router).options
    sees_nothing = options.get("sees") == "tier" and fleet.tier is None
    return not sees_nothing and not (options.get("lag_ms") and fleet.rate is None)


def replayed(requests, fleet):
    """Replay requests through a fleet."""
    return replay(DecodedTrace.of(requests, arrivals=True), fleet)


def compare(requests, fleet):
    """Check that a fleet does what the naive one does."""
    found, naive = replayed(requests, fleet), Simulation(requests, fleet).run()
    rows = naive.rows
    placed = b"".join(row.engine.to_bytes(2, "little") for row in rows)
    assert found.placement == hashlib.sha256(placed).hexdigest()[:12]
    for number, one in enumerate((found, *found.engines), start=-1):
        own = [row for row in rows if number in (-1, row.engine)]
        assert one.requests == len(own)
        assert one.tokens == sum(row.length for row in own)
        for name in COUNTS:
            assert getattr(one, name) == sum(getattr(row, name) for row in own), name
    assert len(found.engines) == (fleet.engines if fleet.engines > 1 else 0)
    for name in SUMMED if found.engines else ():
        assert getattr(found, name) == sum(getattr(one, name) for one in found.engines), name
    assert found.hit_tokens == found.tokens - found.missed_tokens
    assert found.hits == found.host_hits + found.tier_hits
    assert found.asked == found.blocks - found.device_hits
    most = max(one.missed_tokens for one in found.engines or [found])
    missed = found.missed_tokens
    assert found.imbalance == (most * fleet.engines / missed if missed else 1)
    ttft, latencies = [row.ttft for row in rows], [row.finish - row.arrival for row in rows]
    assert found.ttft_p95_ns == nearest_rank(ttft, 95)
    of_rows = [row.missed_tokens for row in rows]
    assert found.missed_p50 == nearest_rank(of_rows, 50)
    assert found.missed_p95 == nearest_rank(of_rows, 95)
    if fleet.rate is not None:
        span = (max(row.finish for row in rows) - min(row.arrival for row in rows)) / 1e9
        tokens = sum(row.length + row.output for row in rows)
        assert found.requests_per_second == pytest.approx(len(rows) / span)
        assert found.tokens_per_second == pytest.approx(tokens / span)
        assert found.ttft_mean == pytest.approx(sum(ttft) / len(rows) / 1e9)
        assert found.saved == pytest.approx(naive.saved())
        assert found.busy == (None if naive.busy() is None else pytest.approx(naive.busy()))
        assert found.latency_mean == pytest.approx(sum(latencies) / len(requests) / 1e9)
    assert found.log["engine"].tolist() == [row.engine for row in rows]
    assert (found.log["first"] - found.log["arrival"]).tolist() == ttft
    assert (found.log["end"] - found.log["arrival"]).tolist() == latencies
    for name in ("stored", "tier_stored"):
        assert found.log[name].tolist() == [getattr(row, name) for row in rows], name


@settings(max_examples=max(40, round(150 * read_budget())), deadline=None)
@given(requests=rows, fleet=fleets, router=routers)
@example(  # two arrive after a millisecond, of which the second in the trace was recorded first
    requests=[
        Request(3, 32, 0, (1, 0), "b", think=0),
        Request(1, 32, 0, (1, 2), "a"),
        Request(0, 16, 0, (0,), "b"),
    ],
    fleet=Configuration(
        host=6, rate=16_000, groups=GroupChunks.of_blocks(TOKENS, block_bytes=1000), loop="closed"
    ),
    router="round-robin",
)
@example(  # of the last prompt the tier has two blocks, and host memory alone the one behind them
    requests=[
        Request(number, 16 * len(ids), 0, ids, "a")
        for number, ids in enumerate([(1, 2), (3, 4, 5), (1, 2, 3)])
    ],
    fleet=Configuration(
        host=3,
        rate=1000,
        tier=Tier("private", 2),
        groups=GroupChunks.of_blocks(TOKENS, block_bytes=1000),
    ),
    router="round-robin",
)
@example(  # the tier of the first engine has evicted the block of the last prompt
    requests=[
        Request(10_000 * number, 16 * len(ids), 0, ids)
        for number, ids in enumerate([(1,), (5,), (3, 4), (1,)])
    ],
    fleet=Configuration(engines=2, host=2, rate=1000, tier=Tier("private", 2), groups=BLOCKS),
    router="events?sees=tier",
)
def test_it_does_what_a_naive_program_does(requests, fleet, router) -> None:
    assume(is_possible(router, fleet))
    compare(requests, replace(fleet, router=router))


@settings(max_examples=20, deadline=None)
@given(requests=rows, fleet=fleets, router=routers, engines=st.sampled_from([64, 65, 130, 256]))
def test_many_engines_do_what_a_naive_program_does(requests, fleet, router, engines) -> None:
    assume(is_possible(router, fleet))
    compare(requests * 8, replace(fleet, router=router, engines=engines))


@given(
    st.text(LETTERS, max_size=30)
    | st.sampled_from(sorted(ROUTERS)).flatmap(
        lambda name: st.text("=&?.0123456789einfa_lgmsort", max_size=20).map(
            lambda more: f"{name}?{more}"
        )
    )
)
def test_any_text_is_a_router_or_an_error(text) -> None:
    try:
        spec = parse_router(text)
    except ValueError as error:
        assert str(error).startswith("router")  # noqa: PT017 - or no error
    else:
        assert parse_router(str(spec)) == spec


@given(
    requests=rows, fleet=fleets, router=routers, device=st.sampled_from([0, 5]), more=st.booleans()
)
def test_one_engine_is_a_replay(requests, fleet, router, device, more) -> None:
    """Time changes no counts, nor does a trace without arrivals."""
    fleet = replace(fleet, engines=1, device=device, loop="open", rate=fleet.rate or 50)
    assume(is_possible(router, fleet))
    requests = sorted(requests, key=lambda one: one.timestamp)
    found = replayed(requests, replace(fleet, router=router))
    in_turn = replace(fleet, rate=None)
    alone = replay(DecodedTrace.of(requests, arrivals=more), in_turn)
    assert alone == replace(
        found,
        configuration=in_turn,
        **dict.fromkeys(OF_TIMES),
        ttft_p95_ns=0,
        ttft_p95_of_parts=(),
    )


def test_bad_traces_are_refused() -> None:
    fleet = Configuration(engines=2, host=4)
    still = [Request(0, 20, 1, (1,), "a"), Request(0, 20, 1, (1,), "b")]
    with pytest.raises(ValueError, match="trace must have arrivals, got none"):
        replay(DecodedTrace.of(still), fleet)
    with pytest.raises(ValueError, match="must have times of arrival with a rate, got 0 in all"):
        replayed(still, replace(fleet, rate=5, groups=BLOCKS))
    with pytest.raises(NoSessionsError, match="must have sessions of several requests, got 2"):
        replayed(still, replace(fleet, loop="closed"))
    assert replayed([], fleet).requests == 0


@pytest.mark.parametrize("loop", ["open", "closed", "recorded"])
def test_times_may_be_longer_than_any_clock(loop) -> None:
    ages = 10**12  # ms: 31 years

    def requests(ages):
        return [
            Request(ages, 10**9, 10**9, (1,), "a", think=ages, service=ages),
            *[Request(ages, 10**9, 10**9, (1, 2), "a", think=ages, service=ages)] * 3,
        ]

    fleet = Configuration(
        engines=2, host=2, rate=1, groups=GroupChunks.of_blocks(TOKENS), loop=loop
    )
    compare(requests(ages), fleet)
    if loop == "open":
        compare(requests(4 * ages), fleet)
    else:
        with pytest.raises(TraceError, match=f"^the trace: times must be below {2**63} ns, got "):
            replayed(requests(4 * ages), fleet)
    with pytest.raises(TraceError, match=f"^the trace: times must be below {2**62} ns, got "):
        replayed(requests(5 * ages), fleet)


CELLS = json.loads(Path(__file__).with_name("fleet_cells.json").read_text(encoding="utf-8"))
"""Fleets over public traces, each with its `COUNTS`, the 95th percentile of its first tokens,
ns, and its placement."""
BLOCK_TOKENS = {"lmcache_agents_64c": 16, "mooncake_conversation": 512, "weka_cc_a": 512}
TOKEN_BYTES = 262_144


@pytest.mark.thorough
@pytest.mark.parametrize("name", CELLS)
def test_published_cells_are_met(name) -> None:
    trace = DecodedTrace.of(golden.trace(name), arrivals=True)
    size = BLOCK_TOKENS[name]
    groups, replays = GroupChunks.of_blocks(size, block_bytes=size * TOKEN_BYTES), Replays(trace)
    for one, expected in CELLS[name]:
        tier = Tier(*one.pop("tier")) if "tier" in one else None
        links = {"link": 50 * 10**9, "tier_link": 10**10}
        found = replays.of(Configuration(**one, **links, tier=tier, groups=groups))
        counts = (*(getattr(found, name) for name in COUNTS), found.ttft_p95_ns, found.placement)
        assert " ".join(map(str, counts)) == expected, one
