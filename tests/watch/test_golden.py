"""Golden curves of public traces at a fixed secret, and their errors.

``KVOFFLOAD_TRACES`` names the folder of the traces. Causes, waste and the list of the compiled twin
are compared with numbers of an earlier run; the Python twin is held to it elsewhere.
"""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.replay import Configuration, DecodedTrace, replay
from kvoffload.replay.loop import Replays
from kvoffload.testing.policies import check_invariants
from kvoffload.watch import Watch
from tests.replay.test_golden import trace

from .watched import SECRET

pytestmark = pytest.mark.fast

# trace, capacity, policy: sampled blocks by segment; causes that occur; evicted unused and used
GOLDEN = {
    ("mooncake_conversation", 9_139, "lru"): (
        [478, 1366, 3320, 2840, 2299, 491, 20726],
        {"evicted": 5592, "never_or_long_ago": 20726},
        [22009, 3283],
    ),
    ("mooncake_conversation", 9_139, "arc"): (
        [478, 1366, 3320, 2840, 2299, 491, 20726],
        {"broken_prefix": 66, "evicted": 5964, "never_or_long_ago": 20726},
        [22443, 3218],
    ),
    ("lmcache_agents_64c", 2_413, "lru"): (
        [36423, 25648, 25087, 5018, 603, 17, 10291],
        {"evicted": 5341, "never_or_long_ago": 10291},
        [5661, 8920],
    ),
}


@pytest.fixture(params=GOLDEN, ids=str)
def case(request, twins):
    name, capacity, policy = request.param
    decoded = DecodedTrace.of(trace(name))
    watch = Watch(secret=SECRET, max_rate=1.0, clock=lambda: 0.0)
    manager = twins[1].CPUOffloadingManager(16, capacity, policy, watch=watch)
    replay(decoded, Configuration(host=capacity), manager=manager)
    return request.param, decoded, manager


def test_curves_causes_and_waste(case):
    key, _, manager = case
    segments, causes, evicted_used = GOLDEN[key]
    counts = manager.watch._core.counts()
    report = manager.watch.report()
    assert [sum(some) for some in zip(*counts["judged"], strict=True)] == segments
    assert {name: n for name, n in report.sampled_missed.items() if n} == causes
    assert counts["evicted_used"] == evicted_used
    check_invariants(manager)


def test_points_are_near_the_truth(case):
    (_name, capacity, _policy), decoded, manager = case
    replays, given = Replays(decoded), 0
    for point in manager.watch.report().points:
        if point.hit_ratio is None or "long_requests" in point.marks:
            continue
        given += 1
        one = Configuration(policy=point.policy, host=int(capacity * point.memory))
        exact = replays.of(one).hit_ratio
        bound = 0.01 if point.policy == "lru" and point.memory > 0.5 else 0.025
        assert abs(point.hit_ratio - exact) <= bound, (point, exact)
    assert given >= 4
