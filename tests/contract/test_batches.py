"""A batch: any iterable, read whole and checked before anything else happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from tests.blocks import METHODS, A, B, C, once, slots, store
from tests.contract.conftest import Build
from tests.observation import observe


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prepared(build: Build, method: str) -> Any:
    """Return a manager on which `method` of [A, B] succeeds and changes something."""
    manager = build(8, enable_events=True)
    if method == "prepare_store":
        return manager
    if method == "complete_store":
        manager.prepare_store([A, B])
        return manager
    # A lookup checks no further than it looks: C lets it look at what comes behind.
    store(manager, [A, B, C] if method == "lookup" else [A, B])
    if method == "complete_load":
        manager.prepare_load([A, B])
    return manager


def test_any_iterable_will_do(build: Build, method: str) -> None:
    by_list = prepared(build, method)
    getattr(by_list, method)([A, B])
    for form in (tuple, iter, once, deque, dict.fromkeys):
        by_form = prepared(build, method)
        getattr(by_form, method)(form([A, B]))
        assert observe(by_form) == observe(by_list)


def test_what_is_no_batch_of_hashes_is_refused_by_name(build: Build, method: str) -> None:
    manager = prepared(build, method)
    before = observe(manager)
    for batch, advice in (
        (b"abc", ": wrap it in a list"),
        (b"", ": wrap it in a list"),
        (bytearray(b"abc"), ""),
        ("a string", ""),
        ("", ""),
        (5, ""),
        (None, ""),
    ):
        with pytest.raises(TypeError) as caught:
            getattr(manager, method)(batch)
        assert str(caught.value) == (
            f"hashes must be an iterable of block hashes, got {batch!r}{advice}"
        )
    with pytest.raises(TypeError, match="hashes must be an iterable of block hashes"):
        getattr(manager, method)(memoryview(A))
    assert observe(manager) == before


def test_an_iterator_that_fails_changes_nothing(build: Build, method: str) -> None:
    class IteratorFailedError(Exception):
        pass

    def failing() -> Iterator[bytes]:
        yield A
        raise IteratorFailedError

    manager = prepared(build, method)
    before = observe(manager)
    with pytest.raises(IteratorFailedError):
        getattr(manager, method)(failing())
    assert observe(manager) == before


def test_a_batch_list_stays_the_callers(build: Build, method: str) -> None:
    manager = prepared(build, method)
    batch: list[bytes] = [A, B, A] if method != "complete_load" else [A, B]
    copy = list(batch)
    output = getattr(manager, method)(batch)
    assert batch == copy
    batch.clear()
    if method == "prepare_store":
        assert output.block_hashes_to_store == [A, B]


@pytest.mark.parametrize("length", [36, 37, 300, 5000])
def test_keys_that_differ_only_in_length_or_in_one_byte_are_different(
    build: Build, length: int
) -> None:
    key = bytes(length)
    family = [key, key + b"\0", key[:-1], b"\1" + key[1:], key[:-1] + b"\1"]
    manager = build(8)
    store(manager, family[:1])
    assert [block in manager for block in family] == [True, False, False, False, False]
    store(manager, family[1:])
    assert [manager.lookup([block]) for block in family] == [1] * 5
    assert len(manager) == 5
    ids = [slots(manager.prepare_load([block]))[0] for block in family]
    assert len(set(ids)) == 5
