"""A batch may be an iterator that calls the manager: it sees the state before the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockNotFoundError
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, names, slots, store
from tests.contract.conftest import Build


def with_call(call: Callable[[], Any], *batch: bytes) -> Iterator[bytes]:
    """Yield a batch, making a call after its first element."""
    for index, block in enumerate(batch):
        yield block
        if index == 0:
            call()


def test_a_lookup_counts_what_its_iterator_stored(build: Build) -> None:
    manager = build(4)
    assert manager.lookup(with_call(lambda: store(manager, [A, B]), A, B)) == 2


def test_a_load_fails_where_its_iterator_evicted(build: Build) -> None:
    manager = build(2)
    store(manager, [A, B])
    with pytest.raises(BlockNotFoundError):
        manager.prepare_load(with_call(lambda: store(manager, [C]), A, B))
    assert manager.stats()["pinned"] == 0
    check_invariants(manager)


def test_a_store_drops_what_its_iterator_stored(build: Build) -> None:
    manager = build(4)
    output = manager.prepare_store(with_call(lambda: store(manager, [B, C]), A, B, D))
    assert names(output.block_hashes_to_store) == "AD"
    assert slots(output.store_spec) == [2, 3]
    check_invariants(manager)


def test_a_store_within_a_store_of_the_same_blocks(build: Build) -> None:
    manager = build(2)
    inner: list[Any] = []
    outer = manager.prepare_store(
        with_call(lambda: inner.append(manager.prepare_store([A, B])), A, B)
    )
    assert names(inner[0].block_hashes_to_store) == "AB"
    assert outer.block_hashes_to_store == []
    check_invariants(manager)


def test_a_store_whose_iterator_resets_the_cache(build: Build) -> None:
    manager = build(3)
    store(manager, [A, B, C])
    output = manager.prepare_store(with_call(manager.reset_cache, D, A))
    assert names(output.block_hashes_to_store) == "DA"
    assert output.block_hashes_evicted == []
    assert len(manager) == 2
    check_invariants(manager)


def test_a_touch_whose_iterator_evicts(build: Build) -> None:
    manager = build(2)
    store(manager, [A, B])
    manager.touch(with_call(lambda: store(manager, [C]), A, C, B))
    assert len(manager) == 2
    check_invariants(manager)


def test_a_completion_whose_iterator_completes(build: Build) -> None:
    manager = build(2, enable_events=True)
    manager.prepare_store([A, B])
    manager.complete_store(with_call(lambda: manager.complete_store([A]), A, B))
    assert [names(event.block_hashes) for event in manager.take_events()] == ["A", "B"]
    manager.prepare_load([A, B])
    with pytest.raises(Exception, match="not pinned"):
        manager.complete_load(with_call(lambda: manager.complete_load([A]), A, B))
    assert manager.stats()["pinned"] == 1
    check_invariants(manager)


def test_iterators_within_iterators(build: Build) -> None:
    manager = build(8)

    def nested(depth: int) -> Iterator[bytes]:
        yield A
        if depth:
            manager.prepare_store(nested(depth - 1))
        yield bytes([depth + 1]) * 8

    assert manager.prepare_store(nested(5)) is not None
    assert len(manager) == 7
    check_invariants(manager)


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
