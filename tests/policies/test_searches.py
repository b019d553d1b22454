"""Searches for victims: what they look at, and that one which ends without memory changes nothing.

Blocks that wait for those behind them, in S3-FIFO, marks and a hand have moved until then.
"""

from __future__ import annotations

from itertools import count
from types import ModuleType
from typing import Any

import pytest

from kvoffload.policies._queue_py import _Search
from kvoffload.testing.policies import check_invariants
from tests.allocations import fail_after
from tests.blocks import block_hash, block_hashes, store
from tests.differential.pairs import Twins
from tests.observation import observe
from tests.policies.steps import policy_of, request

pytestmark = pytest.mark.fast


@pytest.mark.refused_allocations
@pytest.mark.parametrize("name", ["sieve", "s3fifo"])
def test_an_allocation_that_fails_changes_nothing(twins: Twins, name: str) -> None:
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


def full_of_chains(twin: ModuleType, num_chains: int, length: int = 2) -> Any:
    """Return a manager full of chains whose last blocks are being loaded."""
    manager = twin.CPUOffloadingManager(16, num_chains * length, "s3fifo")
    for number in range(num_chains):
        chain = block_hashes(*range(number * length, (number + 1) * length))
        request(manager, chain)
        manager.prepare_load(chain[-1:])
    return manager


@pytest.mark.refused_allocations
def test_an_allocation_that_fails_while_blocks_wait_changes_nothing(twins: Twins) -> None:
    """Blocks are parked, taken from the heap and put back into it; each step may lack memory."""
    _, compiled = twins
    failures = 0
    for allocations in count():
        manager, same = (full_of_chains(compiled, 150, 3) for _ in range(2))
        for one in (manager, same):
            one.touch(block_hashes(*range(0, 450, 9)))
            one.complete_load(block_hashes(*range(2, 450, 90)))
        new = block_hashes(*range(1000, 1150))
        fail_after(allocations)
        try:
            manager.prepare_store(new[:120])
        except MemoryError:
            failures += 1
        else:
            break
        finally:
            fail_after(None)
        check_invariants(manager)
        assert observe(manager) == observe(same)
        for batch in (new[:1], new[1:20], new[20:]):
            outputs = [one.prepare_store(batch) for one in (manager, same)]
            assert outputs[0].block_hashes_evicted == outputs[1].block_hashes_evicted
            check_invariants(manager)
        assert observe(manager) == observe(same)
    assert failures > 4


def test_a_search_in_python_looks_once_at_what_waits(
    monkeypatch: pytest.MonkeyPatch, twins: Twins
) -> None:
    looks = 0
    may_leave = _Search.may_leave

    def counting(search: _Search, block: Any) -> bool:
        nonlocal looks
        looks += 1
        return may_leave(search, block)

    monkeypatch.setattr(_Search, "may_leave", counting)
    for num_chains in (20, 200):
        manager = full_of_chains(twins[0], num_chains)
        store(manager, [b"first"])  # meets all of them
        for number in range(5):
            looks = 0
            store(manager, [block_hash(10**6 + number)])
            assert looks < 8
