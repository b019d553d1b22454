"""The knee of the hits over memory."""

from __future__ import annotations

import pytest

from kvoffload.advise import RecordedTrace, Setup, advise
from kvoffload.advise.knee import WORTH, find_knee, knee_replays, ladder
from kvoffload.traces import Request, Workload

pytestmark = pytest.mark.fast

MIB = 2**20


def setup(**more):
    """Return a question about blocks of a mebibyte."""
    return Setup(**{"memory": MIB, "block_tokens": 512, "token_bytes": 2048, **more})


def test_of_prompts_in_turn_the_knee_is_the_first_size_that_holds_them_all():
    """Of 50 prompts of 4 blocks over and over, LRU hits nothing with less than 200."""
    prompts = [tuple(range(4 * n, 4 * n + 4)) for n in range(50)]
    recorded = RecordedTrace.of(Request(n, 2048, 1, prompts[n % 50]) for n in range(1000))
    found = find_knee(recorded, setup(policies=("lru",)))
    assert found.memory == 256 * MIB
    assert found.rung.hit_ratio == 0.95  # all but the first of 20 rounds
    for below in (128, 192):
        rung = next(rung for rung in found.curve if rung.memory == below * MIB)
        assert (rung.hit_ratio, rung.gain) == (0, 0.95)
    assert (found.rung.gain, found.rung.error, found.most) == (0, 0, found.memory)


def test_the_curve_is_that_of_replays_and_the_knee_is_its_first_that_needs_no_more():
    recorded = RecordedTrace.of(Workload(400, seed=3))
    asked = setup(policies=("lru", "hit-density"))
    found = find_knee(recorded, asked)
    assert [rung.memory for rung in found.curve] == sorted(rung.memory for rung in found.curve)
    for rung in found.curve[2::5]:
        one = advise(recorded, setup(policies=asked.policies, memory=rung.memory, others=(MIB,)))
        assert rung.hit_ratio == max(one.cell(policy).hit_ratio for policy in asked.policies)
        assert rung.hit_ratio == one.cell(rung.policy).hit_ratio
    by_memory = {rung.memory: rung for rung in found.curve}
    for rung in found.curve:
        twice = by_memory.get(2 * rung.memory, found.curve[-1])
        assert rung.gain == twice.hit_ratio - rung.hit_ratio
    worth = [rung.memory for rung in found.curve if rung.gain - rung.error >= WORTH]
    assert found.memory == min(memory for memory in by_memory if memory > max(worth))
    assert found.memory <= found.most


def test_it_is_the_same_whoever_computes():
    recorded = RecordedTrace.of(Workload(200, seed=5))
    done: list[int] = []
    asked = setup(policies=("lru", "sieve"))
    found = find_knee(recorded, asked, jobs=2, progress=done.append)
    assert found == find_knee(recorded, asked)
    assert done == list(range(1, knee_replays(recorded, asked) + 1))


def test_without_reuse_or_requests_the_least_is_enough():
    once = RecordedTrace.of(Request(n, 512, 1, (n,)) for n in range(2000))
    for recorded in (once, RecordedTrace.of([])):
        found = find_knee(recorded, setup(policies=("lru",)))
        assert found.memory == found.most == found.curve[0].memory
        assert found.rung.gain == found.rung.error == 0


def test_the_ladder_has_two_steps_for_each_doubling_and_holds_everything():
    assert ladder(100, 1000) == [128, 192, 256, 384, 512, 768, 1024]
    assert ladder(1, 2) == [2]
    assert ladder(1024, 10) == [1024]
