"""Golden curves, causes and waste of public traces at a fixed secret: numbers of an earlier run.

``KVOFFLOAD_TRACES`` names the folder of the traces. How near the curves are is in test_truth.py.
"""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.replay import Configuration, DecodedTrace, replay
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


@pytest.mark.parametrize(("name", "capacity", "policy"), GOLDEN)
def test_curves_causes_and_waste(twins, name, capacity, policy):
    segments, causes, evicted_used = GOLDEN[name, capacity, policy]
    watch = Watch(secret=SECRET, max_rate=1.0, clock=lambda: 0.0)
    manager = twins[1].CPUOffloadingManager(16, capacity, policy, watch=watch)
    replay(DecodedTrace.of(trace(name)), Configuration(host=capacity), manager=manager)
    counts = watch._core.counts()
    report = watch.report()
    assert [sum(some) for some in zip(*counts["judged"], strict=True)] == segments
    assert {name: n for name, n in report.sampled_missed.items() if n} == causes
    assert counts["evicted_used"] == evicted_used
    check_invariants(manager)
