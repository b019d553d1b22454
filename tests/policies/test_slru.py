"""SLRU, rule by rule."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, names
from tests.policies.steps import evict, idle, pinned, policy_of

pytestmark = pytest.mark.fast


def slru(twin: ModuleType, capacity: int, blocks: list[bytes], protected: float = 0.5) -> Any:
    return policy_of(twin, "slru", capacity, blocks, protected=protected)


def segments(policy: Any) -> tuple[str, str]:
    check_invariants(policy)
    return names(policy.probation), names(policy.protected)


def test_a_block_is_protected_once_it_is_seen_again(twin: ModuleType) -> None:
    policy = slru(twin, 4, [A, B, C])
    policy.touch([A])
    assert segments(policy) == ("BC", "A")
    policy.touch([B])
    policy.touch([A])
    assert segments(policy) == ("C", "BA")


def test_protected_gives_what_it_has_too_many_to_probation(twin: ModuleType) -> None:
    policy = slru(twin, 4, [A, B, C, D])
    assert policy.protected_size == 2
    policy.touch([A, B, C])
    assert segments(policy) == ("DC", "BA")


def test_probation_gives_before_protected(twin: ModuleType) -> None:
    policy = slru(twin, 4, [A, B, C])
    policy.touch([A])
    assert evict(policy, 3) == "BCA"


@pytest.mark.parametrize(
    ("share", "capacity", "size"), [(0.0, 10, 0), (0.8, 10, 8), (1, 10, 10), (0.5, 3, 1)]
)
def test_the_size_is_the_share_rounded_down(
    twin: ModuleType, share: float, capacity: int, size: int
) -> None:
    assert slru(twin, capacity, [], share).protected_size == size


def test_without_a_share_it_is_lru(twin: ModuleType) -> None:
    policy = slru(twin, 4, [A, B, C], 0.0)
    policy.touch([A])
    assert segments(policy) == ("BCA", "")


def test_a_pending_block_has_not_been_seen_again(twin: ModuleType) -> None:
    policy = slru(twin, 4, [A])
    policy.insert(B, BlockStatus(1))
    policy.insert(C, BlockStatus(2))
    policy.touch([B, C])
    assert segments(policy) == ("ACB", "")


def test_the_prefix_of_a_block_that_was_protected_before_is_protected(twin: ModuleType) -> None:
    policy = slru(twin, 4, [B])
    policy.touch([B])
    policy.insert(A, BlockStatus(1))
    assert segments(policy) == ("A", "B")
    policy.touch([A, B])
    assert segments(policy) == ("", "BA")


def test_a_block_in_use_is_not_demoted(twin: ModuleType) -> None:
    policy = slru(twin, 4, [A, B, C])
    policy.insert(D, pinned())
    policy.touch([D])
    for block in (A, B, C):
        policy.touch([block])
    assert segments(policy) == ("AB", "DC")
    policy.get(D).ref_cnt = 0
    policy.touch([A])
    assert segments(policy) == ("BD", "CA")


def test_a_block_that_left_comes_back_on_probation(twin: ModuleType) -> None:
    policy = slru(twin, 4, [A, B])
    policy.touch([A])
    assert evict(policy, 2) == "BA"
    policy.insert(A, idle())
    assert segments(policy) == ("A", "")
