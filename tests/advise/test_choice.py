"""Noise, and the simplest policy within it."""

import pytest

from kvoffload.advise.choice import LEAST_NOISE, MOST_NOISE, by_simplicity, choose, noise
from kvoffload.advise.grid import PARTS, Outcome
from kvoffload.policies import registry
from kvoffload.replay import ReplayResult


def outcome(policy, hits_of_parts, blocks=1_000):
    parts = (ReplayResult(asked_tokens=blocks, loaded_tokens=hits) for hits in hits_of_parts)
    return Outcome(policy, tuple(parts))


def test_every_registered_policy_has_its_place_in_the_order_of_simplicity():
    ranks = {registry.entry(name).simplicity for name in registry.names()}
    assert min(ranks) == 1
    assert by_simplicity(["own:Policy", "hit-density?guard=0", "arc", "lru"]) == [
        "lru",
        "arc",
        "hit-density?guard=0",
        "own:Policy",
    ]


def test_a_steady_difference_is_no_noise():
    best, other = outcome("arc", [300] * PARTS), outcome("lru", [295] * PARTS)
    assert noise(best.parts, other.parts) == LEAST_NOISE
    choice = choose([other, best])
    assert (choice.policy, choice.best) == ("arc", "arc")
    assert choice.behind == {"arc": 0.0, "lru": 0.005}


def test_a_difference_that_comes_and_goes_is_noise_and_the_simplest_policy_is_taken():
    best = outcome("arc", [306, 294] * (PARTS // 2))
    other = outcome("lru", [292, 306] * (PARTS // 2))
    choice = choose([best, other])
    assert choice.best == "arc"
    assert choice.behind["lru"] == pytest.approx(0.001)
    assert choice.noise["lru"] > 0.008  # twice the error of 14, -12, 14, ... of 1,000
    assert choice.policy == "lru"
    assert choice.within_noise() == ["lru", "arc"]


def test_noise_is_twice_the_standard_error_of_the_mean_difference():
    wide, flat = outcome("arc", [40, 20] * 5), outcome("lru", [20, 20] * 5)
    # 20, 0, 20, 0, ...: deviation 10.54, error of the mean 3.333
    assert noise(wide.parts, flat.parts) == pytest.approx(2 * 3.3333 / 1_000, abs=1e-6)


def test_no_noise_is_so_large_that_a_point_and_more_is_given_away():
    best = outcome("arc", [600, 0] * (PARTS // 2))
    other = outcome("lru", [0, 570] * (PARTS // 2))
    assert noise(best.parts, other.parts) == MOST_NOISE
    assert choose([best, other]).policy == "arc"


def test_of_two_that_hit_equally_often_the_simpler_is_the_best():
    choice = choose([outcome("arc", [5] * PARTS), outcome("lru", [5] * PARTS)])
    assert choice.best == "lru"


def test_nothing_replayed_is_all_noise():
    choice = choose([outcome("arc", [0] * PARTS, blocks=0), outcome("lru", [0] * PARTS, blocks=0)])
    assert choice.policy == "lru"
    assert set(choice.behind.values()) == {0.0}
