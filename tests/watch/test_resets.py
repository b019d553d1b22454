"""A reset empties the shadows as it empties the cache; what became of the blocks is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, block_hash, block_hashes, store

from .watched import requests, serve, served, watched, whole

EVERY = 50


def hits_of(manager: Any, asked: list[list[bytes]], under_way: int = 0, every: int = EVERY) -> int:
    """Serve requests with as many stores under way, and resets; return the hits."""
    stats = served(manager, asked, under_way=under_way, reset_every=every).stats()
    return int(stats["hit_blocks"])


@pytest.mark.parametrize("every", [EVERY, 600])
@pytest.mark.parametrize("capacity", [40, 100, 256])
def test_at_rate_1_the_curve_is_that_of_lru_to_the_last_hit(twin, capacity, every, seed):
    manager = whole(twin, capacity)
    asked = requests(seed)
    hits_of(manager, asked, every=every)
    core, memory = manager.watch._core, manager.watch.memory
    judged = core.counts()["judged"][0]
    for size, times in enumerate(memory):
        if int(capacity * times) < 20:
            continue  # a request is longer than that: LRU refuses it, the shadow does not
        other = CPUOffloadingManager(16, int(capacity * times))
        assert sum(judged[: size + 1]) == hits_of(other, asked, every=every), times
    assert core.counts()["resets"] == (len(asked) - 1) // every
    check_invariants(manager)


@pytest.mark.parametrize("under_way", [0, 8])
@pytest.mark.parametrize("policy", ["arc", "slru", "hit-density"])
def test_miniatures_are_reset_with_what_is_under_way_in_them(twin, policy, under_way, seed):
    """Of every block, in one structure, a miniature of this memory is a manager of that policy."""
    manager = whole(twin, 100, policies=(policy,))
    asked = requests(seed)
    hits_of(manager, asked, under_way)
    manager.watch.report()
    (mini,) = (mini for mini in manager.watch._shadows.minis if mini.policy == policy)
    other = CPUOffloadingManager(16, 100, policy)
    hits = hits_of(other, asked, under_way)
    (miniature, *_) = mini.quarters
    assert miniature.asked == sum(map(len, asked))
    # A request of a miniature comes with others, so where stores overlap its time is a mean.
    assert miniature.hits == pytest.approx(hits, rel=0.12 if under_way else 0)
    pending = sum(ref_cnt < 0 for ref_cnt, _ in miniature.policy.block_table)
    assert pending <= sum(map(len, asked[-under_way - 1 :]))
    manager.reset_cache()
    manager.watch.report()
    assert len(miniature.policy) == 0
    miniature._check()


@pytest.mark.parametrize(("policy", "under_way"), [("lru", 0), ("slru", 0), ("lru", 8)])
def test_points_without_marks_cover_what_caches_that_were_reset_hit(twin, policy, under_way, seed):
    manager = watched(twin, max_rate=1.0, slots=2**20, policy_slots=2**20).CPUOffloadingManager(
        16, 300, policy
    )
    asked = requests(seed, 1_520)
    blocks = sum(map(len, asked))
    hits_of(manager, asked, under_way)
    report = manager.watch.report()
    # A watch begins anew at the first stores that overlap, which may come after a reset.
    assert report.resets in ({29, 30} if under_way else {30})
    assert {point.resets for point in report.points} == {report.resets}
    given = 0
    for point in report.points:
        if point.hit_ratio is None or point.policy == "hit-density":
            continue
        if (point.policy, point.memory) == (policy, 1) or set(point.marks) - {"filling"}:
            continue  # the first is counted
        given += 1
        other = CPUOffloadingManager(16, int(300 * point.memory), point.policy)
        truth = hits_of(other, asked, under_way) / blocks
        # Of 20 intervals of 95 % one may miss, and an exact curve has narrow ones.
        assert abs(point.hit_ratio - truth) <= 2 * point.error + 0.001, point
        plain = CPUOffloadingManager(16, int(300 * point.memory), point.policy)
        never_reset = sum(serve(plain, hashes) for hashes in asked) / blocks
        if point.memory >= 1:
            assert abs(never_reset - truth) > point.error
    assert given >= 3


def test_what_a_reset_dropped_is_the_cause_of_its_next_miss_while_there_is_room_to_know(twin):
    manager = whole(twin, 4, memory=(1,))

    def causes() -> dict[str, int]:
        return {k: n for k, n in manager.watch.report().sampled_missed.items() if n}

    for index in range(6):  # the first two are evicted
        serve(manager, [block_hash(index)])
    manager.reset_cache()
    check_invariants(manager)
    for index in range(6):
        serve(manager, [block_hash(index)])
    assert causes() == {"never_or_long_ago": 6, "evicted": 2, "reset": 4}
    manager.reset_cache()
    manager.reset_cache()
    serve(manager, [block_hash(5)])
    assert causes()["reset"] == 5
    # The list remembers 32 blocks, the newest.
    for index in range(100, 131):
        serve(manager, [block_hash(index)])
        check_invariants(manager)
    manager.lookup([block_hash(4)])
    assert causes()["reset"] == 5
    counts = manager.watch._core.counts()
    assert sum(counts["causes"]) == counts["missed"]
    assert sum(map(len, manager.watch._core.order())) == 32


def test_what_is_stored_unseen_after_a_reset_takes_room_in_the_shadow(twin):
    """Its entry is there, from before the reset."""
    manager = whole(twin, 8, policies=("arc",))
    serve(manager, [A, B])
    manager.reset_cache()
    store(manager, [A, B])
    assert manager.lookup([A, B]) == 2
    judged = manager.watch._core.counts()["judged"][0]
    assert sum(judged[:-1]) == 2
    manager.watch.report()
    (mini,) = (mini for mini in manager.watch._shadows.minis if mini.policy == "arc")
    assert mini.quarters[0].hits == 2


def test_a_size_that_was_full_before_a_reset_is_not_filling_after_it(twin):
    manager = whole(twin, 300, policies=())

    def filling() -> set[float]:
        points = manager.watch.report().points
        return {point.memory for point in points if "filling" in point.marks}

    for start in range(0, 600, 10):
        serve(manager, block_hashes(*range(start, start + 10)))
    assert filling() == {4, 8}
    manager.reset_cache()
    serve(manager, [A])
    assert filling() == {4, 8}
    for start in range(0, 500, 10):
        serve(manager, block_hashes(*range(start, start + 10)))
    assert filling() == {4, 8}


def test_a_policy_that_learns_anew_after_each_reset_is_marked(twin):
    manager = whole(twin, 300, policies=("hit-density",))
    marks = []
    for index in range(20):
        for start in range(0, 600, 10):
            serve(manager, block_hashes(*range(start, start + 10)))
        marks.append(
            any("learning" in p.marks for p in manager.watch.report().points if p.policy != "lru")
        )
        if index in (9, 10):
            manager.reset_cache()
    assert marks == [True] * 3 + [False] * 7 + [True] * 10


def test_resets_of_a_cache_that_nobody_asks_take_no_memory(twin):
    manager = whole(twin, 8)
    serve(manager, [A, B])
    for _ in range(10_000):
        manager.reset_cache()
    assert manager.watch._core.take_requests() == [[[([A, B], 0, 2, None)], []]]
    for _ in range(10_000):
        manager.reset_cache()
        manager.lookup([C, D])
    (stretches,) = manager.watch._core.take_requests()
    assert len(stretches) <= 256  # a lookup could have taken them
    assert all(requests == [([C, D], 0, 2, None)] for requests in stretches)
    check_invariants(manager)
