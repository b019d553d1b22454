"""LFU with dynamic aging, rule by rule."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from tests.blocks import A, B, C, D
from tests.policies.steps import evict, idle, pinned, policy_of, use

pytestmark = pytest.mark.fast


def lfu(twin: ModuleType, blocks: list[bytes]) -> Any:
    return policy_of(twin, "lfu", 8, blocks)


def test_the_least_frequent_leaves_first(twin: ModuleType) -> None:
    policy = lfu(twin, [A, B, C])
    use(policy, A, 2)
    use(policy, B, 1)
    assert evict(policy, 3) == "CBA"


def test_of_equals_the_least_recent_leaves_first(twin: ModuleType) -> None:
    policy = lfu(twin, [A, B, C])
    policy.touch([B, A])
    assert evict(policy, 3) == "CAB"


def test_the_finish_of_a_request_is_not_another_access(twin: ModuleType) -> None:
    policy = lfu(twin, [A, B])
    policy.begun([A])
    policy.finished([A])
    use(policy, B, 2)
    assert evict(policy, 2) == "AB"


def test_each_touch_outside_a_request_is_an_access(twin: ModuleType) -> None:
    policy = lfu(twin, [B, A])
    for _ in range(2):
        policy.touch([A])
    use(policy, B, 1)
    assert evict(policy, 2) == "BA"


def test_the_touch_of_a_pending_block_counts_nothing(twin: ModuleType) -> None:
    policy = lfu(twin, [A])
    policy.insert(B, BlockStatus(1))
    use(policy, B, 3)
    use(policy, A, 1)
    policy.get(B).ref_cnt = 0
    assert evict(policy, 2) == "BA"


def test_age_lets_new_blocks_catch_up(twin: ModuleType) -> None:
    policy = lfu(twin, [A])
    use(policy, A, 2)  # K = 3
    for age, block in enumerate((B, C, D), start=1):
        policy.insert(block, idle())
        if age < 3:
            # K of the new block is the age + 1; of those with K = 3 the oldest is A.
            assert evict(policy, 1) == {B: "B", C: "C"}[block]
            assert policy.age == age
    assert evict(policy, 2) == "AD"


def test_counts_stop_at_fifteen(twin: ModuleType) -> None:
    policy = lfu(twin, [A, B])
    use(policy, A, 40)
    use(policy, B, 14)
    assert evict(policy, 2) == "AB"  # both K = 15, A the less recent
    assert policy.age == 15


def test_the_age_stops_at_a_block_that_cannot_leave(twin: ModuleType) -> None:
    policy = lfu(twin, [A])
    policy.insert(B, pinned())
    use(policy, A, 5)
    assert evict(policy, 1) == "A"
    assert policy.age == 1  # the priority of B
    policy.get(B).ref_cnt = 0
    policy.insert(C, idle())
    assert evict(policy, 2) == "BC"
    assert policy.age == 2
