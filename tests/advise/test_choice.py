"""The choice of a policy, and noise."""

import itertools
import statistics

import pytest

from kvoffload.advise.advice import PARTS
from kvoffload.advise.choice import LEAST_NOISE, POLICIES, STUDENT_T, choose, noise
from kvoffload.replay import Configuration, Result
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
    assert choose(three, among=("lru", "arc")).policy == "arc"
    choice = choose(three, among=("lru",))
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


def test_nothing_replayed_is_all_noise():
    choice = choose([result(policy, [0] * PARTS, blocks=0) for policy in (*POLICIES, "arc")])
    assert choice.policy == "lru"
    assert set(choice.behind.values()) == {0.0}
