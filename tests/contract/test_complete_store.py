"""`complete_store`: pending blocks become idle or are dropped; nothing else is touched."""

from __future__ import annotations

import pytest

from tests.blocks import A, B, C, D, names, once, slots, store
from tests.contract.conftest import Build
from tests.observation import observe

pytestmark = pytest.mark.fast


def test_success_makes_pending_blocks_idle(build: Build) -> None:
    manager = build(4)
    manager.prepare_store([A, B])
    assert manager.complete_store(once([A, B])) is None
    assert manager.lookup([A, B]) == 2
    assert manager.policy.get(A).ref_cnt == 0
    assert manager.stats()["pending"] == 0


def test_failure_drops_pending_blocks_and_frees_their_slots(build: Build) -> None:
    manager = build(2)
    manager.prepare_store([A, B])
    manager.complete_store(once([A]), success=False)
    assert (A in manager, B in manager) == (False, True)
    assert manager.stats()["free"] == 1
    assert slots(manager.prepare_store([C]).store_spec) == [0]


def test_success_is_the_second_argument(build: Build) -> None:
    manager = build(2)
    manager.prepare_store([A])
    manager.complete_store([A], False)
    assert A not in manager


@pytest.mark.parametrize("success", [True, False])
def test_every_other_hash_is_ignored(build: Build, success: bool) -> None:
    manager = build(4, enable_events=True)
    store(manager, [A])
    store(manager, [B])
    manager.prepare_load([B])
    before = observe(manager)
    manager.complete_store([C, A, B], success)
    assert observe(manager) == before


@pytest.mark.parametrize("success", [True, False])
def test_only_the_pending_ones_of_a_mixed_batch_change(build: Build, success: bool) -> None:
    manager = build(4)
    store(manager, [A])
    manager.prepare_store([B])
    manager.complete_store([C, A, B, D], success)
    assert A in manager
    assert (B in manager) is success


@pytest.mark.parametrize("success", [True, False])
def test_a_second_call_is_a_no_op(build: Build, success: bool) -> None:
    manager = build(4, enable_events=True)
    manager.prepare_store([A, B])
    manager.complete_store([A, B], success)
    before = observe(manager)
    manager.complete_store([A, B], success)
    assert observe(manager) == before
    manager.complete_store([A, B], not success)
    assert observe(manager) == before


@pytest.mark.parametrize("success", [True, False])
def test_a_repeat_in_the_batch_is_a_second_call(build: Build, success: bool) -> None:
    manager = build(4, enable_events=True)
    manager.prepare_store([A])
    manager.complete_store([A, A], success)
    stored = [names(event.block_hashes) for event in manager.take_events()]
    assert stored == (["A"] if success else [])
    assert manager.stats()["free"] == (3 if success else 4)
    assert manager.stats()["failed_blocks"] == (0 if success else 1)


def test_a_store_that_completes_keeps_its_place(build_lru: Build) -> None:
    manager = build_lru(3)
    manager.prepare_store([A])
    store(manager, [B])
    manager.complete_store([A])
    store(manager, [C])
    assert names(store(manager, [D]).block_hashes_evicted) == "A"


def test_a_failed_block_can_be_stored_again(build: Build) -> None:
    manager = build(1)
    manager.prepare_store([A])
    manager.complete_store([A], success=False)
    assert names(store(manager, [A]).block_hashes_to_store) == "A"
    assert manager.lookup([A]) == 1
