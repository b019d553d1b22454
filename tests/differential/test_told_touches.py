"""Touches whose caller says which of them uses blocks again, as one that drives KV groups does."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from kvoffload.policies import registry
from tests.differential.pairs import Pair, Twins
from tests.differential.workloads import GENERATED


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("workload", GENERATED)
@pytest.mark.parametrize("capacity", [1, 16, 60])
def test_told_touches(twins: Twins, seed: int, name: str, workload: str, capacity: int) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name))
    chance = random.Random(seed)
    for number, keys in enumerate(GENERATED[workload](seed, 100, 36)):
        pair.do("_touch_told", keys, False)
        pair.do("prepare_store", keys)
        used = [key for key in keys if chance.random() < 0.7]
        pair.do("_touch_told", used, chance.random() < 0.7)
        pair.do("complete_store", keys)
        if number % 10 == 0:
            pair.agree()
    pair.agree()


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("capacity", [16, 60])
def test_touches_of_what_a_request_has_stored_itself(
    twins: Twins, seed: int, name: str, capacity: int
) -> None:
    """They show ready blocks as pending: what is passed over meanwhile can be evicted after it."""
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name))
    chance = random.Random(seed)
    for number, keys in enumerate(GENERATED["conversations"](seed, 100, 36)):
        pair.do("prepare_store", keys)
        pair.do("complete_store", keys)
        inserted = {key for key in keys if chance.random() < 0.7}
        pair.do("_touch_inserted", keys, inserted)
        if number % 10 == 0:
            pair.agree()
    pair.agree()


@pytest.mark.parametrize("name", ["lfu", "s3fifo"])
def test_a_told_first_touch_counts_each_time(twins: Twins, name: str) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 2, name))
    for key in (b"used", b"other"):
        pair.do("prepare_store", [key])
        pair.do("complete_store", [key])
    for _ in range(2):  # `touch` would take the second for the same request's
        pair.do("_touch_told", [b"used"], False)
    pair.do("_touch_told", [b"other"], False)
    pair.do("prepare_store", [b"new"])
    assert pair.do("lookup", [b"used"])[1] == 1
    assert pair.do("lookup", [b"other"])[1] == 0
    pair.agree()


class _Same:
    """A mixin that changes nothing."""


class _Deaf:
    """A mixin with a `touch` of its own."""

    touched = 0

    def touch(self, hashes: Iterable[bytes]) -> None:
        self.touched += 1


@pytest.mark.parametrize("name", registry.names())
def test_a_subclass_of_a_policy_is_told_as_much(twins: Twins, seed: int, name: str) -> None:
    def build(twin: ModuleType) -> Any:
        same = type("Same", (_Same, twin.policy_class(name)), {})
        return twin.CPUOffloadingManager(16, 20, same)

    plain = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 20, name))
    derived = Pair(twins, build)
    chance = random.Random(seed)
    for keys in GENERATED["scans"](seed, 100):
        used = [key for key in keys if chance.random() < 0.7]
        again = chance.random() < 0.7
        for pair in (plain, derived):
            pair.do("_touch_told", keys, False)
        assert plain.do("prepare_store", keys) == derived.do("prepare_store", keys)
        for pair in (plain, derived):
            pair.do("_touch_told", used, again)
            pair.do("complete_store", keys)
    plain.agree()
    derived.agree()


def test_a_touch_of_a_subclass_hears_what_is_told(twins: Twins) -> None:
    for twin in twins:
        policy = type("Deaf", (_Deaf, twin.policy_class("lfu")), {})(2)
        manager = twin.CPUOffloadingManager(16, 2, policy)
        for again in (False, True):
            manager._touch_told([b"key"], again)
        assert policy.touched == 2
