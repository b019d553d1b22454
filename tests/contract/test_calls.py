"""The calls of a manager: limits, types and what stays a caller's own; the rest is in the model."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload import (
    BackendError,
    BlockNotFoundError,
    BlockNotPinnedError,
    BlockNotReadyError,
    OffloadError,
    PolicyError,
    RefCountOverflowError,
)
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, H, block_hashes, names, once, slots, store
from tests.contract.conftest import Build
from tests.contract.model import COUNTERS, PRESENT
from tests.observation import observe
from tests.parts import ListPolicy

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


def test_ids_come_in_the_order_given_and_are_the_callers(build: Build) -> None:
    manager = build(4)
    stored = slots(store(manager, [A, B, C]).store_spec)
    place = dict(zip((A, B, C), stored, strict=True))
    for _ in range(2):
        spec = manager.prepare_load(once([C, A, B]))
        assert slots(spec) == [place[C], place[A], place[B]]
        spec.block_ids[0] = 77  # the caller's
    empty = manager.prepare_store([A, B]).store_spec
    assert spec.block_ids.dtype == empty.block_ids.dtype == np.int64
    assert (empty.block_ids.shape, empty.medium()) == ((0,), "CPU")


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


def test_an_iterator_is_consumed_and_checked_whole(build: Build) -> None:
    manager = build(2)
    batch: list[Any] = [A, B, 5]
    for form in (iter, once, deque, OwnList):
        with pytest.raises(TypeError, match=r"hashes\[2\]"):
            manager.lookup(form(batch))
    assert manager.stats()["lookups"] == 0


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("found", [0, 1, 3, 4, 5, 67, 68, 69, 150])
def test_a_lookup_checks_no_further_than_its_first_miss(
    build: Build, form: Callable[[Any], Any], found: int
) -> None:
    manager = build(200)
    known = block_hashes(*range(100, 250))
    store(manager, known)
    manager.prepare_store([E])
    for stop in (D, E):  # unknown, pending
        before = manager.stats()
        assert manager.lookup(form([*known[:found], stop, 5, b"", *known])) == found
        after = manager.stats()
        assert after["lookup_blocks"] - before["lookup_blocks"] == found + 3 + len(known)
        assert after["hit_blocks"] - before["hit_blocks"] == found
    seen = observe(manager)
    for bad, error in ((5, TypeError), (bytearray(A), TypeError), (b"", ValueError)):
        with pytest.raises(error, match=rf"^hashes\[{found}\] must"):
            manager.lookup(form([*known[:found], bad, D, *known]))
        assert observe(manager) == seen


def test_a_policy_hears_of_every_hash_in_batch_order(twin: ModuleType) -> None:
    heard: list[list[bytes]] = []

    class Listening(ListPolicy):
        def touch(self, hashes: Iterable[bytes]) -> None:
            heard.append(list(hashes))

    manager = twin.CPUOffloadingManager(16, 4, Listening)
    store(manager, [A])
    manager.touch(once([C, A, D, A]))
    assert heard == [[C, A, D, A]]


def test_the_statistics_are_these_in_this_order_and_a_copy(build: Build) -> None:
    manager = build(3)
    stats = manager.stats()
    assert type(stats) is dict
    assert tuple(stats) == COUNTERS + PRESENT
    assert all(type(value) is int for value in stats.values())
    stats["lookups"] = 99
    assert manager.stats() == {**dict.fromkeys(COUNTERS + PRESENT, 0), "free": 3}


@pytest.mark.parametrize("length", [36, 37, 300, 5000])
def test_keys_that_differ_only_in_length_or_in_one_byte_are_different(
    build: Build, length: int
) -> None:
    key = bytes(length)
    family = [key, key + b"\0", key[:-1], b"\1" + key[1:], key[:-1] + b"\1"]
    manager = build(8)
    store(manager, family[:1])
    assert [block in manager for block in family] == [True, False, False, False, False]
    store(manager, family[1:])
    assert [manager.lookup([block]) for block in family] == [1] * 5
    assert len(manager) == 5
    ids = [slots(manager.prepare_load([block]))[0] for block in family]
    assert len(set(ids)) == 5


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (OffloadError, Exception),
        (BlockNotFoundError, KeyError),
        (BlockNotReadyError, RuntimeError),
        (BlockNotPinnedError, RuntimeError),
        (RefCountOverflowError, OverflowError),
        (BackendError, RuntimeError),
        (PolicyError, RuntimeError),
    ],
)
def test_each_error_is_one_of_ours_and_one_of_pythons(
    kind: type[Exception], base: type[Exception]
) -> None:
    assert issubclass(kind, OffloadError)
    assert issubclass(kind, base)
    assert [str(kind(*said)) for said in (("what went wrong",), ())] == ["what went wrong", ""]
    assert OffloadError.__bases__ == (Exception,)


# -- events ------------------------------------------------------------------------------------


def taken(manager: Any) -> list[tuple[str, str]]:
    """Return the untaken events as (hashes, kind)."""
    return [read(event) for event in manager.take_events()]


def read(event: Any) -> tuple[str, str]:
    return names(event.block_hashes), "removed" if event.removed else "stored"


def test_the_events_that_are_taken_are_detached_at_the_call(build: Build) -> None:
    manager = build(4, enable_events=True)
    store(manager, [A])
    store(manager, [B])
    half_read = manager.take_events()
    assert read(next(half_read)) == ("A", "stored")
    store(manager, [C])
    assert taken(manager) == [("C", "stored")]
    assert [read(event) for event in half_read] == [("B", "stored")]
    store(manager, [D])
    manager.take_events()
    assert taken(manager) == []


def test_take_events_gives_an_iterator(build: Build) -> None:
    manager = build(1, enable_events=True)
    for events in (manager.take_events(), build(1).take_events()):
        assert iter(events) is events
        assert next(events, None) is None


def test_lists_in_events_and_outputs_are_separate(build: Build) -> None:
    manager = build(1, enable_events=True)
    first = manager.prepare_store([A])
    batch = first.block_hashes_to_store
    manager.complete_store(batch)
    second = manager.prepare_store([B])
    batch.append(D)
    second.block_hashes_evicted.append(E)
    second.block_hashes_to_store.append(E)
    assert taken(manager) == [("A", "stored"), ("A", "removed")]
    assert manager.lookup([B]) == 0
    assert (D in manager, E in manager) == (False, False)


# -- a batch that calls the manager, which sees the state before the call --------------------------


def with_call(call: Callable[[], Any], *batch: bytes) -> Iterator[bytes]:
    """Yield a batch, making a call after its first element."""
    for index, block in enumerate(batch):
        yield block
        if index == 0:
            call()


def test_the_protected_of_an_eviction_may_call_the_policy(twin: ModuleType) -> None:
    for policy_class in (twin.LRUCachePolicy, twin.ARCCachePolicy):
        manager = twin.CPUOffloadingManager(16, 4, policy_class)
        store(manager, [A, B, C, D])
        policy = policy_class(4)
        for block in (A, B, C, D):
            policy.insert(block, manager.policy.get(block))
        evicted = policy.evict(2, with_call(partial(policy.remove, A), E, D))
        assert names(block for block, _ in evicted) == "BC"
        assert len(policy) == 1
        check_invariants(policy)


def test_a_batch_that_changes_under_its_own_iterator(build: Build) -> None:
    manager = build(4)

    class Shrinking(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield from (A, B)
            self.clear()

    output = manager.prepare_store(Shrinking([C, D]))
    assert names(output.block_hashes_to_store) == "AB"


CALLS = ("lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store")


@pytest.mark.parametrize("call", CALLS)
def test_a_call_whose_iterator_cannot_initialise_the_manager_again(
    twin: ModuleType, call: str
) -> None:
    manager = twin.CPUOffloadingManager(16, 4)
    store(manager, [A, B])
    manager.prepare_load([A])
    before = manager.stats()
    with pytest.raises(RuntimeError, match="initialised already"):
        getattr(manager, call)(with_call(lambda: manager.__init__(32, 8), A, C))
    assert manager.stats() == before
    check_invariants(manager)
