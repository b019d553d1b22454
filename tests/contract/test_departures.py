"""Intended differences from vLLM's releases; one test per row of the table."""

from __future__ import annotations

from types import ModuleType

import pytest

from kvoffload import BlockNotFoundError, BlockNotPinnedError, OffloadError
from tests import _python
from tests.blocks import A, B, C, D, E, F, G, block_hashes, names, once, slots, store
from tests.contract.conftest import Build
from tests.contract.test_arc import arc, fill, with_ghosts, with_target
from tests.observation import observe
from tests.policies.steps import evict, idle


def test_departure_arc_touch_of_a_pending_t1_block(build_arc: Build) -> None:
    manager = build_arc(3)
    manager.prepare_store([A])
    store(manager, [B])
    manager.touch([A])
    assert A in manager
    assert (names(manager.policy.t1), names(manager.policy.t2)) == ("BA", "")
    manager.complete_store([A])
    assert manager.lookup([A]) == 1


def test_departure_arc_prepare_store_is_all_or_nothing(build_arc: Build) -> None:
    manager = build_arc(4)
    store(manager, [A, B, C, D])
    manager.touch([D])
    manager.prepare_load([B, C])
    before = observe(manager)
    assert manager.prepare_store([E, F, G]) is None
    after = observe(manager)
    assert {**after, "stats": None} == {**before, "stats": None}


def test_departure_a_block_of_the_batch_is_protected(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    store(manager, [B])
    output = manager.prepare_store([A, C])
    assert names(output.block_hashes_evicted) == "B"
    assert manager.lookup([A]) == 1


def test_departure_arc_falls_back_to_t1(build_arc: Build) -> None:
    manager = build_arc(2)
    for block in (A, B, C, D):
        store(manager, [block])
    manager.touch([A, A, B])
    assert manager.policy.target_t1_size == 2.0
    manager.prepare_load([D])
    manager.complete_store([])
    output = store(manager, [E])
    assert names(output.block_hashes_evicted) == "C"
    manager.complete_load([D])
    manager.touch([D])
    assert (names(manager.policy.t1), names(manager.policy.t2)) == ("E", "D")
    manager.prepare_load([D])
    assert names(store(manager, [F]).block_hashes_evicted) == "E"


def test_departure_a_failed_store_drops_only_pending_blocks(build: Build) -> None:
    manager = build(3)
    store(manager, [A])
    manager.prepare_store([B])
    manager.complete_store([A, B], success=False)
    assert (manager.lookup([A]), B in manager) == (1, False)


def test_departure_complete_store_of_an_unknown_hash_is_ignored(build: Build) -> None:
    manager = build(2, enable_events=True)
    manager.prepare_store([B])
    manager.complete_store([A, B])
    assert (A in manager, manager.lookup([B])) == (False, 1)


def test_departure_duplicates_in_a_batch_leak_no_slot(build: Build) -> None:
    manager = build(4)
    output = store(manager, [A, B, A, A])
    assert names(output.block_hashes_to_store) == "AB"
    assert slots(output.store_spec) == [0, 1]
    assert manager.stats()["free"] == 2
    assert len(store(manager, [C, D]).block_hashes_evicted) == 0


def test_departure_a_failing_prepare_load_pins_nothing(build: Build) -> None:
    manager = build(2)
    store(manager, [A, B])
    with pytest.raises(BlockNotFoundError):
        manager.prepare_load([A, B, C])
    assert manager.stats()["pinned"] == 0
    assert len(store(manager, [D, E]).block_hashes_evicted) == 2


def test_departure_take_events_is_detached(build: Build) -> None:
    manager = build(2, enable_events=True)
    store(manager, [A])
    store(manager, [B])
    next(manager.take_events())
    assert list(manager.take_events()) == []


def test_departure_evict_of_a_negative_number_is_an_error(twin: ModuleType) -> None:
    policy = arc(twin, 4, [A, B])
    lru = twin.LRUCachePolicy(4)
    lru.insert(A, idle(0))
    for each in (policy, lru):
        with pytest.raises(ValueError, match="-1"):
            each.evict(-1, ())
    assert (len(policy), len(lru)) == (2, 1)


def test_departure_insert_of_a_resident_block_is_an_error(twin: ModuleType) -> None:
    for policy_class in (twin.LRUCachePolicy, twin.ARCCachePolicy):
        policy = policy_class(4)
        policy.insert(A, idle(0))
        with pytest.raises(ValueError, match="resident"):
            policy.insert(A, idle(1))
        assert policy.get(A).block_id == 0


def test_departure_remove_of_an_absent_block_is_an_error(twin: ModuleType) -> None:
    for policy_class in (twin.LRUCachePolicy, twin.ARCCachePolicy):
        with pytest.raises(BlockNotFoundError):
            policy_class(4).remove(A)


def test_departure_lookup_checks_every_hash_that_it_looks_at(build: Build) -> None:
    manager = build(2)
    store(manager, [A, B])
    with pytest.raises(TypeError, match=r"\[2\]"):
        manager.lookup([A, B, "not bytes"])
    manager = build(2)
    with pytest.raises(TypeError, match=r"\[2\]"):
        manager.lookup(iter([A, B, "not bytes"]))
    batch = once([A, B, C])
    assert manager.lookup(batch) == 0
    assert list(batch) == []


def test_departure_the_clamped_target_stays_a_float(twin: ModuleType) -> None:
    policy = with_ghosts(twin, 2, [A, B], [C])
    policy.touch([A, A, A])
    assert (policy.target_t1_size, type(policy.target_t1_size)) == (2.0, float)
    policy.touch([C, C, C])
    assert (policy.target_t1_size, type(policy.target_t1_size)) == (0.0, float)


def test_departure_what_was_asserted_is_an_exception(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    for call, batch in (
        (manager.prepare_load, [B]),
        (manager.complete_load, [B]),
        (manager.complete_load, [A]),
    ):
        with pytest.raises(OffloadError) as caught:
            call(batch)
        assert not isinstance(caught.value, AssertionError)
    manager.prepare_load([A])
    manager.complete_load([A])
    with pytest.raises(BlockNotPinnedError):
        manager.complete_load([A])


def test_departure_arc_evicts_many_blocks_in_one_scan() -> None:
    looked_at = 0

    class Counting(frozenset[bytes]):
        def __contains__(self, block: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return super().__contains__(block)

    size = 400
    blocks = block_hashes(*range(size))
    policy = fill(arc(_python, size), blocks[: size // 2], blocks[size // 2 :])
    for pinned in blocks[:50]:
        policy.get(pinned).ref_cnt = 1
    assert len(policy._evict(size - 50, Counting())) == size - 50
    assert looked_at == size - 50


def test_departure_the_order_is_that_of_skipping_however_often_blocks_are_passed_over(
    twin: ModuleType,
) -> None:
    policy = fill(with_target(twin, 64, 1), [A, B, C, D], [E, F])
    for pinned in (A, C, E):
        policy.get(pinned).ref_cnt = 1
    assert evict(policy, 4) is None
    assert evict(policy, 1, B) == "D"
    for unpinned in (C, A):
        policy.get(unpinned).ref_cnt = 0
    policy.insert(G, idle(9))
    assert evict(policy, 3) == "ABC"
    assert (names(policy.t1), names(policy.t2)) == ("G", "EF")
