"""A value written through a live status changes no other block's slot, and none outside."""

from __future__ import annotations

import random
import sys
from types import FrameType, ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, block_hashes, names, slots, store
from tests.contract.conftest import Build
from tests.parts import KeepingListPolicy, ListPolicy


@pytest.mark.parametrize("wrong", [1, 3, 4, -5, 2**62])  # other blocks' slots, or none of the pool
@pytest.mark.parametrize("name", ["LRUOffloadingManager", "ARCOffloadingManager"])
def test_a_reset_frees_its_own_slots(twin: ModuleType, name: str, wrong: int) -> None:
    backend = twin.CPUBackend(16, 4)
    manager, other = getattr(twin, name)(backend), twin.LRUOffloadingManager(backend)
    store(manager, [A])
    store(other, [B, C])
    manager.policy.get(A).block_id = wrong
    manager.reset_cache()
    assert backend.get_num_free_blocks() == 2
    assert slots(store(manager, [D, E]).store_spec) == [3, 0]
    assert slots(other.prepare_load([B, C])) == [1, 2]
    check_invariants(manager)
    check_invariants(other)


def test_a_written_ref_cnt_makes_no_count_negative(build_pooled: Build) -> None:
    manager = build_pooled(4)
    store(manager, [A, B])
    manager.policy.get(A).ref_cnt = -1
    manager.policy.get(B).ref_cnt = 2
    manager.complete_store([A])
    manager.complete_load([B, B])
    stats = manager.stats()
    assert (stats["pending"], stats["pinned"], stats["resident"]) == (0, 0, 2)


@pytest.mark.parametrize("policy", [*registry.names(), ListPolicy, KeepingListPolicy])
def test_whatever_is_written_each_slot_has_one_owner(twin: ModuleType, policy: Any) -> None:
    generator = random.Random(str(policy))
    keys = block_hashes(*range(20))
    for capacity in (1, 2, 5, 8):
        manager = twin.CPUOffloadingManager(16, capacity, policy)
        owned: dict[bytes, int] = {}
        held: list[BlockStatus] = []
        for _ in range(400):
            batch = generator.sample(keys, generator.randrange(1, 4))
            choice = generator.randrange(6)
            status = manager.policy.get(batch[0])
            if choice == 0 and status is not None:
                status.block_id = generator.choice([0, 1, 4, 10**9, -1, 2**62, -(2**63)])
                status.ref_cnt = generator.choice([0, 0, -1, 1, 5, -7])
                if generator.random() < 0.5:
                    held.append(status)
            elif choice == 1:
                manager.touch(batch)
            elif choice == 2 and all(manager.lookup([key]) for key in batch):
                loaded = slots(manager.prepare_load(batch))
                assert loaded == [owned[key] for key in batch]
                manager.complete_load(batch)
            elif choice == 3 and generator.random() < 0.05:
                manager.reset_cache()
                owned.clear()
            else:
                output = manager.prepare_store(batch)
                if output is None:
                    continue
                for key in output.block_hashes_evicted:
                    del owned[key]
                for key, slot in zip(
                    output.block_hashes_to_store, slots(output.store_spec), strict=True
                ):
                    assert 0 <= slot < capacity
                    assert slot not in owned.values()
                    owned[key] = slot
                manager.complete_store(batch, generator.random() < 0.9)
                owned = {key: slot for key, slot in owned.items() if key in manager}
            assert len(manager) == len(owned)
            assert manager.stats()["free"] == capacity - len(owned)


@pytest.mark.parametrize("name", ["LRUOffloadingManager", "ARCOffloadingManager"])
def test_a_managers_slot_is_not_freed_from_outside(twin: ModuleType, name: str) -> None:
    backend = twin.CPUBackend(16, 3)
    manager = getattr(twin, name)(backend)
    store(manager, [A, B])
    (outside,) = backend.allocate_blocks([C])
    for status in (manager.policy.get(A), BlockStatus(1)):
        with pytest.raises(ValueError, match="block must have a slot that allocate_blocks gave"):
            backend.free(status)
    assert backend.get_num_free_blocks() == 0
    backend.free(BlockStatus(outside.block_id))
    with pytest.raises(ValueError, match="got 2"):
        backend.free(outside)
    output = store(manager, [E, F])
    assert (names(output.block_hashes_evicted), slots(output.store_spec)) == ("A", [0, 2])
    check_invariants(manager)


def test_a_backend_in_use_is_not_initialised_again(twin: ModuleType) -> None:
    backend = twin.CPUBackend(16, 4)
    backend.__init__(32, 3)
    assert (backend.block_size, backend.num_blocks) == (32, 3)
    manager = twin.LRUOffloadingManager(backend)
    store(manager, [A, B])
    with pytest.raises(RuntimeError, match="initialised again: 2 of its slots are in use"):
        backend.__init__(16, 1)
    assert (backend.block_size, backend.num_blocks) == (32, 3)
    assert slots(manager.prepare_load([A, B])) == [0, 1]
    manager.complete_load([A, B])
    manager.reset_cache()
    backend.__init__(16, 1)
    assert backend.get_num_free_blocks() == 1


def test_a_batch_that_changes_while_its_statuses_are_made(twin: ModuleType) -> None:
    backend = twin.CPUBackend(16, 2)
    batch: list[bytes] = [A, B, C, D, E]
    made = 0

    def change(frame: FrameType, event: str, _: object) -> None:
        nonlocal made
        if event == "call" and frame.f_code is BlockStatus.__init__.__code__:
            made += 1
            if made == 5:
                batch.clear()

    sys.setprofile(change)
    try:
        with pytest.raises(ValueError, match="must not outnumber the 2 free blocks, got 5"):
            backend.allocate_blocks(batch)
    finally:
        sys.setprofile(None)
    assert backend.get_num_free_blocks() == 2
