"""SIEVE, rule by rule."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, block_hashes, names
from tests.policies.steps import evict, idle, pinned, policy_of, request

pytestmark = pytest.mark.fast


def sieve(twin: ModuleType, blocks: list[bytes]) -> Any:
    return policy_of(twin, "sieve", 8, blocks)


def queue(policy: Any) -> str:
    check_invariants(policy)
    return names(policy.blocks)


def use(policy: Any, *blocks: bytes) -> None:
    policy.touch(blocks)


def hits_of_the_paper(asked: list[int], capacity: int) -> int:
    """Serve blocks one by one as algorithm 1 of the paper does, on a list; return the hits."""
    queue: list[int] = []  # the tail, which is the oldest, first
    visited: set[int] = set()
    hand = hits = 0
    for block in asked:
        if block in queue:
            visited.add(block)
            hits += 1
            continue
        if len(queue) == capacity:
            while queue[hand] in visited:
                visited.discard(queue[hand])
                hand = (hand + 1) % capacity
            del queue[hand]
            hand %= capacity - 1 or 1
        queue.append(block)
    return hits


@pytest.mark.parametrize("capacity", [1, 2, 7, 40])
def test_it_hits_what_the_algorithm_of_the_paper_hits(
    twin: ModuleType, seed: int, capacity: int
) -> None:
    draw = random.Random(seed)
    asked = [int(draw.paretovariate(0.4)) % (3 * capacity) for _ in range(1000)]
    manager = twin.CPUOffloadingManager(16, capacity, "sieve")
    for number in asked:
        request(manager, block_hashes(number))
    assert manager.stats()["hit_blocks"] == hits_of_the_paper(asked, capacity)


def test_the_oldest_not_visited_leaves_and_visited_ones_lose_their_mark(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B, C, D])
    use(policy, A, C)
    assert evict(policy, 1) == "B"
    assert (queue(policy), policy.hand) == ("ACD", C)
    assert evict(policy, 1) == "D"  # C loses its mark
    assert policy.hand == A  # the next lap begins at the oldest
    assert evict(policy, 1) == "A"
    assert evict(policy, 1) == "C"


def test_the_hand_stays_where_it_is_between_evictions(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B, C, D])
    use(policy, A)
    assert evict(policy, 1) == "B"
    policy.insert(E, idle())
    assert evict(policy, 3) == "CDE"
    assert evict(policy, 1) == "A"


def test_once_the_newest_has_left_the_hand_goes_to_the_oldest(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B])
    use(policy, A)
    assert evict(policy, 1) == "B"
    assert policy.hand == A
    policy.insert(C, idle())
    assert policy.hand == A
    assert evict(policy, 2) == "AC"


def test_behind_a_block_in_use_the_hand_does_not_go_to_the_oldest(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B])
    policy.insert(C, pinned())
    use(policy, A)
    assert evict(policy, 1) == "B"
    assert policy.hand == C


def test_a_block_that_was_removed_comes_back_without_its_mark(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B])
    use(policy, A)
    policy.remove(A)
    for block in (A, C):
        policy.insert(block, idle())
    assert evict(policy, 2) == "BA"
    assert queue(policy) == "C"


def test_a_pending_block_is_not_visited_and_moves_to_the_newest_end(twin: ModuleType) -> None:
    policy = sieve(twin, [A])
    policy.insert(B, BlockStatus(1))
    policy.insert(C, BlockStatus(2))
    policy.touch([B, C])
    assert queue(policy) == "ACB"
    for block in (B, C):
        policy.get(block).ref_cnt = 0
    assert evict(policy, 3) == "ACB"


def test_a_block_in_use_keeps_its_mark_and_place(twin: ModuleType) -> None:
    policy = sieve(twin, [])
    policy.insert(A, pinned())
    policy.insert(B, idle())
    policy.insert(C, idle())
    use(policy, A)
    assert evict(policy, 1) == "B"
    policy.get(A).ref_cnt = 0
    assert evict(policy, 1) == "C"
    assert queue(policy) == "A"
    policy.insert(D, idle())
    assert evict(policy, 1) == "D"  # A had its mark until now
    assert evict(policy, 1) == "A"


def test_a_block_in_use_comes_back_between_its_neighbours(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 4, "sieve")
    for block in (A, B, C, D):
        request(manager, [block])
    manager.prepare_load([B])
    assert names(request(manager, [E]).block_hashes_evicted) == "A"
    assert names(manager.policy.blocks) == "BCDE"
    assert names(request(manager, [F]).block_hashes_evicted) == "C"
    assert (names(manager.policy.blocks), manager.policy.hand) == ("BDEF", D)
    manager.complete_load([B])
    check_invariants(manager)
    output = manager.prepare_store(block_hashes(101, 102, 103, 104))
    assert names(output.block_hashes_evicted) == "DEFB"


def test_a_failed_store_leaves_the_queue(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 4, "sieve")
    request(manager, block_hashes(0, 1))
    manager.prepare_store(block_hashes(0, 1, 2, 3))
    manager.touch(block_hashes(0, 1, 2, 3))
    manager.complete_store(block_hashes(2, 3), success=False)
    check_invariants(manager)
    assert set(manager.policy.blocks) == set(block_hashes(0, 1))
