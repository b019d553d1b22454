"""`prepare_store`: what is stored, what is evicted for it, and when it is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, H, block_hashes, names, slots, store
from tests.contract.conftest import Build
from tests.observation import observe

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
