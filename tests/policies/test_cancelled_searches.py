"""Searches for victims that end without memory, after they have moved blocks, marks and a hand."""

from __future__ import annotations

from types import ModuleType

import pytest

from kvoffload.testing.policies import check_invariants
from tests.allocations import fail_after
from tests.blocks import block_hashes
from tests.observation import observe
from tests.policies.steps import policy_of

pytestmark = pytest.mark.fast


@pytest.mark.refused_allocations
@pytest.mark.parametrize("name", ["sieve", "s3fifo"])
def test_an_allocation_that_fails_changes_nothing(
    twins: tuple[ModuleType, ModuleType], name: str
) -> None:
    outcomes = []
    chain = block_hashes(*range(1000, 1150))
    for allocations in range(10):
        policy, same = (policy_of(twins[1], name, 200, chain) for _ in range(2))
        for one in (policy, same):
            for block in chain[10:90]:
                for other in block_hashes(100, 101):
                    one.touch([block, other])
        fail_after(allocations)
        try:
            outcomes.append(policy.evict(140, ()) is not None)
        except MemoryError:
            outcomes.append(False)
        finally:
            fail_after(None)
        check_invariants(policy)
        if not outcomes[-1]:
            assert observe(policy) == observe(same)
            for _ in range(7):
                assert [b for b, _ in policy.evict(20, ())] == [b for b, _ in same.evict(20, ())]
    assert outcomes[0] is False
    assert outcomes[-1] is True
