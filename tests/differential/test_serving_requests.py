"""Requests that are served in one call: the Python twin makes the calls of an engine."""

from __future__ import annotations

import random

import pytest

from kvoffload import Hints
from kvoffload.managers._watching import FINISHED, RELEASED
from kvoffload.policies import registry
from tests.differential.pairs import Pair, Twins
from tests.differential.workloads import GENERATED

TOLD = (None, Hints(ends=True), Hints(expect_s=3.0, source="a"), Hints(ends=True, expect_s=30.0))


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("workload", GENERATED)
@pytest.mark.parametrize("capacity", [1, 16, 60])
def test_served_in_one_call_or_call_by_call(
    twins: Twins, seed: int, name: str, workload: str, capacity: int
) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name))
    chance = random.Random(seed)
    for number, batch in enumerate(GENERATED[workload](seed, 100, 36)):
        keys = [key for key in batch if chance.random() < 0.3] if number % 3 else batch
        first, end = sorted(chance.randint(0, len(keys)) for _ in range(2))
        told = chance.choice(TOLD), float(number)
        events = [(keys, FINISHED, 0, *told), (keys[::2], RELEASED, 0, None, None)]
        requests = [
            (keys, first, end, *told),
            (keys, first, len(keys), None, float(number)),
            *chance.choices(events, k=number % 2),
            (keys, 0, len(keys), None, float(number)),
        ]
        pair.do("_serve_requests", requests)
        if number % 10 == 0:
            pair.agree()
    pair.agree()
    stats = pair.compiled.stats()
    assert stats["pending"] == 0
    if capacity > 1:  # each request of a seed may be longer than one block, and is refused then
        assert stats["stored_blocks"] > 0
        assert stats["evicted_blocks"] > 0


def test_pending_and_pinned_blocks_stay_as_they_are(twins: Twins) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 4, "lru"))
    pair.do("prepare_store", [b"pending"])
    pair.do("prepare_store", [b"pinned"])
    pair.do("complete_store", [b"pinned"])
    pair.do("prepare_load", [b"pinned"])
    pair.do("_serve_requests", [([b"pinned", b"new", b"pending", b"new"], 1, 4, None, None)])
    pair.agree()
    assert pair.do("lookup", [b"pinned", b"new"])[1] == 2
    refused = [b"%d" % number for number in range(3)]
    pair.do("_serve_requests", [(refused, 0, 3, None, None)])
    pair.agree()
    assert pair.compiled.stats()["refused_stores"] == 1
