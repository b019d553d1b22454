"""The pool: fresh ids counting up, then the free list, last freed first out."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload import Backend, BlockStatus, CPULoadStoreSpec
from tests.blocks import A, B, C, D, once, slots, store

pytestmark = pytest.mark.fast


def taken(statuses: list[BlockStatus]) -> list[int]:
    return [status.block_id for status in statuses]


def test_a_pool_is_a_backend_in_host_memory(twin: ModuleType) -> None:
    backend = twin.CPUBackend(16, 4)
    assert isinstance(backend, Backend)
    assert (backend.block_size, backend.medium) == (16, "CPU")
    statuses = backend.allocate_blocks(once([A, B, C]))
    assert type(statuses) is list
    assert taken(statuses) == [0, 1, 2]
    spec = backend.get_load_store_spec([C, A], [statuses[2], statuses[0]])
    assert isinstance(spec, CPULoadStoreSpec)
    assert (slots(spec), spec.block_ids.dtype) == ([2, 0], np.int64)
    with pytest.raises(TypeError, match=r"\[1\]"):
        backend.allocate_blocks([D, 5])
    assert backend.get_num_free_blocks() == 1


def test_an_allocation_beyond_the_free_blocks_takes_none(twin: ModuleType) -> None:
    backend = twin.CPUBackend(16, 2)
    backend.allocate_blocks([A])
    with pytest.raises(ValueError, match="1 free"):
        backend.allocate_blocks([B, C])
    assert backend.get_num_free_blocks() == 1
    assert taken(backend.allocate_blocks([B])) == [1]


@pytest.mark.parametrize("block_id", [-1, 1, 2, 2**40])
def test_a_slot_that_is_not_given_out_cannot_be_freed(twin: ModuleType, block_id: int) -> None:
    backend = twin.CPUBackend(16, 2)
    (status,) = backend.allocate_blocks([A])
    with pytest.raises(ValueError, match=str(block_id)):
        backend.free(BlockStatus(block_id))
    assert backend.get_num_free_blocks() == 1
    backend.free(status)
    with pytest.raises(ValueError, match="0"):
        backend.free(status)
    assert backend.get_num_free_blocks() == 2


@pytest.mark.parametrize("block", [None, 0, object()])
def test_only_a_status_can_be_freed(twin: ModuleType, block: Any) -> None:
    backend = twin.CPUBackend(16, 2)
    backend.allocate_blocks([A])
    with pytest.raises(TypeError, match=r"^block must be a BlockStatus, got "):
        backend.free(block)
    with pytest.raises(TypeError, match=r"^each of blocks must be a BlockStatus, got "):
        backend.get_load_store_spec([A], [block])


def test_the_capacity_is_the_number_of_free_blocks_at_construction(twin: ModuleType) -> None:
    backend = twin.CPUBackend(16, 5)
    backend.allocate_blocks([A, B])
    manager = twin.ARCOffloadingManager(backend)
    assert manager.cache_capacity == manager.policy.cache_capacity == 3
    store(manager, [A])
    assert manager.cache_capacity == 3
    assert twin.CPUOffloadingManager(16, 7, "arc").policy.cache_capacity == 7
