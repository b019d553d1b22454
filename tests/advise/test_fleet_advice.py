"""Advice on a fleet: what is compared, what is enough, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.advise import RecordedTrace, advise, engine_of
from kvoffload.advise.choice import choose_fleet, saving
from kvoffload.advise.setup import FleetTier, Setup
from kvoffload.replay import replay
from kvoffload.traces import Request

from .said import verdict

pytestmark = pytest.mark.fast

MIB = 2**20
SETUP = Setup(40 * MIB, 16, MIB // 16, engines=2, routers=("session", "events"))
SHARED = FleetTier("shared", 100 * MIB)


def recorded(turns=15, sessions=21, **more):
    """Return sessions whose prompts grow by a block each turn."""
    requests = [
        Request(
            1000 * turn + 37 * session,
            16 * (turn + 1),
            5,
            tuple(range(100 * session, 100 * session + turn + 1)),
            f"session {session}",
            **more,
        )
        for turn in range(turns)
        for session in range(sessions)
    ]
    return RecordedTrace.of(requests, arrivals=True)


@pytest.fixture(scope="module")
def trace():
    return recorded()


@pytest.fixture(scope="module")
def timed(trace):
    engine = engine_of(None, None, prefill_rate=500, link_bandwidth=100 * MIB)
    return advise(trace, replace(SETUP, engine=engine, tiers=(None, SHARED)))


def test_a_cache_that_holds_everything_is_replayed_once():
    fleets = [*SETUP.configurations(50).values()]
    assert [fleet.host for fleet in fleets[3::6]] == [20, 40, 50, 50]
    assert len(set(fleets)) == 3 + 18


def test_a_fleet_is_compared_with_given_memories_and_needs_times_of_arrival():
    setup = replace(SETUP, others=(10 * MIB,))
    assert setup.memories() == [0, 10 * MIB, 40 * MIB]
    assert {case.memory for case in setup.cases()} == set(setup.memories())
    with pytest.raises(ValueError, match="trace must have arrivals, got none"):
        advise(RecordedTrace.of([Request(0, 16, 1, (1,))]), setup)


def test_a_router_that_sees_a_tier_is_compared_where_there_is_one():
    cases = replace(SETUP, routers=("events?sees=tier",), tiers=(None, SHARED)).cases()
    seeing = {case.tier for case in cases if "sees" in case.router}
    assert seeing == {SHARED}
    with pytest.raises(ValueError, match="must have a tier to see"):
        replace(SETUP, routers=("events?sees=tier",)).configurations(100)


def test_the_results_are_those_of_fleets_and_the_choice_is_made_of_them(trace, timed):
    for result in [*timed.rows.values()][::7]:
        assert result == replay(trace.trace, result.configuration)
    assert timed.result == timed.rows[timed.case]
    chosen = choose_fleet({one.configuration: one for one in timed.rows.values()})
    assert timed.result.configuration == chosen
    assert saving(timed.rows[timed.best]) == max(map(saving, timed.rows.values()))
    assert timed.like() == timed.result
    assert timed.like(memory=7) is None
    by_turns = replace(chosen, router="round-robin")
    assert timed.like(router="round-robin").configuration == by_turns
    assert timed.reuse == pytest.approx(7 * 15 / 120)  # all but the last block of each prompt


def test_it_is_the_same_whoever_computes(trace, timed):
    done: list[int] = []
    found = advise(trace, timed.setup, jobs=2, progress=done.append)
    assert found == timed
    assert done == list(range(1, len(timed.rows) + 1))


def test_more_may_be_needed_only_where_the_most_is_needed_and_does_not_hold_all(trace):
    assert advise(trace, replace(SETUP, memory=10 * MIB)).may_need_more
    assert not advise(trace, replace(SETUP, memory=300 * MIB)).may_need_more


def test_only_a_router_that_was_named_is_recommended(trace, timed):
    assert timed.like(router="round-robin") is not None  # it is compared
    for memory in (2 * MIB, 40 * MIB):
        found = advise(trace, replace(SETUP, routers=("prefix",), memory=memory))
        assert found.case.router == found.best.router == "prefix"
        assert "round-robin" in verdict(found)
        assert len(found.rows) > len(found.candidates) > 0
    seeing = ("events?sees=tier",)
    found = advise(trace, replace(SETUP, routers=seeing, tiers=(None, SHARED)))
    assert {case.router for case in found.candidates if case.offloads} == {*seeing}
    assert any(not case.offloads for case in found.candidates)
