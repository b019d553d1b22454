"""The suite for backends: every backend passes it, and a wrong one does not; and the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload import Backend, BlockStatus, CPULoadStoreSpec, LoadStoreSpec
from kvoffload.testing.backends import BackendConformance
from tests.blocks import A, B, C, D, once, slots, store
from tests.parts import ListBackend

from .test_conformance import failures

pytestmark = pytest.mark.fast


class TestBuiltIn(BackendConformance):
    @pytest.fixture(autouse=True)
    def choose(self, twin: ModuleType) -> None:
        self.twin = twin

    def make_backend(self, num_blocks: int) -> Backend[Any]:
        backend: Backend[Any] = self.twin.CPUBackend(16, num_blocks)
        return backend


class TestListBackend(BackendConformance):
    def make_backend(self, num_blocks: int) -> Backend[Any]:
        return ListBackend(16, num_blocks)


class OpaqueSpec(LoadStoreSpec):
    @staticmethod
    def medium() -> str:
        return "OPAQUE"


class OpaqueBackend(ListBackend):
    def get_load_store_spec(self, hashes: Any, blocks: Any) -> OpaqueSpec:  # type: ignore[override]
        return OpaqueSpec()


class TestOpaqueBackend(BackendConformance):
    def make_backend(self, num_blocks: int) -> Backend[Any]:
        return OpaqueBackend(16, num_blocks)


class CountsOneLess(ListBackend):
    def get_num_free_blocks(self) -> int:
        return max(0, super().get_num_free_blocks() - 1)


class GivesAPlaceTwice(ListBackend):
    def allocate_blocks(self, hashes: Sequence[bytes]) -> list[BlockStatus]:
        super().allocate_blocks(hashes)
        return [BlockStatus(0) for _ in hashes]


class GivesReadyBlocks(ListBackend):
    def allocate_blocks(self, hashes: Sequence[bytes]) -> list[BlockStatus]:
        statuses = super().allocate_blocks(hashes)
        for status in statuses:
            status.ref_cnt = 0
        return statuses


class KeepsWhatIsFreed(ListBackend):
    def free(self, block: BlockStatus) -> None:
        pass


class GivesAFreedStatusAgain(ListBackend):
    def allocate_blocks(self, hashes: Sequence[bytes]) -> list[BlockStatus]:
        freed = {one.block_id: one for one in self.freed}
        statuses = [freed.get(one.block_id, one) for one in super().allocate_blocks(hashes)]
        for status in statuses:
            status.ref_cnt = -1
        return statuses


class NamesNoPlaces(ListBackend):
    def get_load_store_spec(self, hashes: Any, blocks: Any) -> list[int]:
        return [block.block_id for block in blocks]


class AllocatesForASpec(ListBackend):
    def get_load_store_spec(self, hashes: Any, blocks: Any) -> CPULoadStoreSpec:
        if self.get_num_free_blocks():
            self.allocate_blocks([b"one more"])
        return super().get_load_store_spec(hashes, blocks)


class NamesPlacesInReverse(ListBackend):
    def get_load_store_spec(self, hashes: Any, blocks: Any) -> CPULoadStoreSpec:
        return super().get_load_store_spec(hashes, [*blocks][::-1])


class SortedSpec(LoadStoreSpec):
    """Places without their order."""

    def __init__(self, places: Iterable[int]) -> None:
        self.places = sorted(places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SortedSpec) and self.places == other.places

    __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def medium() -> str:
        return "SORTED"


class SortsPlaces(ListBackend):
    def get_load_store_spec(self, hashes: Any, blocks: Any) -> SortedSpec:  # type: ignore[override]
        return SortedSpec(block.block_id for block in blocks)


FAULTY = [
    kind
    for kind in ListBackend.__subclasses__()
    if kind.__module__ == __name__ and kind is not OpaqueBackend
]


@pytest.mark.parametrize("kind", FAULTY)
def test_every_fault_is_found(kind: type[ListBackend]) -> None:
    members = {"make_backend": lambda self, num_blocks: kind(16, num_blocks)}
    assert failures(type("Suite", (BackendConformance,), members)())


# -- the pool: fresh ids counting up, then the last freed first ------------------------------------


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
