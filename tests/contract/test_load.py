"""`prepare_load` and `complete_load`: pins, checked for all before any is taken."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload import (
    BlockNotFoundError,
    BlockNotPinnedError,
    BlockNotReadyError,
    RefCountOverflowError,
)
from tests.blocks import A, B, C, D, once, slots, store
from tests.contract.conftest import Build
from tests.observation import observe

pytestmark = pytest.mark.fast


def test_ids_come_in_the_order_given(build: Build) -> None:
    manager = build(4)
    stored = slots(store(manager, [A, B, C]).store_spec)
    place = dict(zip((A, B, C), stored, strict=True))
    spec = manager.prepare_load(once([C, A, B]))
    assert slots(spec) == [place[C], place[A], place[B]]
    assert spec.block_ids.dtype == np.int64
    assert spec.medium() == "CPU"


def test_the_ids_are_the_callers(build: Build) -> None:
    manager = build(2)
    store(manager, [A])
    first, second = manager.prepare_load([A]), manager.prepare_load([A])
    first.block_ids[0] = 77
    assert slots(second) == [0]


@pytest.mark.parametrize(
    ("method", "pinned", "batch", "error", "named"),
    [
        ("prepare_load", [A, B], [A, C, B], BlockNotFoundError, C),
        ("prepare_load", [], [A, D], BlockNotReadyError, D),
        ("complete_load", [A, B], [A, C, B], BlockNotFoundError, C),
        ("complete_load", [A], [A, D], BlockNotPinnedError, D),
        ("complete_load", [A], [A, B], BlockNotPinnedError, B),
        ("complete_load", [A, B], [A, B, A], BlockNotPinnedError, A),
        ("complete_load", [A], [A, C, A, D], BlockNotFoundError, C),
        ("complete_load", [A], [A, A, C, D], BlockNotPinnedError, A),
        ("complete_load", [A], [A, D, C, A], BlockNotPinnedError, D),
    ],
)
def test_a_load_is_refused_for_the_first_offending_hash(
    build: Build, method: str, pinned: list[bytes], batch: list[bytes], error: type, named: bytes
) -> None:
    """A and B are resident, D is pending, C is unknown."""
    manager = build(4)
    store(manager, [A, B])
    manager.prepare_load(pinned)
    manager.prepare_store([D])
    before = observe(manager)
    with pytest.raises(error, match=named.hex()):
        getattr(manager, method)(batch)
    assert observe(manager) == before
    manager.complete_load(pinned)
    assert manager.stats()["pinned"] == 0


def test_a_count_of_pins_does_not_wrap(build: Build) -> None:
    manager = build(2)
    store(manager, [A, B])
    status = manager.policy.get(A)
    status.ref_cnt = 2**31 - 2
    before = observe(manager)
    with pytest.raises(RefCountOverflowError, match=A.hex()) as caught:
        manager.prepare_load([B, A, A])
    assert isinstance(caught.value, OverflowError)
    assert observe(manager) == before
    manager.prepare_load([A])
    assert status.ref_cnt == 2**31 - 1
    with pytest.raises(RefCountOverflowError):
        manager.prepare_load([A])
    status.ref_cnt = 0
