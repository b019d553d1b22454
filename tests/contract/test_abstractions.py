"""The three contracts as a user's subclass meets them: what is abstract, what has a default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
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
    assert abstraction.__slots__ == (), "they take no room in a subclass"


def test_a_subclass_may_leave_the_rest_alone() -> None:
    manager: Any = SmallestManager()
    for call in (manager.touch, manager.complete_load, manager.complete_store):
        assert call([A]) is None
    assert manager.complete_store([A], success=False) is None
    assert list(manager.take_events()) == []
    policy, backend = SmallestPolicy(cache_capacity=4), SmallestBackend(16, "SHELF")
    spec = partial(backend.get_load_store_spec, [A], [BlockStatus(0)])
    for call in (policy.clear, policy.__len__, spec):
        with pytest.raises(NotImplementedError):
            call()


@pytest.mark.parametrize(
    ("num_free", "room"),
    [(5, (3, 0)), (3, (3, 0)), (1, (3, 2)), (0, None)],
    ids=["enough", "just enough", "two short", "more short than may leave"],
)
def test_the_default_admission_asks_evict_for_room_for_all(
    num_free: int, room: tuple[int, int] | None
) -> None:
    admitted = SmallestPolicy(4).make_room([B, C, D], num_free, set())
    assert (admitted and (admitted[0], len(admitted[1]))) == room


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (lambda value: SmallestBackend(value, "SHELF"), "block_size", (0, -1, True, 1.5, None)),
        (lambda value: SmallestBackend(16, value), "medium", (None, 5, b"SHELF")),
        (SmallestPolicy, "cache_capacity", (-1, 2**31, True, "4")),
    ],
    ids=["a backend's blocks", "a backend's medium", "a policy"],
)
def test_what_the_constructors_take_is_checked(
    make: Callable[[Any], Any], name: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            make(value)


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
