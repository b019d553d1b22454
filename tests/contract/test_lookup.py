"""`lookup`: how many leading hashes are ready."""

from __future__ import annotations

from tests.blocks import A, B, C, D, names, once, store
from tests.contract.conftest import Build
from tests.observation import observe


def test_nothing_is_found_in_an_empty_manager(build: Build) -> None:
    assert build(4).lookup([A, B]) == 0


def test_the_leading_ready_hashes_are_counted(build: Build) -> None:
    manager = build(4)
    store(manager, [A, B, C])
    assert manager.lookup([A, B, C]) == 3
    assert manager.lookup([A, B]) == 2
    assert manager.lookup([A, B, C, D]) == 3


def test_counting_stops_at_the_first_that_is_not_ready(build: Build) -> None:
    manager = build(4)
    store(manager, [A, C])
    assert manager.lookup([A, B, C]) == 1
    assert manager.lookup([B, A, C]) == 0


def test_a_pending_block_is_not_ready(build: Build) -> None:
    manager = build(4)
    store(manager, [A])
    manager.prepare_store([B])
    assert manager.lookup([A, B]) == 1
    assert manager.lookup([B]) == 0
    manager.complete_store([B])
    assert manager.lookup([A, B]) == 2


def test_a_pinned_block_is_ready(build: Build) -> None:
    manager = build(4)
    store(manager, [A])
    manager.prepare_load([A])
    assert manager.lookup([A]) == 1


def test_an_occurrence_is_counted_each_time(build: Build) -> None:
    manager = build(4)
    store(manager, [A])
    assert manager.lookup(once([A, A, A])) == 3


def test_lookup_changes_no_recency(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    store(manager, [B])
    before = observe(manager)
    assert manager.lookup([A]) == 1
    after = observe(manager)
    assert {**after, "stats": None} == {**before, "stats": None}
    assert names(store(manager, [C]).block_hashes_evicted) == "A"


def test_an_evicted_block_is_not_found(build: Build) -> None:
    manager = build(1)
    store(manager, [A])
    store(manager, [B])
    assert (manager.lookup([A]), manager.lookup([B])) == (0, 1)


def test_lookup_returns_a_plain_integer(build: Build) -> None:
    manager = build(1)
    store(manager, [A])
    assert type(manager.lookup([A])) is int
