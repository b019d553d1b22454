"""Which fleet is enough."""

from __future__ import annotations

from dataclasses import replace

from kvoffload.advise.fleets import Prices, choose_fleet
from kvoffload.replay.fleet import Fleet, FleetResult, Tier

GIB = 2**30
FLEET = Fleet(
    engines=4, router="events", host_blocks=100, block_bytes=GIB, rate=10, policy="hit-density"
)


def result(saved, p95=1.0):
    """Return a result with what a choice looks at."""
    return FleetResult(
        requests=1,
        blocks=10,
        tokens=100,
        device_hits=0,
        host_hits=0,
        tier_hits=0,
        hit_tokens=round(100 * saved),
        missed_tokens=0,
        host_stored=0,
        tier_stored=0,
        saved=saved,
        ttft_p50=None,
        ttft_p95=p95,
        ttft_mean=None,
        ttft_p95_ns=0,
        latency_mean=None,
        busy=None,
        imbalance=1.0,
        placement="",
        engines=(),
    )


def test_the_smallest_within_a_point_of_the_best_is_enough() -> None:
    half, more = replace(FLEET, host_blocks=50), replace(FLEET, host_blocks=200)
    found = choose_fleet({half: result(0.70), FLEET: result(0.791), more: result(0.80)})
    assert found is not None
    assert (found.fleet, found.best.saved) == (FLEET, 0.80)
    assert found.twice == result(0.80)
    assert found.by_turns is None


def test_what_is_much_slower_is_not_enough() -> None:
    slow, fast = replace(FLEET, host_blocks=50), replace(FLEET, host_blocks=60)
    bound = {slow: result(0.8, 1.26), fast: result(0.8, 1.0), FLEET: result(0.8, 1.25)}
    found = choose_fleet(bound)
    assert found is not None
    assert found.fleet == fast
    found = choose_fleet(bound | {slow: result(0.8, 1.25)})
    assert found is not None
    assert found.fleet == slow


def test_prices_decide_where_there_are_any() -> None:
    shared = replace(FLEET, host_blocks=10, tier=Tier("shared", 1000))
    private = replace(FLEET, host_blocks=10, tier=Tier("private", 1000))
    some = {FLEET: result(0.8), shared: result(0.8), private: result(0.8)}
    for prices, chosen in (
        (None, shared),  # the least host memory, then the smallest tier
        (Prices(host=5, tier=0.1), shared),  # 200 + 100, against 2,000 and 200 + 400
        (Prices(host=1, tier=1), FLEET),  # 400, against 40 + 1,000
    ):
        found = choose_fleet(some, prices)
        assert found is not None
        assert found.fleet == chosen, prices


def test_of_equal_ones_the_simpler_policy_then_the_plainer_router() -> None:
    plain = replace(FLEET, policy="lru")
    session, turns = replace(plain, router="session?blocks=2"), replace(plain, router="round-robin")
    some = {FLEET: result(0.8), plain: result(0.8), session: result(0.8), turns: result(0.1)}
    found = choose_fleet(some)
    assert found is not None
    assert found.fleet == session
    assert found.by_turns == result(0.1)


def test_without_a_rate_tokens_decide() -> None:
    bare = replace(FLEET, rate=None)
    some = {
        bare: replace(result(0.5, None), saved=None),
        replace(bare, host_blocks=50): replace(result(0.49, None), saved=None),
    }
    found = choose_fleet(some)
    assert found is not None
    assert found.fleet.host_blocks == 50
    assert choose_fleet({}) is None
