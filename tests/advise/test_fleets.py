"""Which fleet is enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.advise.choice import STUDENT_T, Prices, choose_fleet, p95_error
from kvoffload.replay import Configuration, GroupChunks, Result, Tier
from kvoffload.replay.results import ERROR_PARTS

GIB = 2**30
FLEET = Configuration(
    engines=4,
    router="events",
    host=100,
    groups=GroupChunks.of_blocks(16, block_bytes=GIB),
    rate=10,
    policy="hit-density",
)


def result(saved, p95=1.0, of_parts=None):
    """Return a result with the figures that decide; by default all parts have the same p95."""
    return Result(
        configuration=FLEET,
        tokens=100,
        missed_tokens=100 - round(100 * saved),
        saved=saved,
        ttft_p95=p95,
        ttft_p95_of_parts=() if p95 is None else tuple(of_parts or [p95] * ERROR_PARTS),
    )


def test_the_smallest_within_a_point_of_the_best_is_enough() -> None:
    half, more = replace(FLEET, host=50), replace(FLEET, host=200)
    found = choose_fleet({half: result(0.70), FLEET: result(0.791), more: result(0.80)})
    assert found == FLEET


def test_what_is_much_slower_is_not_enough() -> None:
    slow, fast = replace(FLEET, host=50), replace(FLEET, host=60)
    bound = {slow: result(0.8, 1.26), fast: result(0.8, 1.0), FLEET: result(0.8, 1.25)}
    found = choose_fleet(bound)
    assert found == fast
    found = choose_fleet(bound | {slow: result(0.8, 1.25)})
    assert found == slow


def test_prices_decide_where_there_are_any() -> None:
    shared = replace(FLEET, host=10, tier=Tier("shared", 1000))
    private = replace(FLEET, host=10, tier=Tier("private", 1000))
    some = {FLEET: result(0.8), shared: result(0.8), private: result(0.8)}
    for prices, chosen in (
        (None, shared),  # the least host memory, then the smallest tier
        (Prices(host=5, tier=0.1), shared),  # 200 + 100, against 2,000 and 200 + 400
        (Prices(host=1, tier=1), FLEET),  # 400, against 40 + 1,000
    ):
        found = choose_fleet(some, prices)
        assert found == chosen, prices


def test_a_router_that_is_fast_by_chance_does_not_win() -> None:
    """Its time counts with its error, from parts of the trace."""
    prefix, scored = replace(FLEET, router="prefix"), replace(FLEET, router="scored")
    calm, wild = [4.8, 5.0, 5.2, 5.0, 5.0], [1.0, 2.0, 9.0, 6.0, 7.0]

    def chosen(time: float, of_parts: list[float]) -> Configuration:
        some = {scored: result(0.8, 5.0, of_parts), prefix: result(0.8, time, calm)}
        return choose_fleet(some)

    assert chosen(7.0, calm) == scored
    assert chosen(7.0, wild) == prefix
    assert chosen(6.2, calm) == prefix  # higher in the table, and about as fast
    # standard deviation .1414, divided by the root of 5
    assert p95_error(result(0.8, 5.0, calm)) == pytest.approx(STUDENT_T * 0.06325, abs=1e-4)
    assert p95_error(result(0.8, None)) == 0


def test_of_equally_cheap_ones_the_policy_is_chosen_as_for_one_engine() -> None:
    plain = replace(FLEET, policy="lru")
    arc = replace(FLEET, policy="arc")
    for lru, density, other, policy in (
        (0.8, 0.8019, 0.8, "lru"),
        (0.8, 0.8021, 0.8, "hit-density"),
        (0.795, 0.799, 0.804, "hit-density"),
    ):
        some = {plain: result(lru), FLEET: result(density), arc: result(other)}
        found = choose_fleet(some)
        assert found.policy == policy, (lru, density, other)


def test_of_equal_ones_the_router_higher_in_the_table() -> None:
    plain = replace(FLEET, policy="lru")
    session, turns = replace(plain, router="session?blocks=2"), replace(plain, router="round-robin")
    some = {FLEET: result(0.8), plain: result(0.8), session: result(0.8), turns: result(0.1)}
    found = choose_fleet(some)
    assert found == session


def test_without_a_rate_tokens_decide() -> None:
    bare = replace(FLEET, rate=None)
    some = {
        bare: replace(result(0.5, None), saved=None),
        replace(bare, host=50): replace(result(0.49, None), saved=None),
    }
    found = choose_fleet(some)
    assert found.host == 50
