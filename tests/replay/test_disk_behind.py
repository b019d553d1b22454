"""A disk behind host memory does not change what the policy of host memory sees."""

from __future__ import annotations

import pytest

from kvoffload.replay import device_hits, simulate
from kvoffload.replay.tiers import simulate_tiers
from tests.policies.test_golden import decoded


@pytest.mark.parametrize("policy", ["lru", "arc", "arc-classic", "hit-density"])
def test_host_memory_hits_as_without_a_disk(policy: str) -> None:
    trace = decoded("lmcache_agents_64c")
    keys, in_device = trace.keys(), device_hits(trace, 0)
    alone = simulate(trace, keys, policy, 482, device_hits=in_device)
    # A disk that holds nothing: what follows a miss in host memory is not looked up.
    both = simulate_tiers(
        trace,
        keys,
        device_hits=in_device,
        policy=policy,
        capacity=482,
        disk_policy="lru",
        disk_capacity=0,
    )
    assert (both.host_hits, both.host_stored) == (alone.hits, alone.stored)
    assert both.disk_hits == both.disk_stored == 0
