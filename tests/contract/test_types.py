"""The types that managers exchange: statuses, specs, outputs, events."""

from __future__ import annotations

import abc
import ctypes
import importlib
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload import (
    Backend,
    BlockHash,
    BlockIDsLoadStoreSpec,
    BlockStatus,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
)
from kvoffload.policies import registry
from tests.blocks import A, B


def test_public_classes_say_where_users_import_them_from_or_nearby() -> None:
    classes = {name for name in kvoffload.__all__ if inspect.isclass(getattr(kvoffload, name))}
    assert len(classes) > len(registry.names()) + 20
    for name in classes:
        public = getattr(kvoffload, name)
        assert public.__module__.split(".")[0] == "kvoffload"
        assert public.__qualname__ == public.__name__ == name


def test_the_public_classes_are_those_of_the_implementation() -> None:
    chosen = importlib.import_module(f"tests._{kvoffload.IMPLEMENTATION}")
    for name in registry.names():
        policy_class = chosen.policy_class(name)
        assert getattr(kvoffload, policy_class.__name__) is policy_class
    for name in ("CPUBackend", "CPUOffloadingManager", "LRUOffloadingManager"):
        assert getattr(kvoffload, name) is getattr(chosen, name)
    assert kvoffload.ARCOffloadingManager is chosen.ARCOffloadingManager


def test_a_status_is_sixteen_bytes_with_the_id_at_eight_and_a_hash_is_bytes() -> None:
    assert BlockHash.__supertype__ is bytes  # type: ignore[attr-defined]
    assert issubclass(BlockStatus, ctypes.Structure)
    assert [(name, kind) for name, kind, *_ in BlockStatus._fields_] == [
        ("ref_cnt", ctypes.c_int32),
        ("block_id", ctypes.c_int64),
    ]
    assert ctypes.sizeof(BlockStatus) == 16
    assert [vars(BlockStatus)[name].offset for name in ("ref_cnt", "block_id")] == [0, 8]


def test_a_new_status_is_pending_and_then_ready_when_idle_or_pinned() -> None:
    status = BlockStatus(7)
    assert (status.ref_cnt, status.block_id, status.is_ready) == (-1, 7, False)
    for ref_cnt in (0, 1, 99, -1):
        status.ref_cnt = ref_cnt
        assert status.is_ready is (ref_cnt >= 0)
    with pytest.raises(AttributeError):
        status.is_ready = True  # type: ignore[misc]


def test_a_spec_is_abstract() -> None:
    assert isinstance(LoadStoreSpec, abc.ABCMeta)
    with pytest.raises(TypeError):
        LoadStoreSpec()  # type: ignore[abstract]
    with pytest.raises(TypeError):
        BlockIDsLoadStoreSpec([1])  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("spec_class", "medium"), [(CPULoadStoreSpec, "CPU"), (GPULoadStoreSpec, "GPU")]
)
def test_a_concrete_spec_names_its_medium_and_holds_int64_ids(
    spec_class: type[BlockIDsLoadStoreSpec], medium: str
) -> None:
    assert issubclass(spec_class, BlockIDsLoadStoreSpec)
    assert issubclass(spec_class, LoadStoreSpec)
    assert spec_class.medium() == medium
    for block_ids in ([3, 1, 2], np.array([3, 1, 2], dtype=np.int32)):
        spec = spec_class(block_ids)
        assert spec.medium() == medium
        assert isinstance(spec.block_ids, np.ndarray)
        assert spec.block_ids.dtype == np.int64
        assert spec.block_ids.shape == (3,)
        assert spec.block_ids.tolist() == [3, 1, 2]
    empty = spec_class([]).block_ids
    assert (empty.dtype, empty.shape) == (np.int64, (0,))


@pytest.mark.parametrize(
    ("block_ids", "kind", "message"),
    [
        ([[1, 2], [3, 4]], ValueError, "block_ids must have one dimension, got 2"),
        (5, ValueError, "block_ids must have one dimension, got 0"),
        ([1.5], TypeError, "block_ids must hold integers"),
        (["1"], TypeError, "block_ids must hold integers"),
        ([True], TypeError, "block_ids must hold integers"),
        ([2**63], ValueError, "block_ids must be < 2\\*\\*63, got 9223372036854775808"),
    ],
)
def test_ids_that_are_none(block_ids: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        CPULoadStoreSpec(block_ids)


def test_a_spec_has_ids_of_its_own_and_shows_them_as_a_status_does() -> None:
    given = np.array([1, 2], dtype=np.int64)
    spec = CPULoadStoreSpec(given)
    given[0] = 9
    assert spec.block_ids.tolist() == [1, 2]
    assert repr(BlockStatus(7)) == "BlockStatus(ref_cnt=-1, block_id=7)"
    assert repr(GPULoadStoreSpec([1, 2])) == "GPULoadStoreSpec(block_ids=[1, 2])"
    assert "removed=True" in repr(OffloadingEvent([A], 16, "CPU", True))


def test_generic_classes_take_the_type_of_their_specs(twin: ModuleType) -> None:
    """Annotations and base classes that are evaluated at run time hold there, too."""
    spec = CPULoadStoreSpec([0])
    output = PrepareStoreOutput[CPULoadStoreSpec]([A], spec, [B])
    assert output == PrepareStoreOutput([A], spec, [B])
    assert OffloadingManager[CPULoadStoreSpec] is not OffloadingManager[GPULoadStoreSpec]
    for name in ("LRUOffloadingManager", "ARCOffloadingManager"):
        manager = getattr(twin, name)[CPULoadStoreSpec](twin.CPUBackend(16, 2))
        assert type(manager) is getattr(twin, name)
        output = manager.prepare_store([A])
        assert type(output) is PrepareStoreOutput
        assert output.store_spec.block_ids.tolist() == [0]
        manager.complete_store([A])
        assert type(manager.prepare_load([A])) is CPULoadStoreSpec
    assert issubclass(twin.CPUBackend, Backend)
