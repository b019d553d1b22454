"""Compiled rows serve a trace in steps as the calls of a manager do."""

from __future__ import annotations

import random

import pytest

from kvoffload import IMPLEMENTATION
from kvoffload.policies import registry
from kvoffload.replay import DecodedTrace, GroupChunks
from kvoffload.replay.policies import new_manager
from kvoffload.replay.simulate import Demand, RowServing, Serving
from kvoffload.traces import Request

pytestmark = pytest.mark.skipif(IMPLEMENTATION == "python", reason="rows in steps are compiled")


def workload(dice: random.Random) -> list[Request]:
    """Return prompts that share documents; some repeat a block."""
    documents, repeats = dice.randrange(2, 20), dice.random() < 0.1
    found = []
    for index in range(dice.randrange(5, 120)):
        first, length = 1000 * dice.randrange(documents), dice.randrange(40)
        ids = list(range(first, first + length))
        if dice.random() < 0.3:
            own = 10**6 + 100 * index
            ids = [*ids[: length // 2], *range(own, own + dice.randrange(10))]
        if repeats and ids and dice.random() < 0.3:
            ids.append(dice.choice(ids))
        found.append(Request(float(index), 0, 0, tuple(ids)))
    return found


@pytest.mark.parametrize("policy", registry.names())
def test_they_hit_store_and_evict_as_the_calls_do(seed, policy):
    for number in range(40):
        dice = random.Random(f"{seed} {policy} {number}")
        size = dice.choice([1, 16, 64])
        step_tokens = dice.choice([1, size, 3 * size, 7 * size + 1, 20 * size, 8192])
        groups = GroupChunks.of_blocks(size, step_tokens=step_tokens)
        trace = DecodedTrace.of(workload(dice))
        demand = Demand.of(trace, groups, dice.choice([0, 0, 0, 10, 60]))
        capacity, pending = dice.choice([1, 5, 20, 50, 100, 300]), dice.choice([0, 0, 0, 1, 3])
        keys, everything = trace.keys(), slice(0, trace.num_requests)
        calls = Serving(new_manager(policy, capacity), demand, keys, pending)
        rows = demand.serving(policy, capacity, keys, pending)
        assert isinstance(rows, RowServing)
        assert rows.hits(everything).tolist() == calls.hits(everything).tolist()
        stats = calls.stats()
        assert rows.stats() == {name: stats[name] for name in rows.stats()}
        rows._miniature._check()
