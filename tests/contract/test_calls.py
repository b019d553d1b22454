"""The calls of a manager: limits, types and what stays a caller's own; the rest is in the model."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload import (
    BlockNotFoundError,
    BlockNotPinnedError,
    BlockNotReadyError,
    RefCountOverflowError,
)
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, H, block_hashes, names, once, slots, store
from tests.contract.conftest import Build
from tests.contract.model import COUNTERS, PRESENT
from tests.observation import observe
from tests.parts import ListBackend, ListPolicy

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("hashes", [[A, B], [A * 40, B], [A[:1], B * 3]])
def test_what_was_evicted_is_a_list_that_stays(build: Build, hashes: list[bytes]) -> None:
    manager = build(2)
    store(manager, hashes)
    output = manager.prepare_store([C, D])
    manager.complete_store([C, D])
    manager.prepare_store([E, F])
    evicted = output.block_hashes_evicted
    assert evicted == hashes
    assert type(evicted) is list
    evicted.append(G)
    assert output.block_hashes_evicted is evicted
    output.block_hashes_evicted = [H]
    assert output.block_hashes_evicted == [H]


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        lambda output: pickle.loads(pickle.dumps(output)),
        lambda output: type(output)(*dataclasses.astuple(output)),
    ],
)
def test_a_copy_of_the_output_has_what_was_evicted(
    build: Build, copied: Callable[[Any], Any]
) -> None:
    manager = build(2)
    store(manager, [A, B])
    output = copied(manager.prepare_store([C, D]))
    assert output.block_hashes_evicted == [A, B]
    assert output.block_hashes_to_store == [C, D]
    assert f"block_hashes_evicted={[A, B]}" in repr(output)


@pytest.mark.parametrize("batch", [[], [A], [A, A, B]])
def test_nothing_to_store_is_an_empty_output(build: Build, batch: list[bytes]) -> None:
    manager = build(2)
    store(manager, [A, B])
    before = observe(manager)
    output = manager.prepare_store(batch)
    assert output.block_hashes_to_store == []
    assert output.block_hashes_evicted == []
    assert output.store_spec.block_ids.shape == (0,)
    assert output.store_spec.block_ids.dtype.name == "int64"
    assert output.store_spec.medium() == "CPU"
    assert observe(manager) == before


def test_capacity_zero_refuses_every_store_that_needs_a_slot(build: Build) -> None:
    manager = build(0, enable_events=True)
    assert manager.prepare_store([A]) is None
    assert manager.prepare_store([A, B]) is None
    assert manager.prepare_store([]).block_hashes_to_store == []
    assert manager.lookup([A]) == 0
    manager.touch([A, A])
    manager.complete_store([A])
    manager.complete_store([A], success=False)
    assert list(manager.take_events()) == []
    assert manager.stats()["refused_stores"] == 2
    manager.reset_cache()
    assert (len(manager), manager.stats()["free"]) == (0, 0)
    check_invariants(manager)


def test_capacity_one(build: Build) -> None:
    manager = build(1)
    assert manager.prepare_store([A, B]) is None
    assert slots(store(manager, [A]).store_spec) == [0]
    output = store(manager, [B, B])
    assert (names(output.block_hashes_evicted), slots(output.store_spec)) == ("A", [0])
    assert manager.prepare_store([B, A]) is None
    manager.prepare_load([B])
    assert manager.prepare_store([A]) is None
    manager.complete_load([B])
    assert names(store(manager, [A]).block_hashes_evicted) == "B"
    check_invariants(manager)


def test_a_large_store_evicts_a_large_part(build: Build) -> None:
    manager = build(300)
    old, new = block_hashes(*range(300)), block_hashes(*range(1000, 1250))
    for block in old:
        store(manager, [block])
    assert store(manager, new).block_hashes_evicted == old[:250]
    assert manager.lookup(old[250:] + new) == 300
    check_invariants(manager)


def test_ids_come_in_the_order_given(build: Build) -> None:
    manager = build(4)
    stored = slots(store(manager, [A, B, C]).store_spec)
    place = dict(zip((A, B, C), stored, strict=True))
    spec = manager.prepare_load(once([C, A, B]))
    assert slots(spec) == [place[C], place[A], place[B]]
    assert spec.block_ids.dtype == np.int64
    assert spec.medium() == "CPU"


def test_the_ids_are_the_callers(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    first, second = manager.prepare_load([A]), manager.prepare_load([A])
    first.block_ids[0] = 77
    assert slots(second) == [0]


@pytest.mark.parametrize(
    ("method", "pinned", "batch", "error", "named"),
    [
        ("prepare_load", [A, B], [A, C, B], BlockNotFoundError, C),
        ("prepare_load", [], [A, D], BlockNotReadyError, D),
        ("complete_load", [A, B], [A, C, B], BlockNotFoundError, C),
        ("complete_load", [A], [A, D], BlockNotPinnedError, D),
        ("complete_load", [A], [A, B], BlockNotPinnedError, B),
        ("complete_load", [A, B], [A, B, A], BlockNotPinnedError, A),
        ("complete_load", [A], [A, C, A, D], BlockNotFoundError, C),
        ("complete_load", [A], [A, A, C, D], BlockNotPinnedError, A),
        ("complete_load", [A], [A, D, C, A], BlockNotPinnedError, D),
    ],
)
def test_a_load_is_refused_for_the_first_offending_hash(
    build: Build, method: str, pinned: list[bytes], batch: list[bytes], error: type, named: bytes
) -> None:
    """A and B are resident, D is pending, C is unknown."""
    manager = build(4)
    store(manager, [A, B])
    manager.prepare_load(pinned)
    manager.prepare_store([D])
    before = observe(manager)
    with pytest.raises(error, match=named.hex()):
        getattr(manager, method)(batch)
    assert observe(manager) == before
    manager.complete_load(pinned)
    assert manager.stats()["pinned"] == 0


def test_a_count_of_pins_does_not_wrap(build: Build) -> None:
    manager = build(2)
    store(manager, [A, B])
    status = manager.policy.get(A)
    status.ref_cnt = 2**31 - 2
    before = observe(manager)
    with pytest.raises(RefCountOverflowError, match=A.hex()) as caught:
        manager.prepare_load([B, A, A])
    assert isinstance(caught.value, OverflowError)
    assert observe(manager) == before
    manager.prepare_load([A])
    assert status.ref_cnt == 2**31 - 1
    with pytest.raises(RefCountOverflowError):
        manager.prepare_load([A])
    status.ref_cnt = 0


class OwnList(list[Any]):
    """A list that could iterate in its own way."""


@pytest.mark.parametrize("form", [list, tuple])
def test_what_comes_after_the_first_miss_is_not_looked_at(
    build: Build, form: Callable[[Any], Any]
) -> None:
    manager = build(200)
    known = block_hashes(*range(100, 250))
    store(manager, known)
    manager.prepare_store([E])
    for found in (0, 1, 4, 5, 68, 69, 150):
        for stop in (D, E):  # unknown, pending
            batch: list[Any] = [*known[:found], stop, 5, b"", *known]
            before = manager.stats()
            assert manager.lookup(form(batch)) == found
            after = manager.stats()
            assert after["lookup_blocks"] - before["lookup_blocks"] == len(batch)
            assert after["hit_blocks"] - before["hit_blocks"] == found


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("found", [0, 1, 3, 4, 5, 67, 68, 69, 150])
def test_every_hash_that_is_looked_at_is_checked(
    build: Build, form: Callable[[Any], Any], found: int
) -> None:
    manager = build(200)
    known = block_hashes(*range(100, 250))
    store(manager, known)
    before = observe(manager)
    for bad, error in ((5, TypeError), (bytearray(A), TypeError), (b"", ValueError)):
        with pytest.raises(error, match=rf"^hashes\[{found}\] must"):
            manager.lookup(form([*known[:found], bad, D, *known]))
        assert observe(manager) == before


def test_an_iterator_is_consumed_and_checked_whole(build: Build) -> None:
    manager = build(2)
    batch: list[Any] = [A, B, 5]
    for form in (iter, once, deque, OwnList):
        with pytest.raises(TypeError, match=r"hashes\[2\]"):
            manager.lookup(form(batch))
    assert manager.stats()["lookups"] == 0


@pytest.mark.parametrize("form", [list, tuple])
def test_a_lookup_that_misses_at_once_costs_the_same_however_long(
    twin: ModuleType, form: Callable[[Any], Any]
) -> None:
    """Elements that would be an error are never reached, wherever they stand."""
    manager = twin.CPUOffloadingManager(16, 8)
    for length in (1, 10, 1_000, 100_000):
        assert manager.lookup(form([A, *[None] * length])) == 0
    assert manager.stats()["lookup_blocks"] == 101_011 + 4


def test_a_policy_hears_of_every_hash_in_batch_order(twin: ModuleType) -> None:
    heard: list[list[bytes]] = []

    class Listening(ListPolicy):
        def touch(self, hashes: Iterable[bytes]) -> None:
            heard.append(list(hashes))

    manager = twin.CPUOffloadingManager(16, 4, Listening)
    store(manager, [A])
    manager.touch(once([C, A, D, A]))
    assert heard == [[C, A, D, A]]


def test_after_a_reset_a_manager_is_as_new(build: Build) -> None:
    manager, fresh = build(4), build(4)
    for block in block_hashes(*range(10)):
        store(manager, [block])
        manager.touch([block])
    manager.touch(block_hashes(1, 2, 3))
    manager.reset_cache()
    for steady in (manager, fresh):
        store(steady, [A, B, C])
        steady.touch([B])
        store(steady, [D, E])
    used, new = observe(manager), observe(fresh)
    for seen in (used, new):
        del seen["stats"]
        seen.pop("backend", None)
    assert used == new


@pytest.mark.parametrize(
    ("name", "touched", "order"),
    [
        ("LRUOffloadingManager", [B], "ACDBE"),
        ("ARCOffloadingManager", [C, A], "BDEAC"),  # T1 before T2
    ],
)
def test_a_users_backend_gets_its_blocks_back_least_recent_first(
    twin: ModuleType, name: str, touched: list[bytes], order: str
) -> None:
    backend = ListBackend(16, 5)
    manager = getattr(twin, name)(backend)
    store(manager, [A, B, C, D])
    manager.touch(touched)
    manager.prepare_load([A])
    manager.prepare_store([E])
    manager.reset_cache()
    assert names(bytes.fromhex(block.label) for block in backend.freed) == order
    assert len({id(block) for block in backend.freed}) == backend.get_num_free_blocks() == 5


def test_the_names_are_these_in_this_order(build: Build) -> None:
    stats = build(3).stats()
    assert type(stats) is dict
    assert tuple(stats) == COUNTERS + PRESENT
    assert all(type(value) is int for value in stats.values())
    assert stats == {**dict.fromkeys(COUNTERS + PRESENT, 0), "free": 3}


def test_stats_are_a_copy(build: Build) -> None:
    manager = build(3)
    manager.stats()["lookups"] = 99
    assert manager.stats()["lookups"] == 0


def test_what_is_no_hash_is_not_resident(build: Build) -> None:
    class BytesOfMyOwn(bytes):
        pass

    manager = build(2)
    store(manager, [A])
    things: list[object] = [None, 5, [], A.hex(), b"", bytearray(A), BytesOfMyOwn(A)]
    for thing in things:
        assert thing not in manager
