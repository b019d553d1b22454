"""ARC as published; the notation is that of figure 4 of Megiddo & Modha (FAST'03)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, H, names
from tests.policies.steps import evict, idle, pinned, policy_of

pytestmark = pytest.mark.fast


def arc(twin: ModuleType, capacity: int, blocks: list[bytes] | None = None) -> Any:
    return policy_of(twin, "arc-classic", capacity, blocks or [])


def lists(policy: Any) -> tuple[str, str, str, str]:
    check_invariants(policy)
    return names(policy.t1), names(policy.t2), names(policy.b1), names(policy.b2)


def test_a_ghost_returns_to_t2_and_one_of_b1_raises_the_target(twin: ModuleType) -> None:
    policy = arc(twin, 4, [A, B])
    assert evict(policy, 1) == "A"
    policy.insert(A, idle())
    assert lists(policy) == ("B", "A", "", "")
    assert policy.target_t1_size == 1.0


def test_the_target_adapts_once_for_each_return(twin: ModuleType) -> None:
    policy = arc(twin, 4, [A, B])
    evict(policy, 1)
    policy.touch([A])
    policy.touch([A])
    assert policy.target_t1_size == 1.0
    policy.insert(A, idle())
    assert policy.target_t1_size == 1.0
    assert policy.evict(2, set()) is not None
    policy.touch([A])
    assert policy.target_t1_size == 0.0  # A is a ghost of B2 now, and counts again


def test_the_step_is_the_share_by_which_the_other_ghost_list_is_larger(twin: ModuleType) -> None:
    policy = arc(twin, 8, [A, B, C, D])
    policy.touch([D, C, B])  # B, C, D to T2
    evict(policy, 4)
    assert lists(policy) == ("", "", "A", "BCD")
    policy.touch([A])
    assert policy.target_t1_size == 3.0
    policy.touch([B])
    assert policy.target_t1_size == 2.0


def test_the_target_stays_within_the_capacity(twin: ModuleType) -> None:
    policy = arc(twin, 2, [A, B])
    evict(policy, 2)
    policy.touch([A, B])
    assert policy.target_t1_size == 2.0
    policy.insert(A, idle())
    policy.insert(B, idle())
    evict(policy, 2)
    policy.touch([A, B])
    assert policy.target_t1_size == 0.0


def test_replace_takes_from_t1_while_it_exceeds_the_target(twin: ModuleType) -> None:
    policy = arc(twin, 4, [A, B, C, D])
    policy.touch([D, C])
    assert lists(policy) == ("AB", "CD", "", "")
    assert evict(policy, 3) == "ABC"


def test_replace_counts_a_new_block_in_t1_for_each_victim(twin: ModuleType) -> None:
    policy = arc(twin, 6, [A, B, C, D, E, F])
    policy.touch([F, E, D, C])  # T1 A B, T2 C D E F
    evict(policy, 1)  # A
    policy.insert(A, idle())  # to T2, target 1
    policy.insert(G, idle())  # T1 B G
    policy.touch([B])  # T1 G
    # |T1| = 1 is the target: T2 gives; the block that takes the place makes it 2: T1 gives.
    assert evict(policy, 2) == "CG"


def test_the_other_list_gives_where_one_has_none(twin: ModuleType) -> None:
    policy = arc(twin, 4, [A])
    policy.insert(B, pinned())
    policy.touch([A])
    assert lists(policy) == ("B", "A", "", "")
    assert evict(policy, 2) is None
    assert lists(policy) == ("B", "A", "", "")
    assert evict(policy, 1) == "A"


def test_t1_and_its_ghosts_are_within_the_capacity(twin: ModuleType) -> None:
    policy = arc(twin, 2, [A, B])
    for block in (C, D, E):
        evict(policy, 1)
        policy.insert(block, idle())
    # |T1| = c, so B1 has no room at all: case IV A of the paper.
    assert lists(policy) == ("DE", "", "", "")


def test_all_lists_together_are_within_twice_the_capacity(twin: ModuleType) -> None:
    policy = arc(twin, 2, [A, B])
    for one, other in ((C, D), (E, F), (G, H)):
        policy.touch(list(policy.t1))  # both to T2
        assert evict(policy, 2) is not None
        policy.insert(one, idle())
        policy.insert(other, idle())
        check_invariants(policy)
        assert len(policy) + policy.num_ghosts <= 4
    assert names(policy.b2) == "FE"


def test_a_pending_block_has_not_been_seen_again(twin: ModuleType) -> None:
    policy = arc(twin, 4, [A])
    policy.insert(B, BlockStatus(1))
    policy.insert(C, BlockStatus(2))
    policy.touch([B, C])
    assert lists(policy) == ("ACB", "", "", "")


def test_whoever_has_seen_a_block_has_seen_its_prefix(twin: ModuleType) -> None:
    policy = arc(twin, 8, [A, B])
    evict(policy, 2)
    policy.touch([C, B])  # C was never here, B, behind it, was
    policy.insert(C, BlockStatus(0))
    policy.insert(B, BlockStatus(1))
    policy.touch([C, B])
    assert lists(policy)[:2] == ("", "BC")
