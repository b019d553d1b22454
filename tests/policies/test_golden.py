"""Exact counts of the policies and the ceilings on the public traces of ``tests/replay``.

weka_cc_a, whose times of subagents are wrong, is an input like any other here: its rows are fixed.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.replay import Configuration, DecodedTrace, replay
from kvoffload.replay.offline import CEILINGS
from kvoffload.testing.policies import check_invariants
from tests.conftest import AVAILABLE
from tests.policies.steps import request
from tests.replay.test_golden import trace

pytestmark = pytest.mark.fast

CALLED = {
    "python": {("lmcache_agents_64c", 482)},
    "compiled": {("mooncake_conversation", 1_827), ("lmcache_agents_64c", 482)},
}
"""Traces and capacities that a twin replays by the calls of a manager; the others by rows."""

ROWS = [line.split() for line in Path(__file__).with_name("counts.txt").read_text().splitlines()]
GOLDEN = {
    (name, policy, int(capacity)): tuple(map(int, counts))
    for name, policy, capacity, *counts in ROWS[1:]
}
"""Hits and blocks that are stored, evicted and refused, by trace, policy and capacity."""


@functools.cache
def decoded(name: str) -> DecodedTrace:
    return DecodedTrace.of(trace(name))


def case(*values: Any, is_long: bool) -> Any:
    """Return the parameters of a test, which a plain run leaves out if it is long."""
    return pytest.param(*values, marks=[pytest.mark.thorough] * is_long)


@pytest.mark.parametrize(
    ("twin", "name", "policy", "capacity"),
    [
        # the Python twin takes many times as long as the compiled one, which is the last
        case(twin, name, policy, capacity, is_long=twin != AVAILABLE[-1])
        for twin in AVAILABLE
        for name, policy, capacity in GOLDEN
        if policy not in CEILINGS and (name, capacity) in CALLED[twin]
    ],
    indirect=["twin"],
)
def test_counts(twin: ModuleType, name: str, policy: str, capacity: int) -> None:
    whole = decoded(name)
    manager = twin.CPUOffloadingManager(16, capacity, policy)
    keys = whole.keys()
    for row in whole.rows():
        request(manager, [keys[block] for block in row])
    stats = manager.stats()
    found = (stats["hit_blocks"], stats["stored_blocks"], stats["evicted_blocks"])
    assert (*found, stats["refused_stores"]) == GOLDEN[name, policy, capacity]
    check_invariants(manager)


@pytest.mark.parametrize(
    ("name", "policy", "capacity"),
    [
        case(*key, is_long=key[0] == "weka_cc_a")
        for key in GOLDEN
        if key[1] in CEILINGS or (key[0], key[2]) not in CALLED["compiled"]
    ],
)
def test_counts_of_rows(name: str, policy: str, capacity: int) -> None:
    found = replay(decoded(name), Configuration(policy=policy, host=capacity))
    expected = GOLDEN[name, policy, capacity]
    assert (found.hits, found.stored) == expected[:2]
    if policy not in CEILINGS:  # which evict and refuse nothing that is counted
        assert (found.evicted, found.refused) == expected[2:]
