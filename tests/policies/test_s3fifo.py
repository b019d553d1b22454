"""S3-FIFO, rule by rule."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, H, block_hashes, names
from tests.policies.steps import evict, idle, pinned, policy_of, request, use

pytestmark = pytest.mark.fast


def s3fifo(twin: ModuleType, blocks: list[bytes], capacity: int = 4, small: float = 0.5) -> Any:
    return policy_of(twin, "s3fifo", capacity, blocks, small=small)


def queues(policy: Any) -> tuple[str, str, str]:
    check_invariants(policy)
    return names(policy.small), names(policy.main), names(policy.ghosts)


def test_a_new_block_enters_small_leaves_as_a_ghost_and_returns_to_main(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C])
    assert queues(policy) == ("ABC", "", "")
    assert evict(policy, 1) == "A"
    assert queues(policy) == ("BC", "", "A")
    policy.insert(A, idle())
    assert queues(policy) == ("BC", "A", "")


@pytest.mark.parametrize(("times", "victim"), [(0, "A"), (1, "A"), (2, "B"), (9, "B")])
def test_a_block_used_more_than_once_moves_to_main(
    twin: ModuleType, times: int, victim: str
) -> None:
    policy = s3fifo(twin, [A, B, C])
    use(policy, A, times)
    assert evict(policy, 1) == victim
    assert names(policy.main) == ("A" if times > 1 else "")


def test_the_finish_of_a_request_counts_nothing(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C])
    policy.begun([A])
    policy.finished([A])
    assert evict(policy, 1) == "A"


def test_each_touch_outside_a_request_counts(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C])
    policy.touch([A])
    policy.touch([A])
    assert evict(policy, 1) == "B"


def test_main_gives_while_small_is_below_its_size(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C])
    assert policy.small_size == 2
    evict(policy, 2)
    for block in (A, B):
        policy.insert(block, idle())
    assert queues(policy) == ("C", "AB", "")
    assert evict(policy, 1) == "A"
    assert queues(policy) == ("C", "B", "")  # what leaves main is forgotten


def test_each_victim_makes_small_larger_by_the_block_that_comes(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C])
    evict(policy, 2)
    for block in (A, B):
        policy.insert(block, idle())
    assert evict(policy, 2) == "AC"


def test_a_victim_of_small_leaves_its_length_to_what_comes(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C, D, E, F], capacity=8)
    for block in (B, C, D):
        use(policy, block, 2)
    # B, C and D move to main before E leaves; small is one short of its size of 4 then.
    assert evict(policy, 3) == "AEB"
    assert queues(policy) == ("F", "CD", "AE")


def test_main_lets_go_what_has_no_use_left(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C], small=0.0)
    for block in (A, B, C):
        use(policy, block, 2)
    policy.insert(D, idle())
    assert evict(policy, 1) == "D"  # A, B and C moved to main
    use(policy, A, 1)
    use(policy, B, 2)
    assert evict(policy, 3) == "CAB"


def test_ghosts_are_as_many_as_main_is_meant_to_hold(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C, D, E])
    assert evict(policy, 4) == "ABCD"
    assert names(policy.ghosts) == "CD"


def test_the_ghosts_of_an_eviction_push_out_no_ghost_that_is_asked_for(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 4, "s3fifo?small=0.5")  # two ghosts
    for blocks in ([A, B, C, D], [E], [F]):
        request(manager, blocks)
    ghosts = list(manager.policy.ghosts)
    assert names(ghosts) == "DC"
    assert names(request(manager, [D, G]).block_hashes_evicted) == "BA"
    assert queues(manager.policy) == ("EFG", "D", "BA")  # C is the one that is forgotten
    assert request(manager, [A, H]) is not None
    assert names(manager.policy.main) == "DA"
    check_invariants(manager)


def test_a_pending_block_moves_to_the_newest_end_and_counts_nothing(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A])
    policy.insert(B, BlockStatus(1))
    policy.insert(C, BlockStatus(2))
    for _ in range(3):
        policy.touch([B, C])
    assert queues(policy) == ("ACB", "", "")
    for block in (B, C):
        policy.get(block).ref_cnt = 0
    assert evict(policy, 3) == "ACB"


def test_a_block_waits_for_those_behind_it(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C])
    policy.touch([A, B, C])
    assert evict(policy, 2) == "CB"
    assert evict(policy, 1) == "A"


def test_a_block_in_use_keeps_count_and_place(twin: ModuleType) -> None:
    policy = s3fifo(twin, [])
    policy.insert(A, pinned())
    policy.insert(B, idle())
    policy.insert(C, idle())
    use(policy, A, 2)
    assert evict(policy, 1) == "B"
    assert queues(policy) == ("AC", "", "B")
    policy.get(A).ref_cnt = 0
    assert evict(policy, 1) == "C"
    assert queues(policy) == ("", "A", "BC")


def test_blocks_that_were_in_use_stand_before_what_the_scan_has_moved(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 5, "s3fifo?small=0.0")
    policy, new = manager.policy, block_hashes(50, 51, 52)
    for blocks in ([A, B], [C], [D], new[:1]):
        request(manager, blocks)
    for block in (A, B, C, D):
        use(manager, block, 2)
    request(manager, new[1:2])
    assert names(policy.main) == "BACD"
    manager.prepare_load([B, C, D])
    use(manager, new[1], 2)
    request(manager, new[2:3])  # passes B, C and D over, and A, which has B behind it
    manager.complete_load([C, D])
    manager.prepare_load(new[2:3])
    use(manager, A, 1)
    assert manager.prepare_store([C, E]).block_hashes_evicted == [D]
    assert names(policy.main) == "BCA"
    check_invariants(manager)


def test_where_those_behind_are_in_use_the_deepest_leaves_first(twin: ModuleType) -> None:
    policy = s3fifo(twin, [A, B, C])
    policy.insert(D, pinned())
    policy.touch([A, B, C, D])
    assert evict(policy, 2) == "CB"
    assert evict(policy, 1, D) == "A"
    assert evict(policy, 1) is None


def test_the_share_is_an_option(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 10, "s3fifo?small=0.3")
    assert manager.policy.small_size == 3
    assert twin.CPUOffloadingManager(16, 10, "s3fifo").policy.small_size == 1
