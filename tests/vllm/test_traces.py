"""The public traces, replayed by request through vLLM's manager and ours: the same decisions."""

from __future__ import annotations

import gzip
import hashlib
import json

import pytest
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.testing.policies import check_invariants
from tests.vllm.conftest import TRACES
from tests.vllm.requests import Drive

# The first blocks of each, so that a run stays short; capacities in shares of their unique blocks.
BLOCKS = 60_000
SHARES = (0.01, 0.1)
NAMES = ("mooncake_conversation", "lmcache_agents_64c", "weka_cc_a")


def rows(name: str) -> list[list[int]]:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no trace {path.name} in $KVOFFLOAD_TRACES")
    taken: list[list[int]] = []
    total = 0
    with gzip.open(path, "rt") as lines:
        for line in lines:
            taken.append(json.loads(line)["hash_ids"])
            total += len(taken[-1])
            if total >= BLOCKS:
                break
    return taken


def key_of(number: int) -> bytes:
    return bytes(make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_gives_the_same_decisions(name, cache_policy, share):
    requests = rows(name)
    num_chunks = int(len({one for ids in requests for one in ids}) * share)
    ours = KVOffloadManager(num_chunks, cache_policy)
    theirs = CPUOffloadingManager(num_chunks, cache_policy)
    drives = [Drive(manager, 64, in_flight=4) for manager in (ours, theirs)]  # in chunks of prefill
    for number, ids in enumerate(requests):
        keys = list(dict.fromkeys(map(key_of, ids)))
        one, other = (drive.run(keys) for drive in drives)
        assert one == other, f"request {number}"
    assert ours.get_stats().data == theirs.get_stats().data
    assert drives[0].hits
    check_invariants(ours)
