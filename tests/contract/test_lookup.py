"""`lookup`: how many leading hashes are ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.blocks import A, B, D, E, block_hashes, once, store
from tests.contract.conftest import Build
from tests.observation import observe

pytestmark = pytest.mark.fast


class OwnList(list[Any]):
    """A list that could iterate in its own way."""


@pytest.mark.parametrize("form", [list, tuple])
def test_what_comes_after_the_first_miss_is_not_looked_at(
    build: Build, form: Callable[[Any], Any]
) -> None:
    manager = build(200)
    known = block_hashes(*range(100, 250))
    store(manager, known)
    manager.prepare_store([E])
    for found in (0, 1, 4, 5, 68, 69, 150):
        for stop in (D, E):  # unknown, pending
            batch: list[Any] = [*known[:found], stop, 5, b"", *known]
            before = manager.stats()
            assert manager.lookup(form(batch)) == found
            after = manager.stats()
            assert after["lookup_blocks"] - before["lookup_blocks"] == len(batch)
            assert after["hit_blocks"] - before["hit_blocks"] == found


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("found", [0, 1, 3, 4, 5, 67, 68, 69, 150])
def test_every_hash_that_is_looked_at_is_checked(
    build: Build, form: Callable[[Any], Any], found: int
) -> None:
    manager = build(200)
    known = block_hashes(*range(100, 250))
    store(manager, known)
    before = observe(manager)
    for bad, error in ((5, TypeError), (bytearray(A), TypeError), (b"", ValueError)):
        with pytest.raises(error, match=rf"^hashes\[{found}\] must"):
            manager.lookup(form([*known[:found], bad, D, *known]))
        assert observe(manager) == before


def test_an_iterator_is_consumed_and_checked_whole(build: Build) -> None:
    manager = build(2)
    batch: list[Any] = [A, B, 5]
    for form in (iter, once, deque, OwnList):
        with pytest.raises(TypeError, match=r"hashes\[2\]"):
            manager.lookup(form(batch))
    assert manager.stats()["lookups"] == 0


@pytest.mark.parametrize("form", [list, tuple])
def test_a_lookup_that_misses_at_once_costs_the_same_however_long(
    twin: ModuleType, form: Callable[[Any], Any]
) -> None:
    """Elements that would be an error are never reached, wherever they stand."""
    manager = twin.CPUOffloadingManager(16, 8)
    for length in (1, 10, 1_000, 100_000):
        assert manager.lookup(form([A, *[None] * length])) == 0
    assert manager.stats()["lookup_blocks"] == 101_011 + 4
