"""A batch may be an iterator that calls the manager: it sees the state before the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, names, store
from tests.contract.conftest import Build


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
