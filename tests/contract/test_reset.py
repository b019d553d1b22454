"""`reset_cache`: everything is dropped, without events; counters stay."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.blocks import A, B, C, D, E, block_hashes, names, store
from tests.contract.conftest import Build
from tests.observation import observe
from tests.parts import ListBackend

pytestmark = pytest.mark.fast


def test_after_a_reset_a_manager_is_as_new(build: Build) -> None:
    manager, fresh = build(4), build(4)
    for block in block_hashes(*range(10)):
        store(manager, [block])
        manager.touch([block])
    manager.touch(block_hashes(1, 2, 3))
    manager.reset_cache()
    for steady in (manager, fresh):
        store(steady, [A, B, C])
        steady.touch([B])
        store(steady, [D, E])
    used, new = observe(manager), observe(fresh)
    for seen in (used, new):
        del seen["stats"]
        seen.pop("backend", None)
    assert used == new


@pytest.mark.parametrize(
    ("name", "touched", "order"),
    [
        ("LRUOffloadingManager", [B], "ACDBE"),
        ("ARCOffloadingManager", [C, A], "BDEAC"),  # T1 before T2
    ],
)
def test_a_users_backend_gets_its_blocks_back_least_recent_first(
    twin: ModuleType, name: str, touched: list[bytes], order: str
) -> None:
    backend = ListBackend(16, 5)
    manager = getattr(twin, name)(backend)
    store(manager, [A, B, C, D])
    manager.touch(touched)
    manager.prepare_load([A])
    manager.prepare_store([E])
    manager.reset_cache()
    assert names(bytes.fromhex(block.label) for block in backend.freed) == order
    assert len({id(block) for block in backend.freed}) == backend.get_num_free_blocks() == 5


def test_a_status_held_over_a_reset_keeps_its_last_values(build: Build) -> None:
    manager = build(3)
    store(manager, [A, B])
    manager.prepare_load([B])
    held = manager.policy.get(B)
    values = held.ref_cnt, held.block_id
    manager.reset_cache()
    store(manager, [C, D, E])
    assert (held.ref_cnt, held.block_id) == values
