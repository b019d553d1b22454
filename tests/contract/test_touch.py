"""`touch`: the batch becomes the most recently used, its last hash first."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from tests.blocks import A, B, C, D, E, F, G, H, names, once, store
from tests.contract.conftest import Build
from tests.observation import observe
from tests.parts import ListPolicy


def test_the_first_hash_of_a_batch_ends_as_the_most_recent(build_lru: Build) -> None:
    manager = build_lru(4)
    store(manager, [A, B, C, D])
    manager.touch([A, B, C])
    assert names(store(manager, [E, F, G, H]).block_hashes_evicted) == "DCBA"


def test_a_chain_is_evicted_tail_first_by_arc(build_arc: Build) -> None:
    manager = build_arc(3)
    store(manager, [A, B, C])
    manager.touch([A, B, C])
    assert names(store(manager, [E, F, G]).block_hashes_evicted) == "CBA"


def test_unknown_hashes_are_not_an_error(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    store(manager, [B])
    manager.touch([C, A, D])
    assert len(manager) == 2
    assert names(store(manager, [E]).block_hashes_evicted) == "B"


def test_a_repeated_hash_is_touched_at_each_occurrence(build_lru: Build) -> None:
    manager = build_lru(3)
    store(manager, [A, B, C])
    manager.touch([A, B, A])  # A, then B, then A again: the same as touching B, then A
    assert names(store(manager, [D, E, F]).block_hashes_evicted) == "CBA"


def test_the_last_occurrence_is_touched_first(build_lru: Build) -> None:
    manager = build_lru(3)
    store(manager, [A, B, C])
    manager.touch([B, A, B])
    assert names(store(manager, [D, E, F]).block_hashes_evicted) == "CAB"


def test_touch_counts_as_nothing_and_pins_nothing(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    before = manager.stats()
    assert manager.touch(once([A, B])) is None
    assert manager.stats() == before


def test_touch_moves_a_pinned_block(build_lru: Build) -> None:
    manager = build_lru(3)
    store(manager, [A, B, C])
    manager.prepare_load([A])
    manager.touch([A])
    manager.complete_load([A])
    assert names(store(manager, [D, E, F]).block_hashes_evicted) == "BCA"


def test_touch_moves_a_pending_block(build_lru: Build) -> None:
    manager = build_lru(3)
    manager.prepare_store([A])
    store(manager, [B, C])
    manager.touch([A])
    manager.complete_store([A])
    assert names(store(manager, [D, E, F]).block_hashes_evicted) == "BCA"


def test_touch_of_nothing_changes_nothing(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    before = observe(manager)
    manager.touch([])
    manager.touch([C])
    assert observe(manager) == before


def test_a_policy_hears_of_every_hash_in_batch_order(twin: ModuleType) -> None:
    heard: list[list[bytes]] = []

    class Listening(ListPolicy):
        def touch(self, hashes: Iterable[bytes]) -> None:
            heard.append(list(hashes))

    manager = twin.CPUOffloadingManager(16, 4, Listening)
    store(manager, [A])
    manager.touch(once([C, A, D, A]))
    assert heard == [[C, A, D, A]]
