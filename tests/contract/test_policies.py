"""Every policy of the table beyond the contract: texts of errors, names, managers.

The contract itself is held by `kvoffload.testing.policies`, in `test_conformance`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockNotFoundError, CachePolicy
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, block_hashes, once, store
from tests.observation import observe
from tests.policies.steps import idle

pytestmark = pytest.mark.fast


@pytest.fixture(params=registry.names())
def policy_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def policy_class(twin: ModuleType, policy_name: str) -> Any:
    return twin.policy_class(policy_name)


@pytest.fixture
def policy(policy_class: Any) -> Any:
    """Return a policy of capacity 4 that holds A, B, C, idle in slots 0, 1, 2."""
    policy = policy_class(cache_capacity=4)
    for block_id, block in enumerate((A, B, C)):
        policy.insert(block, idle(block_id))
    return policy


def test_a_policy_is_a_cache_policy_and_says_its_capacity(policy_class: Any) -> None:
    policy = policy_class(4)
    assert isinstance(policy, CachePolicy)
    assert policy.cache_capacity == 4
    assert len(policy) == 0
    assert bool(policy)
    with pytest.raises(AttributeError):
        policy.cache_capacity = 5  # type: ignore[misc]


def test_insert_of_a_resident_block(policy: Any) -> None:
    before = observe(policy)
    with pytest.raises(ValueError, match=B.hex()):
        policy.insert(B, idle(7))
    assert observe(policy) == before


def test_remove_of_an_absent_block(policy: Any) -> None:
    before = observe(policy)
    with pytest.raises(BlockNotFoundError, match=D.hex()):
        policy.remove(D)
    assert observe(policy) == before
    policy.remove(B)
    with pytest.raises(BlockNotFoundError, match=B.hex()):
        policy.remove(B)
    check_invariants(policy)


@pytest.mark.parametrize("n", [-1, -5, -(2**70)])
def test_evicting_a_negative_number(policy: Any, n: int) -> None:
    before = observe(policy)
    with pytest.raises(ValueError, match="n must be >= 0, got"):
        policy.evict(n, ())
    assert observe(policy) == before


@pytest.mark.parametrize("n", [True, 1.0, "1", None])
def test_evicting_what_is_not_a_number(policy: Any, n: Any) -> None:
    with pytest.raises(TypeError, match="n must be an integer"):
        policy.evict(n, ())
    assert len(policy) == 3


def test_protected_blocks_stay(policy: Any) -> None:
    for form in (list, set, tuple, once, frozenset, dict.fromkeys):
        assert policy.evict(2, form([A, B, F])) is None
    assert [block for block, _ in policy.evict(1, once([A, B, F]))] == [C]
    check_invariants(policy)


def test_the_object_passed_in_is_not_used_again(policy_class: Any) -> None:
    policy = policy_class(4)
    given = idle(5)
    policy.insert(A, given)
    given.ref_cnt, given.block_id = 9, 99
    assert (policy.get(A).ref_cnt, policy.get(A).block_id) == (0, 5)
    ((_, status),) = policy.evict(1, ())
    assert status.block_id == 5


def test_clear_empties(policy: Any) -> None:
    policy.touch([A, B, D])
    policy.evict(1, ())
    policy.clear()
    check_invariants(policy)
    assert len(policy) == 0
    assert [policy.get(block) for block in (A, B, C)] == [None] * 3
    fresh = type(policy)(4)
    for used in (policy, fresh):
        store_alone(used, [D, E])
        used.touch([D])
    assert {**observe(policy), "block_table": None} == {**observe(fresh), "block_table": None}


def store_alone(policy: Any, blocks: list[bytes]) -> None:
    for block_id, block in enumerate(blocks):
        policy.insert(block, idle(block_id))


@pytest.mark.parametrize("element", [5, "x", bytearray(b"x"), None])
def test_bad_hashes(policy: Any, element: Any) -> None:
    before = observe(policy)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: policy.get(element),
        lambda: policy.insert(element, idle(9)),
        lambda: policy.remove(element),
        lambda: policy.touch([A, element]),
        lambda: policy.evict(1, [A, element]),
    )
    for call in calls:
        with pytest.raises(TypeError, match="must be bytes"):
            call()
    assert observe(policy) == before


def test_a_hash_is_not_a_batch_of_a_policys(policy: Any) -> None:
    before = observe(policy)
    with pytest.raises(TypeError, match=r"hashes must be an iterable .*: wrap it in a list"):
        policy.touch(A)
    with pytest.raises(TypeError, match=r"protected must be an iterable .*: wrap it in a list"):
        policy.evict(1, A)
    with pytest.raises(TypeError, match=r"hashes must be an iterable .*: wrap it in a list"):
        policy.make_room(D, 1, ())
    assert observe(policy) == before


def test_empty_hashes(policy: Any) -> None:
    before = observe(policy)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: policy.get(b""),
        lambda: policy.insert(b"", idle(9)),
        lambda: policy.remove(b""),
        lambda: policy.touch([A, b""]),
        lambda: policy.evict(1, [b""]),
    )
    for call in calls:
        with pytest.raises(ValueError, match="empty"):
            call()
    assert observe(policy) == before


@pytest.mark.parametrize("status", [None, 5, (0, 1)])
def test_insert_needs_a_status(policy: Any, status: Any) -> None:
    with pytest.raises(TypeError, match="BlockStatus"):
        policy.insert(D, status)
    assert len(policy) == 3


@pytest.mark.parametrize("capacity", [-1, 2**31, 2**70])
def test_a_capacity_out_of_bounds(policy_class: Any, capacity: int) -> None:
    with pytest.raises(ValueError, match="cache_capacity must be"):
        policy_class(capacity)


@pytest.mark.parametrize("capacity", [True, 1.5, "4", None])
def test_a_capacity_that_is_not_an_integer(policy_class: Any, capacity: Any) -> None:
    with pytest.raises(TypeError, match="cache_capacity must be an integer"):
        policy_class(capacity)


@pytest.mark.parametrize("others", [[], [5, None], [b"", b"x" * 5000]])
def test_make_room_keeps_to_the_hashes_that_it_was_given(policy: Any, others: list[Any]) -> None:
    hashes = [D, E]

    def protected() -> Iterator[bytes]:
        hashes[:] = others
        yield A

    number, victims = policy.make_room(hashes, 1, protected())
    assert 1 <= number <= 2
    assert len(victims) == number - 1
    assert A not in dict(victims)
    check_invariants(policy)


def test_make_room_checks_its_hashes_and_its_number(policy: Any) -> None:
    before = observe(policy)
    for bad in (5, None, [5], [D, None]):
        with pytest.raises(TypeError, match="hashes"):
            policy.make_room(bad, 1, ())
    with pytest.raises(ValueError, match=r"hashes\[1\] must not be empty"):
        policy.make_room([D, b""], 1, ())
    with pytest.raises(TypeError, match="num_free must be an integer"):
        policy.make_room([D], 1.5, ())
    with pytest.raises(ValueError, match="num_free must be >= 0, got -1"):
        policy.make_room([D], -1, ())
    assert observe(policy) == before


def test_a_manager_by_name(twin: ModuleType, policy_name: str, policy_class: Any) -> None:
    manager = twin.CPUOffloadingManager(16, 4, policy_name, enable_events=True)
    assert isinstance(manager.policy, policy_class)
    assert manager.policy.cache_capacity == 4
    generator = random.Random(policy_name)
    for _ in range(200):
        batch = block_hashes(*(generator.randrange(12) for _ in range(generator.randrange(5))))
        manager.touch(batch)
        hits = manager.lookup(batch)
        manager.prepare_load(batch[:hits])
        output = manager.prepare_store(batch)
        if output is not None:
            assert not set(output.block_hashes_evicted) & set(batch)
            manager.complete_store(output.block_hashes_to_store, generator.random() < 0.8)
        manager.complete_load(batch[:hits])
        check_invariants(manager)
    stats = manager.stats()
    assert stats["resident"] + stats["free"] == 4
    assert stats["resident"] == (
        stats["stored_blocks"] - stats["failed_blocks"] - stats["evicted_blocks"]
    )
    manager.reset_cache()
    check_invariants(manager)
    assert manager.stats()["ghosts"] == 0


def test_a_manager_by_class_and_by_instance(twin: ModuleType, policy_class: Any) -> None:
    for policy in (policy_class, policy_class(9)):
        manager = twin.CPUOffloadingManager(16, 2, policy)
        assert isinstance(manager.policy, policy_class)
        assert manager.policy.cache_capacity == (2 if policy is policy_class else 9)
        store(manager, [A, B])
        assert len(manager) == 2
        check_invariants(manager)
