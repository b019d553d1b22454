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
from tests.blocks import A, B, C, D, E, block_hash, store
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
