"""SIEVE, rule by rule."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload.testing.policies import check_invariants
from tests.allocations import fail_after
from tests.blocks import A, B, C, D, E, F, block_hashes, names
from tests.policies.steps import evict, idle, pinned, policy_of, request

pytestmark = pytest.mark.fast


def sieve(twin: ModuleType, blocks: list[bytes]) -> Any:
    return policy_of(twin, "sieve", 8, blocks)


def queue(policy: Any) -> str:
    check_invariants(policy)
    return names(policy.blocks)


def use(policy: Any, *blocks: bytes) -> None:
    """Touch blocks one by one, which links none of them."""
    for block in blocks:
        policy.touch([block])


def test_use_does_not_reorder(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B, C])
    use(policy, A)
    assert queue(policy) == "ABC"


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


def test_a_block_that_waits_loses_its_mark(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B, C])
    policy.touch([A, B])  # a chain: A waits for B
    assert evict(policy, 1) == "C"
    policy.remove(B)
    policy.insert(D, idle())
    assert evict(policy, 1) == "A"


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


def test_a_block_waits_for_those_behind_it(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B, C])
    policy.touch([A, B, C])  # a chain; all are visited
    assert evict(policy, 1) == "C"
    assert evict(policy, 2) == "BA"


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


def test_where_those_behind_are_in_use_the_deepest_leaves_first(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B, C])
    policy.insert(D, pinned())
    policy.touch([A, B, C, D])
    assert evict(policy, 2) == "CB"
    assert evict(policy, 1, D) == "A"
    assert evict(policy, 1) is None


def test_the_hand_goes_back_to_the_oldest_once_the_deepest_had_to_leave(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B, C, D])
    policy.insert(E, pinned())
    policy.touch([B, C, D, E])
    assert evict(policy, 1) == "A"
    assert evict(policy, 1) == "D"
    assert policy.hand == B


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


def test_a_block_that_outlived_its_prefix_is_free_of_it(twin: ModuleType) -> None:
    policy = sieve(twin, [A])
    policy.insert(B, pinned())
    policy.touch([A, B])
    assert evict(policy, 1) == "A"
    policy.insert(A, idle())
    policy.get(B).ref_cnt = 0
    use(policy, B)
    assert evict(policy, 2) == "AB"  # not linked any more: A, not visited, leaves first


def test_links_never_form_a_circle(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B, C])
    for batch in ([A, B], [B, A], [B, C], [C, A], [A, A], [C, B, A]):
        policy.touch(batch)
        check_invariants(policy)
    assert sorted(evict(policy, 3) or "") == ["A", "B", "C"]


@pytest.mark.parametrize("n", [3, 4, 5])
def test_a_failed_eviction_changes_nothing(twin: ModuleType, n: int) -> None:
    policy, same = (sieve(twin, [A, B, C, D, E]) for _ in range(2))
    for one in (policy, same):
        use(one, A, C, E)
    assert evict(policy, n, A, B, C) is None
    assert (queue(policy), policy.hand) == (queue(same), same.hand)
    assert [evict(policy, 1) for _ in range(5)] == [evict(same, 1) for _ in range(5)]


def test_a_failed_store_leaves_the_queue(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 4, "sieve")
    request(manager, block_hashes(0, 1))
    manager.prepare_store(block_hashes(0, 1, 2, 3))
    manager.touch(block_hashes(0, 1, 2, 3))
    manager.complete_store(block_hashes(2, 3), success=False)
    check_invariants(manager)
    assert set(manager.policy.blocks) == set(block_hashes(0, 1))


def test_clear_forgets_marks_links_and_hand(twin: ModuleType) -> None:
    policy = sieve(twin, [A, B])
    policy.touch([A, B])
    policy.clear()
    assert (queue(policy), policy.hand) == ("", None)
    for block in (A, B, F):
        policy.insert(block, idle())
    assert evict(policy, 3) == "ABF"


@pytest.mark.refused_allocations
def test_an_allocation_that_fails_changes_nothing(twins: tuple[ModuleType, ModuleType]) -> None:
    """A search that is cancelled after it has taken marks and moved the hand leaves no trace."""
    _, compiled = twins
    outcomes = []
    for allocations in range(8):
        policy, same = (policy_of(compiled, "sieve", 200) for _ in range(2))
        chain = block_hashes(*range(150))
        for one in (policy, same):
            for block in chain:
                one.insert(block, idle())
            use(one, *chain[:75])
        fail_after(allocations)
        try:
            outcomes.append(policy.evict(100, ()) is not None)
        except MemoryError:
            outcomes.append(False)
        finally:
            fail_after(None)
        check_invariants(policy)
        if not outcomes[-1]:
            assert list(policy.blocks) == list(same.blocks)
            assert policy.hand == same.hand
            for _ in range(5):
                assert [b for b, _ in policy.evict(20, ())] == [b for b, _ in same.evict(20, ())]
    assert outcomes[0] is False
    assert outcomes[-1] is True
