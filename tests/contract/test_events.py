"""Events: one a call and kind, in order, taken once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.blocks import A, B, C, D, E, names, store
from tests.contract.conftest import Build

pytestmark = pytest.mark.fast


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


def test_the_events_not_yet_taken_can_be_seen(build: Build) -> None:
    manager = build(1, enable_events=True)
    assert manager.events == []
    store(manager, [A])
    seen = manager.events
    assert [read(event) for event in seen] == [("A", "stored")]
    seen.clear()
    assert taken(manager) == [("A", "stored")]
    assert manager.events == []


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
