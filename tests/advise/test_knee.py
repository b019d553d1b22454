"""The knee of the hits over memory."""

from __future__ import annotations

import pytest

from kvoffload.advise import RecordedTrace, Setup, advise
from kvoffload.advise.knee import WORTH, find_knee, knee_configurations, ladder
from kvoffload.traces import Request, Workload

pytestmark = pytest.mark.fast

MIB = 2**20


def setup(**more):
    """Return a question about blocks of a mebibyte."""
    return Setup(**{"memory": MIB, "block_tokens": 512, "token_bytes": 2048, **more})


@pytest.mark.thorough
@pytest.mark.nightly
def test_the_error_of_a_gain_covers_the_mean_gain_over_seeds():
    """At least nine times of ten, where the gain matters."""
    seeds = range(24)
    gains: dict[int, list[tuple[float, float]]] = {}
    for seed in seeds:
        asked = Setup(2**36, 512, 131_072)
        for rung in find_knee(RecordedTrace.of(Workload(800, seed=seed)), asked).curve:
            gains.setdefault(rung.memory, []).append((rung.gain, rung.error))
    covered = []
    for found in gains.values():
        mean = sum(gain for gain, _ in found) / len(found)
        if len(found) == len(seeds) and mean >= 0.005:
            covered += [abs(gain - mean) <= error for gain, error in found]
    assert len(covered) > 200
    assert sum(covered) / len(covered) >= 0.9


def test_the_curve_is_that_of_replays_and_the_knee_is_its_first_that_needs_no_more():
    recorded = RecordedTrace.of(Workload(200, seed=3))
    asked = setup(policies=("lru", "hit-density"))
    found = find_knee(recorded, asked)
    assert [rung.memory for rung in found.curve] == sorted(rung.memory for rung in found.curve)
    for rung in found.curve[2::5]:
        one = advise(recorded, setup(policies=asked.policies, memory=rung.memory, others=(MIB,)))
        assert rung.hit_ratio == max(one.of(policy).hit_ratio for policy in asked.policies)
        assert rung.hit_ratio == one.of(rung.policy).hit_ratio
    by_memory = {rung.memory: rung for rung in found.curve}
    for rung in found.curve:
        twice = by_memory.get(2 * rung.memory, found.curve[-1])
        assert rung.gain == twice.hit_ratio - rung.hit_ratio
    knees = []
    for errors in (-1, 0, 1):
        worth = [r.memory for r in found.curve if r.gain + errors * r.error >= WORTH]
        knees.append(min(memory for memory in by_memory if memory > max(worth, default=0)))
    least, knee, most = knees
    assert (found.least, found.most) == (least, most)
    assert (found.memory == knee, found.memory < knee) == (found.is_shown, not found.is_shown)
    one = advise(recorded, setup(policies=asked.policies, memory=found.memory))
    assert one.policy is not None


def test_it_is_the_same_whoever_computes():
    recorded = RecordedTrace.of(Workload(200, seed=5))
    done: list[int] = []
    asked = setup(policies=("lru", "sieve"))
    found = find_knee(recorded, asked, jobs=2, progress=done.append)
    assert found == find_knee(recorded, asked)
    assert done == list(range(1, len({*knee_configurations(recorded, asked).values()}) + 1))


def test_without_reuse_or_requests_the_least_is_enough():
    once = RecordedTrace.of(Request(n, 512, 1, (n,)) for n in range(2000))
    for recorded in (once, RecordedTrace.of([])):
        found = find_knee(recorded, setup(policies=("lru",)))
        assert found.memory == found.most == found.curve[0].memory
        assert found.rung.gain == found.rung.error == 0
        assert found.is_shown


def test_the_ladder_has_two_steps_for_each_doubling_and_holds_everything():
    assert ladder(100, 1000) == [128, 192, 256, 384, 512, 768, 1024]
    assert ladder(1, 2) == [2]
    assert ladder(1024, 10) == [1024]
