"""What holds for every registered policy, used alone and in a manager."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockNotFoundError, BlockStatus, CachePolicy
from kvoffload.policies import registry
from tests.blocks import A, B, C, D, E, F, block_hash, block_hashes, once, store
from tests.observation import observe


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


def idle(block_id: int) -> BlockStatus:
    status = BlockStatus(block_id)
    status.ref_cnt = 0
    return status


def test_a_policy_is_a_cache_policy_and_says_its_capacity(policy_class: Any) -> None:
    policy = policy_class(4)
    assert isinstance(policy, CachePolicy)
    assert policy.cache_capacity == 4
    assert len(policy) == 0
    assert bool(policy)
    with pytest.raises(AttributeError):
        policy.cache_capacity = 5  # type: ignore[misc]


def test_get_finds_what_was_inserted(policy: Any) -> None:
    assert [policy.get(block).block_id for block in (A, B, C)] == [0, 1, 2]
    assert policy.get(D) is None
    assert len(policy) == 3
    policy._check()


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
    policy._check()


def test_remove_of_a_ghost_is_an_error_too(policy: Any) -> None:
    evicted = policy.evict(3, ())
    for block, _ in evicted:
        with pytest.raises(BlockNotFoundError):
            policy.remove(block)
    policy._check()


def test_remove_takes_blocks_of_every_state(policy: Any) -> None:
    policy.get(A).ref_cnt = -1
    policy.get(B).ref_cnt = 3
    for block in (A, B, C):
        policy.remove(block)
        assert policy.get(block) is None
        policy._check()
    assert len(policy) == 0


def test_evicting_nothing(policy: Any) -> None:
    before = observe(policy)
    assert policy.evict(0, ()) == []
    assert policy.evict(0, {A, B, C}) == []
    assert observe(policy) == before


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


def test_eviction_is_all_or_nothing(policy: Any) -> None:
    policy.get(B).ref_cnt = 1
    before = observe(policy)
    assert policy.evict(3, ()) is None
    assert policy.evict(2, {A}) is None
    assert policy.evict(2**40, ()) is None
    assert observe(policy) == before
    policy._check()
    evicted = policy.evict(2, ())
    assert {block for block, _ in evicted} == {A, C}
    assert len(policy) == 1
    policy._check()


def test_victims_come_with_their_status(policy: Any) -> None:
    held = policy.get(A)
    evicted = dict(policy.evict(3, ()))
    assert {block: status.block_id for block, status in evicted.items()} == {A: 0, B: 1, C: 2}
    assert all(isinstance(status, BlockStatus) for status in evicted.values())
    assert [status.ref_cnt for status in evicted.values()] == [0, 0, 0]
    assert held.block_id == 0


@pytest.mark.parametrize("ref_cnt", [-1, 1, 2**31 - 1])
def test_a_policy_alone_reads_ref_cnt_at_the_call(policy: Any, ref_cnt: int) -> None:
    status = policy.get(B)
    status.ref_cnt = ref_cnt
    assert policy.evict(3, ()) is None
    status.ref_cnt = 0
    assert len(policy.evict(3, ())) == 3


def test_protected_blocks_stay(policy: Any) -> None:
    for form in (list, set, tuple, once, frozenset, dict.fromkeys):
        assert policy.evict(2, form([A, B, F])) is None
    assert [block for block, _ in policy.evict(1, once([A, B, F]))] == [C]
    policy._check()


def test_blocks_can_be_inserted_beyond_the_capacity(policy_class: Any) -> None:
    for capacity in (0, 1, 2):
        policy = policy_class(capacity)
        for number in range(6):
            policy.insert(block_hash(number), idle(number))
            policy._check()
        assert len(policy) == 6
        assert len(policy.evict(6, ())) == 6
        policy._check()


def test_the_live_status_is_what_get_returns(policy_class: Any) -> None:
    policy = policy_class(4)
    given = BlockStatus(5)
    policy.insert(A, given)
    live = policy.get(A)
    assert (live.ref_cnt, live.block_id) == (-1, 5)
    live.ref_cnt = 0
    assert policy.get(A).ref_cnt == 0


def test_the_object_passed_in_is_not_used_again(policy_class: Any) -> None:
    policy = policy_class(4)
    given = idle(5)
    policy.insert(A, given)
    given.ref_cnt, given.block_id = 9, 99
    assert (policy.get(A).ref_cnt, policy.get(A).block_id) == (0, 5)
    ((_, status),) = policy.evict(1, ())
    assert status.block_id == 5


def test_a_held_status_never_shows_another_block(policy: Any) -> None:
    held = {block: policy.get(block) for block in (A, B, C)}
    policy.remove(A)
    policy.evict(2, ())
    for number in range(10, 40):
        policy.insert(block_hash(number), idle(number))
    shown = [(status.ref_cnt, status.block_id) for status in held.values()]
    assert shown == [(0, 0), (0, 1), (0, 2)]
    policy.insert(A, idle(50))
    policy.get(A).ref_cnt = 3
    assert (held[A].ref_cnt, held[A].block_id) == (0, 0)


def test_a_status_held_over_clear(policy: Any) -> None:
    held = policy.get(B)
    held.ref_cnt = 4
    policy.clear()
    policy.insert(D, idle(8))
    assert (held.ref_cnt, held.block_id) == (4, 1)


def test_clear_empties(policy: Any) -> None:
    policy.touch([A, B, D])
    policy.evict(1, ())
    policy.clear()
    policy._check()
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


def test_touch_of_unknown_hashes_brings_nothing_in(policy: Any) -> None:
    policy.touch(once([D, A, E, A]))
    assert len(policy) == 3
    assert policy.get(D) is None
    policy._check()


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


def test_make_room_asks_for_no_more_than_falls_short(policy: Any) -> None:
    number, victims = policy.make_room([D], 1, set())
    assert (number, list(victims)) == (1, [])
    number, victims = policy.make_room([D, E], 1, {A, D, E})
    assert len(victims) == max(0, number - 1)
    assert all(block in (B, C) for block, _ in victims)
    policy._check()


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
    policy._check()


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


def test_make_room_without_room(policy: Any) -> None:
    before = observe(policy)
    answer = policy.make_room([D], 0, {A, B, C, D})
    assert answer is None or answer[0] == 0
    if answer is None:
        assert observe(policy) == before
    policy._check()


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
        manager._check()
    stats = manager.stats()
    assert stats["resident"] + stats["free"] == 4
    assert stats["resident"] == (
        stats["stored_blocks"] - stats["failed_blocks"] - stats["evicted_blocks"]
    )
    manager.reset_cache()
    manager._check()
    assert manager.stats()["ghosts"] == 0


def test_a_manager_by_class_and_by_instance(twin: ModuleType, policy_class: Any) -> None:
    for policy in (policy_class, policy_class(9)):
        manager = twin.CPUOffloadingManager(16, 2, policy)
        assert isinstance(manager.policy, policy_class)
        assert manager.policy.cache_capacity == (2 if policy is policy_class else 9)
        store(manager, [A, B])
        assert len(manager) == 2
        manager._check()


def test_capacity_zero_alone(policy_class: Any) -> None:
    policy = policy_class(0)
    policy.touch([A, B])
    assert policy.evict(0, ()) == []
    assert policy.evict(1, ()) is None
    policy._check()
