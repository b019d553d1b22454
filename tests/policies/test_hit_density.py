"""Hit density, rule by rule."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from kvoffload.policies._densities_py import NUM_EPOCHS, Densities
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, H, block_hashes, names
from tests.policies.steps import evict, idle, pinned, policy_of, request

NEVER_AGAIN, ONCE_AGAIN, MORE_OFTEN = range(1), range(1, 8), range(8, 15)


def density(twin: ModuleType, capacity: int, blocks: list[bytes] | tuple[()] = (), **options: Any):
    return policy_of(twin, "hit-density", capacity, blocks, **options)


def manager_of(twin: ModuleType, capacity: int, options: str = "") -> Any:
    return twin.CPUOffloadingManager(16, capacity, f"hit-density{options}")


def ring_of(policy: Any, block: bytes) -> int:
    check_invariants(policy)
    return next(number for number, ring in enumerate(policy.rings) if block in ring)


def class_of_ghost(policy: Any, block: bytes) -> int:
    """Store a block that is remembered; return the class that it brings along."""
    policy.insert(block, idle())
    return ring_of(policy, block)


def train(manager: Any, requests: int = 800) -> None:
    """Show that chains of two are asked for again, and that what comes between them is not."""
    for number in range(requests):
        request(manager, block_hashes(10**6 + 2 * number, 10**6 + 2 * number + 1))
        request(manager, block_hashes(1000 + number % 3, 2000 + number % 3))


def test_without_data_the_least_recent_leaves_first(twin: ModuleType) -> None:
    policy = density(twin, 8)
    for block in (A, B, C, D):
        policy.insert(block, idle())
        policy.touch([block])
        policy.touch([H])
    assert evict(policy, 3) == "ABC"


def test_uses_and_gaps_make_the_class(twin: ModuleType) -> None:
    policy = density(twin, 8, [A, B])
    policy.touch([H])
    assert ring_of(policy, A) in NEVER_AGAIN
    for gap, number in ((1, 1), (2, 8), (3, 9), (6, 9), (7, 10), (15, 11), (31, 12), (127, 13)):
        for other in range(gap - 1):
            policy.touch(block_hashes(100 + other))
        policy.touch([A])
        assert ring_of(policy, A) == number
    for other in range(510):
        policy.touch(block_hashes(100 + other))
    policy.touch([A])
    assert ring_of(policy, A) == 14
    assert ring_of(policy, B) in NEVER_AGAIN


def test_the_finish_of_a_request_is_no_use(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    request(manager, [A, B])
    assert manager.policy.num_requests == 1
    assert ring_of(manager.policy, A) in NEVER_AGAIN
    request(manager, [C])
    request(manager, [A, B])
    assert manager.policy.num_requests == 3
    assert ring_of(manager.policy, A) in ONCE_AGAIN
    request(manager, [C])
    request(manager, [A, B])
    assert ring_of(manager.policy, A) in MORE_OFTEN


def test_the_touch_of_a_pending_block_is_no_use(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    manager.touch([A])
    manager.prepare_store([A])
    manager.touch([B])  # another request comes between
    manager.touch([A])
    assert ring_of(manager.policy, A) in NEVER_AGAIN
    manager.complete_store([A])
    manager.touch([C])
    manager.touch([A])
    assert ring_of(manager.policy, A) in ONCE_AGAIN


def test_the_finish_of_a_request_is_no_use_where_requests_overlap(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    chains = [[A, B], [C, D]]
    for chain in chains:
        request(manager, chain)
    assert manager.policy.num_requests == 2
    requests = [manager.begin(chain) for chain in chains]
    for each in requests:
        each.prepare_store()
    for each in requests:
        each.finish()
    assert manager.policy.num_requests == 4
    assert ring_of(manager.policy, A) in ONCE_AGAIN
    for chain in [[H], *chains]:
        manager.begin(chain)
    assert manager.policy.num_requests == 7
    assert ring_of(manager.policy, A) in MORE_OFTEN


def test_what_an_answer_adds_belongs_to_the_request(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    request(manager, [C])
    with manager.begin([A, B]) as served:
        served.prepare_store()
        for block in (C, D):
            served.extend([block])
            served.prepare_store(len(served) - 1)
    served.complete_store()
    assert manager.policy.num_requests == 2
    assert ring_of(manager.policy, C) in ONCE_AGAIN
    assert ring_of(manager.policy, D) in NEVER_AGAIN
    check_invariants(manager)


def test_a_caller_that_touches_once_is_counted_each_time(twin: ModuleType) -> None:
    policy = density(twin, 8, [A, B])
    policy.touch([H])
    for number in range(600):
        policy.touch([(A, B)[number % 2]])
        assert policy.num_requests == number + 2
    assert ring_of(policy, B) in MORE_OFTEN


@pytest.mark.parametrize(
    ("offered", "touches", "classes"),
    [
        (False, 1, ONCE_AGAIN),
        (True, 1, NEVER_AGAIN),
        (True, 2, ONCE_AGAIN),  # what was declined is so until its next touch
    ],
)
def test_the_touch_of_a_declined_block_is_no_use(
    twin: ModuleType, offered: bool, touches: int, classes: range
) -> None:
    manager = manager_of(twin, 6)
    train(manager)
    manager.touch([A, B])
    if offered:
        assert manager.prepare_store([A, B]).block_hashes_to_store == []
    for batch in ([B, A], [A, B, C])[:touches]:  # all differ: none repeats one by its hashes
        manager.touch([H])
        manager.touch(batch)
    policy = manager.policy
    del manager  # it alone changes its policy
    assert policy.get(A) is policy.get(B) is None
    assert class_of_ghost(policy, A) in classes
    assert class_of_ghost(policy, B) in classes


def test_what_brings_fewer_hits_is_not_stored(twin: ModuleType) -> None:
    manager = manager_of(twin, 6)
    train(manager)
    before = manager.stats()
    output = manager.prepare_store(block_hashes(*range(500, 520)))
    assert output.block_hashes_to_store == output.block_hashes_evicted == []
    after = manager.stats()
    assert after["not_admitted"] - before["not_admitted"] == 20
    assert after["refused_stores"] == before["refused_stores"]
    assert manager.lookup(block_hashes(1000, 2000)) == 2


def test_free_slots_are_always_filled(twin: ModuleType) -> None:
    manager = manager_of(twin, 3)
    assert names(request(manager, [A, B]).block_hashes_to_store) == "AB"
    output = manager.prepare_store([A, B, C, D, E])
    assert names(output.block_hashes_to_store)[0] == "C"


def test_a_leading_part_is_stored(twin: ModuleType) -> None:
    policy = density(twin, 4, [A, B])
    policy.touch([A, B])
    number, victims = policy.make_room([C, D, E, F], 2, {A, B})
    assert (number, victims) == (2, [])
    number, victims = policy.make_room([C, D, E], 0, {A})
    assert number == len(victims) <= 1


def test_a_long_store_does_not_evict_what_is_protected(twin: ModuleType) -> None:
    old, new = block_hashes(*range(300)), block_hashes(*range(1000, 1200))
    policy = density(twin, 300, old, ghosts=8.0)
    for _ in range(3):  # as ghosts they become denser than what is there
        policy.touch(new[:100])
        policy.touch(new[100:])
        policy.touch([H])
    number, victims = policy.make_room(new, 0, old[:3])
    assert number == len(victims) == 200
    assert dict(victims).keys().isdisjoint(old[:3])
    check_invariants(policy)


def test_make_room_takes_what_is_a_hash_and_a_number(twin: ModuleType) -> None:
    policy = density(twin, 4, [A])
    with pytest.raises(TypeError, match="num_free"):
        policy.make_room([B], 1.5, ())
    with pytest.raises(ValueError, match="num_free"):
        policy.make_room([B], -1, ())
    with pytest.raises(TypeError, match="hashes"):
        policy.make_room([5], 1, ())
    with pytest.raises(TypeError, match="protected"):
        policy.make_room([B], 1, [None])
    check_invariants(policy)


def test_pinned_pending_and_protected_blocks_stay(twin: ModuleType) -> None:
    policy = density(twin, 8, [A, B, C, D])
    policy.insert(E, pinned(4))
    assert evict(policy, 4, A) is None
    assert evict(policy, 3, A) == "BCD"
    assert policy.get(A) is not None
    assert policy.get(E) is not None


def test_a_chain_leaves_tail_first_whatever_its_classes(twin: ModuleType) -> None:
    policy = density(twin, 8, [A, B, C, D])
    policy.touch([A, B, C, D])
    policy.touch([A, B])
    policy.touch([A])
    assert evict(policy, 4) == "DCBA"


def test_a_ghost_keeps_its_history(twin: ModuleType) -> None:
    policy = density(twin, 4, [A])
    for block in (B, A, C, A):
        policy.touch([block])
    assert evict(policy, 1) == "A"
    assert policy.num_ghosts == 3
    policy.insert(A, idle())
    assert ring_of(policy, A) in MORE_OFTEN
    assert policy.num_ghosts == 2


@pytest.mark.parametrize(("ghosts", "most"), [(0, 0), (0.25, 1), (1, 4), (3.5, 14), (16, 64)])
def test_ghosts_are_within_their_number(twin: ModuleType, ghosts: float, most: int) -> None:
    policy = density(twin, 4, ghosts=ghosts)
    for number in range(200):
        policy.touch(block_hashes(number, number + 300, number // 2))
        check_invariants(policy)
        assert policy.num_ghosts <= most
    assert (policy.num_ghosts > 0) == (most > 0)


def test_a_removed_block_is_not_remembered(twin: ModuleType) -> None:
    policy = density(twin, 4, [A])
    policy.touch([A])
    policy.remove(A)
    check_invariants(policy)
    assert policy.num_ghosts == len(policy) == 0


def test_clear_forgets_what_was_learned(twin: ModuleType) -> None:
    manager = manager_of(twin, 6)
    fresh = manager.policy.densities
    train(manager)
    assert manager.policy.densities != fresh
    manager.reset_cache()
    check_invariants(manager.policy)
    assert manager.policy.densities == fresh
    assert manager.policy.num_requests == manager.policy.num_ghosts == 0
    train(manager)
    check_invariants(manager)


def test_densities_fall_with_age_and_rise_with_use(twin: ModuleType) -> None:
    manager = manager_of(twin, 6)
    train(manager)
    table = manager.policy.densities
    for row in table:
        assert all(before >= after > 0 for before, after in pairwise(row[1:]))
    for gap in range(1, 8):
        assert all(
            again >= once >= never
            for never, once, again in zip(
                table[0][1:], table[gap][1:], table[gap + 7][1:], strict=True
            )
        )


def test_nothing_is_drawn_at_random(twin: ModuleType) -> None:
    first, second = manager_of(twin, 20), manager_of(twin, 20)
    for manager in (first, second):
        train(manager)
    assert first.policy.densities == second.policy.densities
    assert first.stats() == second.stats()
    policies = first.policy, second.policy
    del first, second, manager  # they alone change their policies
    assert policies[0].num_ghosts == policies[1].num_ghosts > 20
    seen = block_hashes(*range(1000, 1003), *range(2000, 2003), *range(10**6, 10**6 + 1600))
    leaving = []
    for policy in policies:  # what was remembered of a ghost shows when it is stored
        for block in seen:
            if policy.get(block) is None:
                policy.insert(block, idle())
        assert policy.num_ghosts == 0
        rings = [list(ring) for ring in policy.rings]
        leaving.append((rings, [block for block, _ in policy.evict(len(policy), ())]))
    assert leaving[0] == leaving[1]


@pytest.mark.parametrize("ghosts", [-0.1, 16.1, float("nan"), "many", None, True])
def test_the_number_of_ghosts_is_checked(twin: ModuleType, ghosts: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="ghosts must be"):
        density(twin, 4, ghosts=ghosts)


def test_the_option_is_part_of_the_policy_string(twin: ModuleType) -> None:
    assert manager_of(twin, 4, "?ghosts=2").policy.ghosts == 2.0
    with pytest.raises(ValueError, match="has no option 'ghost'"):
        manager_of(twin, 4, "?ghost=2")


def test_capacity_zero_stores_nothing(twin: ModuleType) -> None:
    manager = manager_of(twin, 0)
    output = request(manager, [A, B, C])
    assert output.block_hashes_to_store == []
    check_invariants(manager)


def test_a_request_longer_than_the_capacity_is_stored_in_part(twin: ModuleType) -> None:
    manager = manager_of(twin, 3)
    output = request(manager, [A, B, C, D, E, F, G])
    assert names(output.block_hashes_to_store) == "ABC"
    assert manager.lookup([A, B, C]) == 3
    check_invariants(manager)


def test_epochs_that_ended_long_ago_are_told_apart_no_more() -> None:
    densities = Densities(64)
    for number in range(1, NUM_EPOCHS + 20):
        assert densities.end_request(1024, number) is not None, "each ends an epoch"
        densities.start(0, number)
    densities._check({0: list(range(1, NUM_EPOCHS + 20))})
