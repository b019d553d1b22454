"""`stats`, `len` and `in`: what is counted, when, and what never is."""

from __future__ import annotations

import pytest

from tests.blocks import A, store
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


def test_what_is_no_hash_is_not_resident(build: Build) -> None:
    class BytesOfMyOwn(bytes):
        pass

    manager = build(2)
    store(manager, [A])
    things: list[object] = [None, 5, [], A.hex(), b"", bytearray(A), BytesOfMyOwn(A)]
    for thing in things:
        assert thing not in manager
