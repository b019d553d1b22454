"""`complete_store`: pending blocks become idle or are dropped; nothing else is touched."""

from __future__ import annotations

import pytest

from tests.blocks import A, B, C, D, names, store
from tests.contract.conftest import Build
from tests.observation import observe

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("success", [True, False])
def test_only_the_pending_ones_of_a_mixed_batch_change(build: Build, success: bool) -> None:
    manager = build(4, enable_events=True)
    store(manager, [A, B])
    manager.prepare_load([B])
    before = observe(manager)
    manager.complete_store([C, A, B], success)
    assert observe(manager) == before
    manager.prepare_store([D])
    manager.complete_store([C, A, B, D], success)
    assert (A in manager, B in manager, D in manager) == (True, True, success)


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
