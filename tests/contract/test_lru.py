"""LRU: one recency order; the least recent idle block leaves first."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.blocks import A, B, C, D, E, F, names
from tests.policies.steps import evict, idle

pytestmark = pytest.mark.fast


@pytest.fixture
def policy(twin: ModuleType) -> Any:
    """Return a policy with A, B, C, D idle, A the least recent."""
    policy = twin.LRUCachePolicy(cache_capacity=4)
    for block_id, block in enumerate((A, B, C, D)):
        policy.insert(block, idle(block_id))
    return policy


def test_insert_puts_a_block_at_the_most_recent_end(policy: Any) -> None:
    policy.touch([A])
    policy.insert(E, idle(4))
    assert names(policy.blocks) == "BCDAE"


def test_touch_takes_the_last_hash_first(policy: Any) -> None:
    policy.touch([A, B, F, C])
    assert names(policy.blocks) == "DCBA"
    policy.touch([C, B, C])
    assert names(policy.blocks) == "DABC"


@pytest.mark.parametrize("ref_cnt", [-1, 1, 7])
def test_blocks_that_are_not_idle_are_skipped_and_keep_their_place(
    policy: Any, ref_cnt: int
) -> None:
    policy.get(A).ref_cnt = ref_cnt
    policy.get(C).ref_cnt = ref_cnt
    assert evict(policy, 2) == "BD"
    policy.insert(E, idle(4))
    assert names(policy.blocks) == "ACE"
    policy.get(A).ref_cnt = 0
    policy.get(C).ref_cnt = 0
    assert evict(policy, 3) == "ACE"


def test_an_eviction_that_fails_leaves_the_order(policy: Any) -> None:
    policy.get(B).ref_cnt = 1
    assert evict(policy, 3, D) is None
    assert names(policy.blocks) == "ABCD"
    policy.get(B).ref_cnt = 0
    assert evict(policy, 4) == "ABCD"
