"""The suite for backends: every backend passes it, and a wrong one does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest

from kvoffload import Backend, BlockStatus, CPULoadStoreSpec, LoadStoreSpec
from kvoffload.testing.backends import BackendConformance
from tests.parts import ListBackend

from .test_conformance import failures


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
    CountsOneLess,
    GivesAPlaceTwice,
    GivesReadyBlocks,
    KeepsWhatIsFreed,
    NamesNoPlaces,
    AllocatesForASpec,
    NamesPlacesInReverse,
    SortsPlaces,
]


@pytest.mark.parametrize("kind", FAULTY)
def test_every_fault_is_found(kind: type[ListBackend]) -> None:
    members = {"make_backend": lambda self, num_blocks: kind(16, num_blocks)}
    assert failures(type("Suite", (BackendConformance,), members)())
