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


def test_a_policy_hears_of_every_hash_in_batch_order(twin: ModuleType) -> None:
    heard: list[list[bytes]] = []

    class Listening(ListPolicy):
        def touch(self, hashes: Iterable[bytes]) -> None:
            heard.append(list(hashes))

    manager = twin.CPUOffloadingManager(16, 4, Listening)
    store(manager, [A])
    manager.touch(once([C, A, D, A]))
    assert heard == [[C, A, D, A]]
