"""The public traces, replayed by request through vLLM's manager and ours: the same decisions."""

from __future__ import annotations

import gzip
import hashlib
import json

import pytest
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.testing.policies import check_invariants
from tests.vllm.conftest import TRACES
from tests.vllm.requests import context as context_of

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


def replay(manager, requests):
    """Replay with up to four requests in flight; yield everything that was decided."""
    in_flight: list = []
    for number, ids in enumerate(requests):
        keys = list(
            dict.fromkeys(
                bytes(make_offload_key(hashlib.sha256(b"%d" % one).digest(), 0)) for one in ids
            )
        )
        context = context_of(keys, str(number))
        manager.on_new_request(context)
        hits = 0
        while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
            hits += 1
        yield hits
        if hits:
            yield manager.prepare_load(keys[:hits], context).block_ids.tolist()
            manager.complete_load(keys[:hits], context)
        stored = []
        for start in range(hits, len(keys), 64):  # in the chunks of a chunked prefill
            output = manager.prepare_store(keys[start : start + 64], context)
            if output is None:
                yield None
                continue
            yield output.keys_to_store, output.store_spec.block_ids.tolist(), output.evicted_keys
            stored += output.keys_to_store
        in_flight.append((context, stored))
        if len(in_flight) > 3:
            other, keys_stored = in_flight.pop(0)
            manager.complete_store(keys_stored, other)
            manager.on_request_finished(other)
    yield manager.get_stats().data


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_gives_the_same_decisions(name, cache_policy, share):
    requests = rows(name)
    num_chunks = int(len({one for ids in requests for one in ids}) * share)
    ours = KVOffloadManager(num_chunks, cache_policy)
    theirs = CPUOffloadingManager(num_chunks, cache_policy)
    decisions = 0
    for one, other in zip(replay(ours, requests), replay(theirs, requests), strict=True):
        assert one == other, f"decision {decisions}"
        decisions += 1
    assert decisions > len(requests)
    check_invariants(ours)
