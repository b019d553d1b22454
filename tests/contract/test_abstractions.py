"""The three contracts as a user's subclass meets them: what is abstract, what has a default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvoffload import (
    Backend,
    BlockHash,
    BlockStatus,
    CachePolicy,
    CPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    PrepareStoreOutput,
)
from tests.blocks import A, B, C, D


class SmallestManager(OffloadingManager):
    def lookup(self, block_hashes: Iterable[bytes]) -> int:
        return 0

    def prepare_load(self, block_hashes: Iterable[bytes]) -> LoadStoreSpec:
        return CPULoadStoreSpec([])

    def prepare_store(self, block_hashes: Iterable[bytes]) -> PrepareStoreOutput | None:
        return None


class SmallestPolicy(CachePolicy):
    def get(self, block_hash: BlockHash) -> BlockStatus | None:
        return None

    def insert(self, block_hash: BlockHash, block: BlockStatus) -> None:
        raise NotImplementedError

    def remove(self, block_hash: BlockHash) -> None:
        raise NotImplementedError

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        raise NotImplementedError

    def evict(self, n: int, protected: Any) -> list[tuple[BlockHash, BlockStatus]] | None:
        return [(A, BlockStatus(0))] * n if n < 3 else None


class SmallestBackend(Backend):
    def get_num_free_blocks(self) -> int:
        return 0

    def allocate_blocks(self, block_hashes: list[BlockHash]) -> list[BlockStatus]:
        return []

    def free(self, block: BlockStatus) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("abstraction", "methods"),
    [
        (OffloadingManager, {"lookup", "prepare_load", "prepare_store"}),
        (CachePolicy, {"get", "insert", "remove", "touch", "evict"}),
        (Backend, {"get_num_free_blocks", "allocate_blocks", "free"}),
    ],
)
def test_what_must_be_overridden(abstraction: Any, methods: set[str]) -> None:
    assert abstraction.__abstractmethods__ == methods


@pytest.mark.parametrize("abstraction", [OffloadingManager, CachePolicy, Backend])
def test_the_abstractions_take_no_room_in_a_subclass(abstraction: Any) -> None:
    assert abstraction.__slots__ == ()


def test_a_manager_may_leave_the_rest_alone() -> None:
    manager = SmallestManager()
    assert manager.touch([A]) is None  # type: ignore[func-returns-value]
    assert manager.complete_load([A]) is None  # type: ignore[func-returns-value]
    assert manager.complete_store([A]) is None  # type: ignore[func-returns-value]
    assert manager.complete_store([A], success=False) is None  # type: ignore[func-returns-value]
    assert list(manager.take_events()) == []


def test_a_policy_may_leave_clear_and_len_alone() -> None:
    policy = SmallestPolicy(cache_capacity=4)
    with pytest.raises(NotImplementedError):
        policy.clear()
    with pytest.raises(NotImplementedError):
        len(policy)


def test_the_default_admission_asks_evict_for_room_for_all() -> None:
    policy = SmallestPolicy(4)
    admitted = policy.make_room([B, C, D], 1, set())
    assert admitted is not None
    number, victims = admitted
    assert number == 3
    assert [block_hash for block_hash, _ in victims] == [A, A]


def test_the_default_admission_asks_for_nothing_where_there_is_room() -> None:
    admitted = SmallestPolicy(4).make_room([B, C], 5, set())
    assert admitted is not None
    assert (admitted[0], list(admitted[1])) == (2, [])


def test_the_default_admission_gives_up_where_evict_does() -> None:
    assert SmallestPolicy(4).make_room([B, C, D], 0, set()) is None


def test_a_backend_says_where_and_how_large() -> None:
    backend = SmallestBackend(16, "SHELF")
    assert (backend.block_size, backend.medium) == (16, "SHELF")


@pytest.mark.parametrize("block_size", [0, -1, True, 1.5, None])
def test_a_backend_checks_its_block_size(block_size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_size must be"):
        SmallestBackend(block_size, "SHELF")


@pytest.mark.parametrize("medium", [None, 5, b"SHELF"])
def test_a_backend_checks_its_medium(medium: Any) -> None:
    with pytest.raises(TypeError, match="medium must be a string"):
        SmallestBackend(16, medium)


@pytest.mark.parametrize("capacity", [-1, 2**31, True, "4"])
def test_a_policy_checks_its_capacity(capacity: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="cache_capacity must be"):
        SmallestPolicy(capacity)


def test_a_backend_may_leave_its_spec_alone() -> None:
    with pytest.raises(NotImplementedError):
        SmallestBackend(16, "SHELF").get_load_store_spec([A], [BlockStatus(0)])


def test_a_request_of_a_manager_of_ones_own_touches_when_it_begins_grows_and_ends() -> None:
    touched: list[list[bytes]] = []

    class Touched(SmallestManager):
        def touch(self, block_hashes: Iterable[bytes]) -> None:
            touched.append([*block_hashes])

    request = Touched().begin([A, B])
    assert touched == [[A, B]]
    request.extend([C])
    assert touched[1:] == [[C]]
    request.finish()
    assert touched[2:] == [[A, B, C]]
