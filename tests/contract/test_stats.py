"""`stats`, `len` and `in`: what is counted, when, and what never is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from kvoffload import OffloadError
from tests.blocks import A, B, C, store
from tests.contract.conftest import Build

pytestmark = pytest.mark.fast

COUNTERS = (
    "lookups",
    "lookup_blocks",
    "hit_blocks",
    "stored_blocks",
    "failed_blocks",
    "evicted_blocks",
    "refused_stores",
    "not_admitted",
    "loaded_blocks",
)
PRESENT = ("resident", "pending", "pinned", "free", "ghosts")


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


def changes(manager: Any, method: str, *arguments: Any) -> dict[str, int]:
    """Return what one call adds to each counter, zeros left out."""
    before = manager.stats()
    with contextlib.suppress(OffloadError, TypeError, ValueError):
        getattr(manager, method)(*arguments)
    after = manager.stats()
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def test_a_lookup_adds_to_three_counters(build: Build) -> None:
    manager = build(4)
    store(manager, [A, B])
    assert changes(manager, "lookup", [A, B, C, A]) == {
        "lookups": 1,
        "lookup_blocks": 4,
        "hit_blocks": 2,
    }
    assert changes(manager, "lookup", []) == {"lookups": 1}
    assert changes(manager, "lookup", [C]) == {"lookups": 1, "lookup_blocks": 1}


def test_a_store_counts_blocks_that_are_given_a_slot(build: Build) -> None:
    manager = build(3)
    store(manager, [A])
    assert changes(manager, "prepare_store", [B, A, C, B]) == {
        "stored_blocks": 2,
        "resident": 2,
        "pending": 2,
        "free": -2,
    }
    assert changes(manager, "complete_store", [B]) == {"pending": -1}
    assert changes(manager, "complete_store", [C, A], False) == {
        "failed_blocks": 1,
        "resident": -1,
        "pending": -1,
        "free": 1,
    }


def test_a_refused_store_is_one(build: Build) -> None:
    manager = build(1)
    assert changes(manager, "prepare_store", [A, B, C]) == {"refused_stores": 1}
    assert changes(manager, "prepare_store", []) == {}


def test_a_load_counts_each_occurrence_once(build: Build) -> None:
    manager = build(3)
    store(manager, [A, B])
    before = manager.stats()
    assert changes(manager, "prepare_load", [A, B, A])["pinned"] == 2
    manager.complete_load([A, B, A])
    assert manager.stats() == {**before, "loaded_blocks": before["loaded_blocks"] + 3}


def test_what_is_no_hash_is_not_resident(build: Build) -> None:
    class BytesOfMyOwn(bytes):
        pass

    manager = build(2)
    store(manager, [A])
    things: list[object] = [None, 5, [], A.hex(), b"", bytearray(A), BytesOfMyOwn(A)]
    for thing in things:
        assert thing not in manager
