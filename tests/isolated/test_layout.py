"""What the compiled core lays out in memory, and the view that shows it without a copy."""

from __future__ import annotations

import ctypes
from types import ModuleType

import numpy as np
import pytest

from kvoffload import BlockStatus
from kvoffload.policies import registry
from tests.blocks import A, B, C, store

Twins = tuple[ModuleType, ModuleType]


def test_a_block_is_a_status_and_a_node_is_one_cache_line(twins: Twins) -> None:
    from kvoffload._core.table import BLOCK_DTYPE, LAYOUT

    assert LAYOUT["block"] == ctypes.sizeof(BlockStatus) == 16
    assert LAYOUT["node"] == BLOCK_DTYPE.itemsize == 64
    assert LAYOUT["bucket"] == 64
    fields = BLOCK_DTYPE.fields
    assert fields is not None
    for name in ("ref_cnt", "block_id"):
        field = vars(BlockStatus)[name]
        assert (fields[name][1], fields[name][0].itemsize) == (field.offset, field.size)


@pytest.mark.parametrize("policy", registry.names())
def test_the_compiled_block_table_is_the_memory_itself(twins: Twins, policy: str) -> None:
    _, compiled = twins
    manager = compiled.CPUOffloadingManager(16, 4, policy)
    store(manager, [A, B])
    table = manager.block_table
    assert np.shares_memory(table, manager.block_table)
    assert sorted(table["ref_cnt"][table["block_id"] >= 0].tolist()) == [0, 0]
    manager.prepare_load([A])
    manager.prepare_store([C])
    assert sorted(table["ref_cnt"][table["block_id"] >= 0].tolist()) == [-1, 0, 1]
    manager.reset_cache()
    assert set(table["block_id"].tolist()) == {-1}
    del manager
    assert set(table["block_id"].tolist()) == {-1}


def test_the_python_block_table_is_a_copy(twins: Twins) -> None:
    python, _ = twins
    manager = python.CPUOffloadingManager(16, 4)
    store(manager, [A])
    table = manager.block_table
    manager.prepare_load([A])
    assert table["ref_cnt"].tolist() == [0]


def test_a_status_lies_on_the_block_itself(twins: Twins) -> None:
    _, compiled = twins
    manager = compiled.CPUOffloadingManager(16, 4)
    store(manager, [A, B])
    first, second = manager.policy.get(B), manager.policy.get(B)
    assert ctypes.addressof(first) == ctypes.addressof(second)
    table = manager.block_table
    start = table.__array_interface__["data"][0]
    offset = ctypes.addressof(first) - start
    assert offset % table.strides[0] == 0
    assert table[offset // table.strides[0]]["block_id"] == first.block_id == 1
