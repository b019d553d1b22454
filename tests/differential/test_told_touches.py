"""Touches whose caller says which of them uses blocks again, as one that drives KV groups does."""

from __future__ import annotations

import random

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
