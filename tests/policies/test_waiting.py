"""Idle blocks that wait for those behind them in S3-FIFO, the policy that keeps chains."""

from __future__ import annotations

from itertools import count
from types import ModuleType
from typing import Any

import pytest

from kvoffload.policies import registry
from kvoffload.policies._queue_py import _Search
from kvoffload.testing.policies import check_invariants
from tests.allocations import fail_after
from tests.blocks import A, B, C, D, E, F, G, H, block_hash, block_hashes, names, store
from tests.observation import observe
from tests.policies.steps import idle, request


def full_of_chains(twin: ModuleType, num_chains: int, length: int = 2, name: str = "s3fifo") -> Any:
    """Return a manager full of chains whose last blocks are being loaded."""
    manager = twin.CPUOffloadingManager(16, num_chains * length, name)
    for number in range(num_chains):
        chain = block_hashes(*range(number * length, (number + 1) * length))
        request(manager, chain)
        manager.prepare_load(chain[-1:])
    return manager


def test_the_deepest_leave_first_and_then_as_the_queues_stand(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 8, "s3fifo")
    for chain in ([A, B], [C, D, E], [F, G, H]):
        request(manager, chain)
        manager.prepare_load(chain[-1:])
    new = block_hashes(100, 101, 102)
    # Depth 1, in the order of the queue; then those of depth 0, never one of the batch.
    assert names(manager.prepare_store([F, *new[:2]]).block_hashes_evicted) == "DG"
    assert names(manager.prepare_store([A, new[2]]).block_hashes_evicted) == "C"
    assert manager.prepare_store([A, F, b"x"]) is None
    check_invariants(manager)
    # Nothing is behind F any more, B behind A is in use.
    assert names(manager.prepare_store([b"x", b"y"]).block_hashes_evicted) == "FA"
    assert manager.prepare_store([b"z"]) is None


def test_a_block_that_waited_leaves_when_those_behind_it_have(twin: ModuleType) -> None:
    manager = full_of_chains(twin, 3)
    assert names(manager.prepare_store([b"x"]).block_hashes_evicted) == "A"
    manager.complete_load([F])
    assert names(store(manager, [b"y"]).block_hashes_evicted) in ("C", "F")
    manager.complete_load([B, D])
    check_invariants(manager)
    left = [block for block in (B, C, D, E, F) if block in manager]
    output = store(manager, block_hashes(*range(100, 101 + len(left))))
    assert set(output.block_hashes_evicted) == {*left, b"y"}


def test_a_block_that_waits_is_no_victim_after_it_was_pinned(twin: ModuleType) -> None:
    manager = full_of_chains(twin, 2)
    assert names(manager.prepare_store([b"x"]).block_hashes_evicted) == "A"
    manager.prepare_load([C])
    check_invariants(manager)
    assert manager.prepare_store([b"y"]) is None
    manager.complete_load([C])
    assert names(manager.prepare_store([b"y"]).block_hashes_evicted) == "C"
    check_invariants(manager)


def test_a_refused_store_changes_nothing_while_blocks_wait(twin: ModuleType) -> None:
    manager, same = (full_of_chains(twin, 8, 3) for _ in range(2))
    new = block_hashes(*range(100, 130))
    for one in (manager, same):
        one.prepare_store(new[:3])
    before = observe(manager)
    for size in (14, 20, 24):
        assert manager.prepare_store(new[5 : 5 + size]) is None
        after = observe(manager)
        assert {**after, "stats": None} == {**before, "stats": None}
        check_invariants(manager)
    for _ in range(8):
        block = new.pop()
        one, other = manager.prepare_store([block]), same.prepare_store([block])
        assert one.block_hashes_evicted == other.block_hashes_evicted
    assert resident_numbers(manager) == resident_numbers(same)


def resident_numbers(manager: Any) -> list[tuple[int, int]]:
    return sorted(as_pair for as_pair in manager.block_table.tolist() if as_pair[1] >= 0)


def test_blocks_wait_in_policies_used_alone(twins: tuple[ModuleType, ModuleType]) -> None:
    """Anyone may write to the statuses between two searches."""
    policies = [twin.policy_class("s3fifo")(60) for twin in twins]
    chains = [block_hashes(*range(start, start + 6)) for start in range(0, 60, 6)]
    for policy in policies:
        for chain in chains:
            for block in chain:
                policy.insert(block, idle())
            policy.touch(chain)
            policy.get(chain[-1]).ref_cnt = 1
    num_evicted = 0
    for number in range(20):
        victims = []
        for policy in policies:
            for block in chains[number % 10][2:5]:
                status = policy.get(block)
                if status is not None:
                    status.ref_cnt = int(number % 4 == 0)
            victims.append([block for block, _ in policy.evict(2, chains[-1 - number % 10]) or ()])
            check_invariants(policy)
        assert victims[0] == victims[1]
        num_evicted += len(victims[0])
    assert num_evicted == 40


@pytest.mark.refused_allocations
def test_an_allocation_that_fails_while_blocks_wait_changes_nothing(
    twins: tuple[ModuleType, ModuleType],
) -> None:
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
    monkeypatch: pytest.MonkeyPatch, twins: tuple[ModuleType, ModuleType]
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


@pytest.mark.parametrize("name", registry.names())
def test_a_released_block_leaves_once_however_a_search_meets_it_again(
    twin: ModuleType, name: str
) -> None:
    """Released blocks are chosen first; a scan, a heap or a list then holds them as well."""
    manager = full_of_chains(twin, 4, name=name)
    manager.prepare_store([b"x"])  # meets the other idle blocks
    left = [block for block in (A, C, E, G) if block in manager]
    manager.release(left[:1])
    output = manager.prepare_store(block_hashes(*range(100, 100 + len(left))))
    assert output.block_hashes_evicted[:1] == left[:1]
    assert len(set(output.block_hashes_evicted)) == len(output.block_hashes_evicted)
    check_invariants(manager)
    manager.complete_store(output.block_hashes_to_store)
    for number in range(4):
        manager.complete_load(block_hashes(2 * number + 1))
    store(manager, block_hashes(*range(200, 202)))
    check_invariants(manager)
