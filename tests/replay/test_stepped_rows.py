"""Rows serve a trace, whole or in steps, with hints or without, as the calls of a manager do."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from kvoffload import IMPLEMENTATION
from kvoffload.policies import registry
from kvoffload.replay import Configuration, DecodedTrace, GroupChunks, replay
from kvoffload.replay.engines import RowEngine, new_engines
from kvoffload.replay.hints import TraceHints
from kvoffload.replay.policies import new_manager
from kvoffload.replay.results import COUNTS
from kvoffload.replay.rows import Rows
from kvoffload.traces import Request


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


def hints(trace: DecodedTrace, dice: random.Random) -> TraceHints:
    """Return hints of which a third say the end, and a third a time."""
    count = trace.num_requests
    said = [dice.random() for _ in range(count)]
    return TraceHints(
        now_s=np.arange(count, dtype=np.float64),
        expect_s=np.array([dice.expovariate(0.02) if one < 0.4 else math.nan for one in said]),
        ends=np.array([one > 0.7 for one in said]),
        lies=np.zeros(count, dtype=np.bool_),
    )


def compare(trace: DecodedTrace, configuration: Configuration) -> None:
    manager = new_manager(configuration.policy, configuration.host)
    calls = replay(trace, configuration, manager=manager).log
    rows = Rows(trace, configuration.groups, trace.keys)
    counts = np.zeros((len(rows), len(COUNTS)), dtype=np.int64)
    (engine,) = new_engines(rows, counts, configuration, None)
    assert isinstance(engine, RowEngine)
    engine.serve(0, len(rows), rows.told())
    for name, column in zip(COUNTS, counts.T, strict=True):
        np.testing.assert_array_equal(column, calls[name], name)
    engine._host._check()


@pytest.mark.parametrize("policy", registry.names())
def test_they_hit_store_and_evict_as_the_calls_do(seed, policy):
    for number in range(24):
        dice = random.Random(f"{seed} {policy} {number}")
        size = dice.choice([1, 16, 64])
        step_tokens = dice.choice([1, size, 3 * size, 7 * size + 1, 20 * size, 8192])
        if IMPLEMENTATION == "python" or dice.random() < 0.2:
            step_tokens = None  # rows in steps are compiled
        groups = GroupChunks.of_blocks(size, step_tokens=step_tokens)
        trace = DecodedTrace.of(workload(dice))
        if dice.random() < 0.5:
            trace = replace(trace, hints=hints(trace, dice))
        configuration = Configuration(
            policy=policy,
            device=dice.choice([0, 0, 0, 10, 60]),
            host=dice.choice([1, 5, 20, 50, 100, 300]),
            pending=dice.choice([0, 0, 0, 1, 3]),
            groups=groups,
        )
        compare(trace, configuration)


def test_a_store_that_has_ended_early_is_forgotten():
    prompts = [(0, 2, 3), (2, 3, 2), (0, 3, 1, 3)]
    trace = DecodedTrace.of([Request(0.0, 0, 0, prompt) for prompt in prompts])
    groups = GroupChunks.of_blocks(1, step_tokens=None if IMPLEMENTATION == "python" else 1)
    compare(trace, Configuration(policy="arc", host=3, pending=1, groups=groups))
