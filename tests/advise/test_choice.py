"""The choice of a policy and of a fleet, and noise."""

import itertools
import statistics
from dataclasses import replace

import pytest

from kvoffload.advise.advice import PARTS
from kvoffload.advise.choice import (
    LEAST_NOISE,
    POLICIES,
    STUDENT_T,
    Prices,
    choose,
    choose_fleet,
    choose_policy,
    noise,
    p95_error,
)
from kvoffload.replay import Configuration, GroupChunks, Result, Tier
from kvoffload.replay.results import ERROR_PARTS


def result(policy, hits_of_parts, blocks=1_000):
    one = Configuration(policy=policy, host=1)
    parts = tuple(
        Result(configuration=one, asked_tokens=blocks, host_tokens=hits) for hits in hits_of_parts
    )
    asked, hits = blocks * len(parts), sum(hits_of_parts)
    return Result(configuration=one, asked_tokens=asked, host_tokens=hits, parts=parts)


def steady(**hits):
    """Return results by policy that hit this much of 1,000 in every part."""
    return [result(name.replace("_", "-"), [count] * PARTS) for name, count in hits.items()]


@pytest.mark.parametrize(
    ("lru", "hit_density", "chosen"),
    [(300, 303, "hit-density"), (300, 301, "lru"), (300, 300, "lru"), (310, 300, "lru")],
)
def test_hit_density_is_taken_and_lru_where_it_hits_as_much(lru, hit_density, chosen):
    choice = choose(steady(lru=lru, hit_density=hit_density))
    assert choice.policy == chosen
    assert choice.best == ("lru" if lru >= hit_density else "hit-density")


def test_another_policy_is_taken_only_where_it_is_ahead_of_both_by_more_than_noise():
    both = steady(lru=300, hit_density=320)
    assert choose([*both, *steady(arc=323)]).policy == "arc"
    assert choose([*both, *steady(arc=321)]).policy == "hit-density"
    varies = result("arc", [400, 400, 300, 300] * 2 + [300, 300])
    assert varies.hit_ratio == 0.34
    choice = choose([*both, varies])
    assert (choice.policy, choice.best) == ("hit-density", "arc")
    assert choice.behind["hit-density"] == pytest.approx(0.02)
    assert choice.noise["hit-density"] > 0.02
    shares = {"lru": 0.5, "hit-density": 0.5, "arc": 0.75}
    assert choose_policy(shares, lambda *_: 0.25) == "lru"  # as far ahead as noise
    ahead_of_one = steady(lru=340, hit_density=330, arc=341)
    assert choose(ahead_of_one).policy == "lru"


def test_the_named_policies_are_the_ones_to_choose_from():
    assert choose(steady(arc=300)).policy == "arc"
    assert choose(steady(lru=300)).policy == "lru"
    assert choose(steady(hit_density=300)).policy == "hit-density"
    assert choose(steady(arc=300, sieve=301, lfu=299)).policy == "sieve"
    assert choose(steady(hit_density=300, arc=301)).policy == "hit-density"
    assert choose(steady(lru=300, arc=303)).policy == "arc"
    three = steady(lru=300, hit_density=320, arc=310)
    assert choose(three, paying=("lru", "arc")).policy == "arc"
    choice = choose(three, paying=("lru",))
    assert (choice.policy, choice.best, choice.candidates) == ("lru", "lru", ("lru",))
    assert choice.behind == {
        "lru": 0,
        "hit-density": pytest.approx(-0.02),
        "arc": pytest.approx(-0.01),
    }


def test_noise_is_half_of_a_98_percent_interval_over_five_parts():
    differences = [20, 0, 40, 10, 30]
    pairs = itertools.chain.from_iterable((d, d) for d in differences)
    wide, flat = result("arc", [20 + d for d in pairs]), result("lru", [20] * PARTS)
    error = statistics.stdev(differences) / ERROR_PARTS**0.5 / 1_000
    assert noise(wide.parts, flat.parts) == pytest.approx(STUDENT_T * error)
    # the distribution function of Student's t with 4 degrees of freedom
    square = 1 + STUDENT_T**2 / 4
    below = 0.5 + 3 / 8 * STUDENT_T / square**0.5 * (1 - STUDENT_T**2 / square / 12)
    assert (ERROR_PARTS, below) == (5, pytest.approx(0.99, abs=1e-5))


def test_a_steady_difference_is_noise_only_where_it_is_too_small_to_notice():
    best, other = steady(arc=300, lru=295)
    assert noise(best.parts, other.parts) == LEAST_NOISE
    assert choose([best, other]).within_noise() == ["arc"]
    choice = choose([best, other])
    behind = {"arc": 0.0, "lru": choice.noise["lru"]}
    assert replace(choice, behind=behind).within_noise() == ["arc", "lru"]


def test_nothing_replayed_is_all_noise():
    choice = choose([result(policy, [0] * PARTS, blocks=0) for policy in (*POLICIES, "arc")])
    assert choice.policy == "lru"
    assert set(choice.behind.values()) == {0.0}


GIB = 2**30
FLEET = Configuration(
    engines=4,
    router="events",
    host=100,
    groups=GroupChunks.of_blocks(16, block_bytes=GIB),
    rate=10,
    policy="hit-density",
)
CALM, WILD = [4.8, 5.0, 5.2, 5.0, 5.0], [1.0, 2.0, 9.0, 6.0, 7.0]


def of_fleet(saved, p95=1.0, of_parts=None):
    """Return a result with the figures that decide; by default all parts have the same p95."""
    return Result(
        configuration=FLEET,
        tokens=100,
        missed_tokens=100 - round(100 * saved),
        saved=saved,
        ttft_p95=p95,
        ttft_p95_of_parts=() if p95 is None else tuple(of_parts or [p95] * ERROR_PARTS),
    )


def chosen_of(*fleets, prices=None):
    """Return the changes of the fleet that is chosen among several, each with its result."""
    results = {
        index: replace(found, configuration=replace(FLEET, **change))
        for index, (change, found) in enumerate(fleets)
    }
    return fleets[choose_fleet(results, prices)][0]


def test_the_smallest_fleet_within_a_point_of_the_best_is_enough():
    half, more = ({"host": 50}, of_fleet(0.70)), ({"host": 200}, of_fleet(0.80))
    assert chosen_of(half, ({}, of_fleet(0.791)), more) == {}
    assert chosen_of(half, ({}, of_fleet(0.789)), more) == {"host": 200}
    bare = [replace(of_fleet(saved, None), saved=None) for saved in (0.5, 0.49)]  # without a rate
    assert chosen_of(({"rate": None}, bare[0]), ({"rate": None, "host": 50}, bare[1]))["host"] == 50


def test_what_is_much_slower_is_not_enough_and_a_time_counts_with_its_error():
    fast, most = ({"host": 60}, of_fleet(0.8, 1.0)), ({}, of_fleet(0.8, 1.25))
    assert chosen_of(({"host": 50}, of_fleet(0.8, 1.26)), fast, most) == {"host": 60}
    assert chosen_of(({"host": 50}, of_fleet(0.8, 1.25)), fast, most) == {"host": 50}
    for time, of_parts, router in (
        (7.0, CALM, "scored"),
        (7.0, WILD, "prefix"),
        (6.2, CALM, "prefix"),
    ):
        prefix = {"router": "prefix"}, of_fleet(0.8, time, CALM)
        scored = {"router": "scored"}, of_fleet(0.8, 5.0, of_parts)
        assert chosen_of(scored, prefix) == {"router": router}, (time, of_parts)
    # standard deviation .1414, divided by the root of 5
    assert p95_error(of_fleet(0.8, 5.0, CALM)) == pytest.approx(STUDENT_T * 0.06325, abs=1e-4)
    assert p95_error(of_fleet(0.8, None)) == 0


def untimed(saved, imbalance):
    """Return a result without times of first tokens."""
    return replace(of_fleet(saved, None), saved=None, imbalance=imbalance)


def test_without_times_a_router_does_not_win_by_sending_most_to_one_engine():
    by_turns = {"router": "round-robin"}, untimed(0.8, 1.0)
    one = {"router": "session"}, untimed(0.829, 4.0)
    even = {"router": "scored"}, untimed(0.82, 1.5)
    assert chosen_of(one, by_turns) == {"router": "round-robin"}
    assert chosen_of(one, by_turns, even) == {"router": "scored"}
    few = {"router": "prefix"}, untimed(0.9, 2.0)  # .2 on its busiest engine, as by turns
    assert chosen_of(few, by_turns) == {"router": "prefix"}
    assert chosen_of(({"router": "sticky"}, untimed(0.829, 1.6)), one) == {"router": "sticky"}
    timed = {"router": "session"}, replace(of_fleet(0.829), imbalance=4.0)
    assert chosen_of(timed, ({"router": "round-robin"}, of_fleet(0.8))) == {"router": "session"}


def test_prices_decide_where_there_are_any():
    shared, private = ({"host": 10, "tier": Tier(kind, 1000)} for kind in ("shared", "private"))
    for prices, chosen in (
        (None, shared),  # the least host memory, then the smallest tier
        (Prices(host=5, tier=0.1), shared),  # 200 + 100, against 2,000 and 200 + 400
        (Prices(host=1, tier=1), {}),  # 400, against 40 + 1,000
        (Prices(host=1, tier=0.3), shared),  # 40 + 300: it is there once
    ):
        fleets = [(change, of_fleet(0.8)) for change in ({}, shared, private)]
        assert chosen_of(*fleets, prices=prices) == chosen, prices


def test_of_equally_cheap_fleets_the_policy_is_chosen_then_the_router_higher_in_the_table():
    for lru, density, arc, policy in (
        (0.8, 0.8019, 0.8, "lru"),
        (0.8, 0.8021, 0.8, "hit-density"),
        (0.795, 0.799, 0.804, "hit-density"),
    ):
        saved = {"lru": lru, "hit-density": density, "arc": arc}
        fleets = [({"policy": name}, of_fleet(share)) for name, share in saved.items()]
        assert chosen_of(*fleets) == {"policy": policy}, saved
    routers = {"events": 0.8, "session?blocks=2": 0.8, "round-robin": 0.1}
    fleets = [({"router": name}, of_fleet(share)) for name, share in routers.items()]
    assert chosen_of(*fleets) == {"router": "session?blocks=2"}
