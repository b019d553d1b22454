"""A user's own backend: its objects are kept and handed back; when it misbehaves it is undone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BackendError, BlockHash, BlockStatus, GPULoadStoreSpec
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, names, slots, store
from tests.parts import ListBackend


@pytest.fixture(params=["LRUOffloadingManager", "ARCOffloadingManager"])
def manager_class(twin: ModuleType, request: pytest.FixtureRequest) -> Any:
    return getattr(twin, request.param)


def test_specs_are_the_backends(manager_class: Any) -> None:
    class Elsewhere(ListBackend):
        seen: list[tuple[list[bytes], list[BlockStatus]]] = []

        def get_load_store_spec(self, hashes: Any, blocks: Any) -> Any:
            self.seen.append((list(hashes), list(blocks)))
            return GPULoadStoreSpec([block.block_id for block in self.seen[-1][1]])

    backend = Elsewhere(16, 4)
    manager = manager_class(backend)
    output = store(manager, [B, A])
    assert isinstance(output.store_spec, GPULoadStoreSpec)
    spec = manager.prepare_load([A, B, A])
    assert isinstance(spec, GPULoadStoreSpec)
    assert slots(spec) == [1, 0, 1]
    stored, loaded = backend.seen
    assert (names(stored[0]), stored[1]) == ("BA", backend.allocated)
    assert names(loaded[0]) == "ABA"
    assert [id(block) for block in loaded[1]] == [
        id(backend.allocated[index]) for index in (1, 0, 1)
    ]


def test_free_slots_are_the_backends(manager_class: Any) -> None:
    backend = ListBackend(16, 3)
    manager = manager_class(backend)
    backend.unused.pop()
    assert manager.stats()["free"] == 2
    assert manager.prepare_store([A, B, C]) is None
    assert len(store(manager, [A, B]).block_hashes_to_store) == 2


class UserFailedError(Exception):
    """An exception of a user's own code."""


def one_ready(backend: ListBackend, made: list[Any]) -> Any:
    made[-1].ref_cnt = 0
    return made


def fail(backend: ListBackend, made: list[Any]) -> Any:
    backend.unused = sorted(backend.unused + [status.block_id for status in made])
    raise UserFailedError


class Broken(ListBackend):
    """A backend whose allocation is spoilt on demand."""

    spoil: Callable[[Any, list[Any]], Any] | None = None

    def allocate_blocks(self, hashes: list[BlockHash]) -> Any:
        made = super().allocate_blocks(hashes)
        return made if self.spoil is None else self.spoil(self, made)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda _, made: made[:-1], id="short allocation"),
        pytest.param(one_ready, id="a status that is not pending"),
        pytest.param(lambda _, made: [*made[:-1], made[0]], id="the same status object twice"),
        pytest.param(lambda _, made: [*made, made[0]], id="long allocation"),
        pytest.param(lambda backend, made: [backend.allocated[3], made[1]], id="one of before"),
        pytest.param(lambda *_: None, id="None"),
        pytest.param(lambda *_: 5, id="no list"),
        pytest.param(lambda *_: ["a", "b"], id="no statuses"),
        fail,
    ],
)
def test_an_allocation_that_is_wrong_costs_victims_alone(manager_class: Any, spoil: Any) -> None:
    backend = Broken(16, 4)
    manager = manager_class(backend, enable_events=True)
    for block in (A, B, C):
        store(manager, [block])
    manager.prepare_store([D])
    list(manager.take_events())
    before = manager.stats()
    handed_out: list[Any] = []

    def spoilt(backend: Any, made: list[Any]) -> Any:
        answer = spoil(backend, made)
        handed_out.extend(answer if isinstance(answer, list) else ())
        return answer

    backend.spoil = spoilt
    with pytest.raises(UserFailedError if spoil is fail else BackendError):
        manager.prepare_store([E, A, F])
    backend.spoil = None
    assert names(block for block in (A, B, C, D, E, F) if block in manager) == "AD"
    events = [(names(event.block_hashes), event.removed) for event in manager.take_events()]
    assert events == [("BC", True)]
    evicted, returned = backend.freed[:2], backend.freed[2:]
    assert [status.label for status in evicted] == [B.hex(), C.hex()]
    given = {*map(id, handed_out)}
    assert [id(each) for each in returned] == [
        id(each) for each in backend.allocated[4:] if id(each) in given
    ]
    after = manager.stats()
    assert after == before | {
        "evicted_blocks": 2,
        "resident": 2,
        "free": backend.get_num_free_blocks(),
        "ghosts": after["ghosts"],
    }
    check_invariants(manager)
    assert names(store(manager, [F]).block_hashes_to_store) == "F"


def test_what_a_wrong_allocation_gave_is_freed_whatever_that_raises(manager_class: Any) -> None:
    class Stuck(Broken):
        def free(self, block: BlockStatus) -> None:
            super().free(block)
            raise UserFailedError

    backend = Stuck(16, 2)
    backend.spoil = lambda _, made: [*made, "c"]
    with pytest.raises(BackendError):
        manager_class(backend).prepare_store([A, B])
    assert len(backend.freed) == 2


@pytest.mark.parametrize("free", [-1, None, 1.5, "4"])
def test_a_number_of_free_blocks_that_is_none(manager_class: Any, free: Any) -> None:
    class Uncountable(ListBackend):
        answer: Any = 2

        def get_num_free_blocks(self) -> int:
            return self.answer  # type: ignore[no-any-return]

    backend = Uncountable(16, 2)
    manager = manager_class(backend)
    store(manager, [A])
    backend.answer = free
    for ask in (lambda: manager.prepare_store([B]), lambda: manager_class(backend)):
        with pytest.raises(BackendError, match="get_num_free_blocks must return an integer >= 0"):
            ask()
    backend.answer = 1
    assert names(store(manager, [B]).block_hashes_to_store) == "B"


def test_a_backend_may_hand_out_an_object_again(manager_class: Any) -> None:
    class Recycling(ListBackend):
        def allocate_blocks(self, hashes: list[BlockHash]) -> Any:
            again = [status for status in self.freed if status.block_id in self.unused]
            if len(again) < len(hashes):
                return super().allocate_blocks(hashes)
            for status in again[: len(hashes)]:
                self.unused.remove(status.block_id)
                status.ref_cnt = -1
            return again[: len(hashes)]

    backend = Recycling(16, 1)
    manager = manager_class(backend)
    store(manager, [A])
    store(manager, [B])
    assert names(store(manager, [C]).block_hashes_evicted) == "B"
    assert len(backend.allocated) == 1
    assert manager.policy.get(C) is backend.allocated[0]


def test_a_spec_that_raises_takes_no_slot_and_pins_nothing(manager_class: Any) -> None:
    class NoSpec(ListBackend):
        fails = True

        def get_load_store_spec(self, hashes: Any, blocks: Any) -> Any:
            if self.fails:
                raise UserFailedError
            return super().get_load_store_spec(hashes, blocks)

    backend = NoSpec(16, 2)
    manager = manager_class(backend, enable_events=True)
    with pytest.raises(UserFailedError):
        manager.prepare_store([A, B])
    assert (len(manager), backend.get_num_free_blocks()) == (0, 2)
    assert manager.stats()["stored_blocks"] == 0
    assert list(manager.take_events()) == []
    check_invariants(manager)
    backend.fails = False
    store(manager, [A, B])
    backend.fails = True
    before = manager.stats()
    with pytest.raises(UserFailedError):
        manager.prepare_load([A, B])
    assert manager.stats() == before
    assert before["pinned"] == 0


def test_a_backend_must_be_a_backend(manager_class: Any) -> None:
    for wrong in (None, 5, ListBackend):
        with pytest.raises(TypeError, match="backend must be a Backend"):
            manager_class(wrong)
