"""vLLM's real scheduler and offloading connector, with vLLM's spec and with ours.

Both get the same multi-turn requests; every order to a worker must be the same.
"""

from __future__ import annotations

import random

import pytest

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.testing.policies import check_invariants
from tests.vllm.conftest import SEED
from tests.vllm.engine import SPECS, Engine, Talk

pytestmark = pytest.mark.usefixtures("host_platform")


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
@pytest.mark.parametrize("threshold", [0, 2])
def test_the_same_transfers(tmp_path, cache_policy, num_groups, threshold):
    common = {"eviction_policy": cache_policy, "store_threshold": threshold}
    engines = [Engine(tmp_path, {**common, **SPECS[name]}, num_groups) for name in SPECS]
    assert type(engines[1].connector.manager) is KVOffloadManager
    talk = Talk(engines, random.Random(SEED))
    while len(talk.prompts) < 60 or (threshold == 0 and talk.loads < 3):
        talk.turn()
        assert len(talk.prompts) < 400, "nothing is ever loaded"
    talk.drain()
    assert talk.stores > 10
    theirs, ours = (engine.connector.manager for engine in engines)
    assert ours._usage()[0] == (
        theirs._num_allocated_chunks - len(theirs._free_list) - theirs._num_evictable_cache_chunks
    )
    check_invariants(ours)
