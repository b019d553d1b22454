"""Introspection: read-only, in order of recency, live."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload import BlockStatus, OffloadingManager
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, block_hash, names, store
from tests.contract.conftest import Build, builder
from tests.parts import ListBackend


@pytest.mark.parametrize(
    ("kind", "views"),
    [
        ("cpu-lru", ()),
        ("lru-over-cpu-backend", ("backend", "blocks")),
        ("arc-over-user-backend", ("backend", "t1", "t2", "b1", "b2")),
    ],
)
def test_attributes_are_read_only(twin: ModuleType, kind: str, views: tuple[str, ...]) -> None:
    manager = builder(twin, kind)(2, enable_events=True)
    for name in ("block_size", "medium", "events", "policy", "block_table", *views):
        with pytest.raises(AttributeError):
            setattr(manager, name, None)


def test_the_medium_is_the_backends(twin: ModuleType) -> None:
    for manager_class in (twin.LRUOffloadingManager, twin.ARCOffloadingManager):
        backend = ListBackend(32, 1, "DRAWER")
        manager = manager_class(backend)
        assert (manager.block_size, manager.medium) == (32, "DRAWER")
        assert manager.backend is backend


@pytest.mark.parametrize("pool", ["CPUBackend", "ListBackend"])
@pytest.mark.parametrize(
    ("name", "lists"),
    [
        ("LRUOffloadingManager", {"blocks": "CDBE"}),
        ("ARCOffloadingManager", {"t1": "CDE", "t2": "B", "b1": "A", "b2": ""}),
    ],
)
def test_a_manager_shows_the_lists_of_its_policy_least_recent_first(
    twin: ModuleType, name: str, lists: dict[str, str], pool: str
) -> None:
    """What can be asked of them is in `test_views`."""
    manager = getattr(twin, name)(getattr(twin, pool, ListBackend)(16, 4))
    store(manager, [A, B, C, D])
    manager.touch([B])
    store(manager, [E])
    manager.prepare_load([C])
    for view, content in lists.items():
        assert names(getattr(manager, view)) == content
        assert getattr(manager, view) == getattr(manager.policy, view)
    shown = manager.blocks if "blocks" in lists else {**manager.t1, **manager.t2}
    assert {names([key]): (status.ref_cnt, status.block_id) for key, status in shown.items()} == {
        "C": (1, 2),
        "D": (0, 3),
        "B": (0, 1),
        "E": (0, 0),
    }
    if "t1" in lists:
        manager.touch([A])
        assert (manager.target_t1_size, manager.cache_capacity) == (1.0, 4)


def test_a_status_of_an_evicted_block_never_shows_anothers(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    store(manager, [B])
    held = manager.policy.get(A)
    assert names(store(manager, [C]).block_hashes_evicted) == "A"
    manager.prepare_load([C, C])
    store(manager, [D])
    assert (held.ref_cnt, held.block_id) == (0, 0)
    manager.complete_load([C, C])
    store(manager, [A, E])
    manager.prepare_load([A])
    assert (held.ref_cnt, held.block_id) == (0, 0)


@pytest.mark.parametrize("leaves", ["failed", "reset"])
def test_a_status_of_a_pending_block_that_left_keeps_its_last_values(
    build: Build, leaves: str
) -> None:
    manager = build(2)
    manager.prepare_store([A])
    held = manager.policy.get(A)
    manager.complete_store([A], success=False) if leaves == "failed" else manager.reset_cache()
    store(manager, [B, C])
    assert (held.ref_cnt, held.block_id) == (-1, 0)


def rows(table: Any) -> list[tuple[int, int]]:
    """Return what a block table holds, after a look at its form."""
    assert isinstance(table, np.ndarray)
    assert table.dtype == np.dtype(BlockStatus)
    assert table.dtype.names == ("ref_cnt", "block_id")
    assert (table.dtype["ref_cnt"], table.dtype["block_id"]) == (np.int32, np.int64)
    assert table.ndim == 1
    assert not table.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        table["ref_cnt"] = 0
    return sorted(table.tolist())


def test_a_block_table_shows_the_moment_of_the_call(build: Build) -> None:
    manager = build(2)
    store(manager, [A, B])
    table = manager.block_table
    again = manager.block_table
    assert not np.shares_memory(table, again)
    manager.prepare_load([A])
    store(manager, [C])
    manager.reset_cache()
    del manager
    assert rows(table) == rows(again) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("change", [lambda manager: store(manager, [C, D, E]), "reset_cache"])
def test_a_block_table_is_whole_where_threads_run_as_it_is_allocated(
    build: Build, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    manager = build(5)
    store(manager, [A, B])
    zeros = np.zeros

    def changed(*arguments: Any) -> Any:
        monkeypatch.undo()
        getattr(manager, change)() if isinstance(change, str) else change(manager)
        return zeros(*arguments)

    monkeypatch.setattr(np, "zeros", changed)
    table = manager.block_table
    monkeypatch.undo()
    assert rows(table) == [(0, block_id) for block_id in range(len(manager))]


def test_a_block_table_is_the_same_while_statuses_are_held(build: Build) -> None:
    manager = build(2)
    held = []
    for block in (A, B, C, D, E):
        store(manager, [block])
        held.append(manager.policy.get(block))
        table = manager.block_table
        assert rows(table) == [(0, slot) for slot in range(min(2, len(held)))]
        assert not np.shares_memory(table, manager.block_table)


def test_a_policy_alone_has_a_block_table(twin: ModuleType) -> None:
    for name in registry.names():
        policy = twin.policy_class(name)(4)
        for number in range(3000):  # far beyond the capacity
            policy.insert(block_hash(number), BlockStatus(number))
        assert rows(policy.block_table) == [(-1, number) for number in range(3000)]


@pytest.mark.parametrize("kind", ["cpu-lru", "cpu-arc"])
def test_the_check_finds_what_is_broken(twin: ModuleType, kind: str) -> None:
    manager = builder(twin, kind)(2)
    store(manager, [A, B])
    check_invariants(manager)
    first, second = manager.policy.get(A), manager.policy.get(B)
    first.ref_cnt = -7
    with pytest.raises(AssertionError, match="ref_cnt"):
        check_invariants(manager)
    first.ref_cnt = 0
    first.block_id = second.block_id
    with pytest.raises(AssertionError, match="every resident block owns a slot of its own"):
        check_invariants(manager)
    first.block_id = 0
    check_invariants(manager)


def test_a_manager_shows_its_policy_its_blocks_and_their_states(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 8, "sieve")
    store(manager, [A, B, C])
    manager.prepare_load([A])
    manager.prepare_store([D])
    assert repr(manager) == (
        "<CPUOffloadingManager over SieveCachePolicy: 4 of 8 blocks resident, 1 pending, 1 pinned>"
    )


def test_a_manager_over_user_parts_shows_itself_too(build: Build) -> None:
    manager = build(4)
    store(manager, [A])
    assert ": 1 of 4 blocks resident, 0 pending, 0 pinned>" in repr(manager)
    assert type(manager.policy).__name__ in repr(manager)


def test_a_manager_that_is_not_initialised_shows_that(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager.__new__(twin.CPUOffloadingManager)
    assert repr(manager) == "<CPUOffloadingManager, not initialised>"


MANAGERS = ("CPUOffloadingManager", "LRUOffloadingManager", "ARCOffloadingManager")


@pytest.mark.parametrize("name", MANAGERS)
def test_the_help_of_a_method_is_its_contract(twin: ModuleType, name: str) -> None:
    manager_class = getattr(twin, name)
    assert manager_class.__module__ == "kvoffload"
    declared = [method for method in vars(OffloadingManager) if not method.startswith("_")]
    assert len(declared) == 9
    for method in declared:
        contract = inspect.getdoc(getattr(OffloadingManager, method))
        assert contract
        assert inspect.getdoc(getattr(manager_class, method)) == contract
