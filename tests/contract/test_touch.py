"""`touch`: the batch becomes the most recently used, its last hash first."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

import pytest

from tests.blocks import A, B, C, D, E, F, G, H, names, once, store
from tests.contract.conftest import Build
from tests.parts import ListPolicy

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("stored", "touched", "evicted"),
    [
        ([A, B, C, D], [A, B, C], "DCBA"),
        ([A, B, C], [A, B, A], "CBA"),
        ([A, B, C], [B, A, B], "CAB"),
    ],
    ids=["a chain", "as B, then A", "the last occurrence first"],
)
def test_the_first_hash_of_a_batch_ends_as_the_most_recent(
    build_lru: Build, stored: list[bytes], touched: list[bytes], evicted: str
) -> None:
    """A hash that comes again is touched at each occurrence."""
    manager = build_lru(len(stored))
    store(manager, stored)
    manager.touch(touched)
    assert names(store(manager, [E, F, G, H][: len(stored)]).block_hashes_evicted) == evicted


def test_unknown_hashes_are_not_an_error(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    store(manager, [B])
    manager.touch([C, A, D])
    assert len(manager) == 2
    assert names(store(manager, [E]).block_hashes_evicted) == "B"


@pytest.mark.parametrize("is_pending", [True, False], ids=["pending", "pinned"])
def test_touch_moves_a_block_that_is_in_use(build_lru: Build, is_pending: bool) -> None:
    manager = build_lru(3)
    manager.prepare_store([A])
    if not is_pending:
        manager.complete_store([A])
        manager.prepare_load([A])
    store(manager, [B, C])
    manager.touch([A])
    if is_pending:
        manager.complete_store([A])
    else:
        manager.complete_load([A])
    assert names(store(manager, [D, E, F]).block_hashes_evicted) == "BCA"


def test_a_policy_hears_of_every_hash_in_batch_order(twin: ModuleType) -> None:
    heard: list[list[bytes]] = []

    class Listening(ListPolicy):
        def touch(self, hashes: Iterable[bytes]) -> None:
            heard.append(list(hashes))

    manager = twin.CPUOffloadingManager(16, 4, Listening)
    store(manager, [A])
    manager.touch(once([C, A, D, A]))
    assert heard == [[C, A, D, A]]
