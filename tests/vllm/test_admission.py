"""The library's own policies under vLLM; hit density learns from whole requests, and declines."""

from __future__ import annotations

import random

import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.vllm.configuration import create
from tests.vllm.conftest import SEED
from tests.vllm.engine import SPECS, Engine, Talk
from tests.vllm.requests import CHUNK_TOKENS, Drive, context, key
from tests.vllm.tiered import OURS, assert_nothing_is_left, files
from tests.vllm.watched import Request

POLICIES = ["hit-density", "hit-density?ghosts=1.5", "hit-density?guard=0"]
# Without the guard, which may follow a policy that stores everything.
DECLINES = ["hit-density?guard=0", "hit-density?ghosts=1.5&guard=0"]


def popular_and_unique(rng: random.Random, count: int) -> list[list[int]]:
    """Requests of which a few are asked again and again, and most never: a cache that thrashes."""
    fresh = iter(range(10**6, 10**9))
    popular = [[100 * n + place for place in range(10)] for n in range(6)]
    requests = []
    for _ in range(count):
        if rng.random() < 0.4:
            requests.append([*rng.choice(popular), *(next(fresh) for _ in range(2))])
        else:
            requests.append([next(fresh) for _ in range(rng.randint(5, 25))])
    return requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("part", "in_flight"), [(3, 1), (10**9, 1), (10**9, 4)])
def test_it_decides_as_the_library_s_own_manager(policy, part, in_flight):
    """Requests that overlap, offered whole or in parts: the same hits, stores and evictions."""
    requests = popular_and_unique(random.Random(SEED), 400)
    drive = Drive(KVOffloadManager(60, policy), part, in_flight)
    reference = CPUOffloadingManager(CHUNK_TOKENS, 60, policy)
    running = []
    for number, ids in enumerate(requests):
        keys = [key(one) for one in ids]
        idle = context(keys, "looks up only")  # which is no use
        drive.manager.on_new_request(idle)
        drive.manager.lookup(keys[0], idle)
        drive.manager.on_request_finished(idle)
        drive.run(keys)
        request = reference.begin(keys)
        hits = request.lookup()
        request.prepare_load(0, hits)
        request.prepare_store()
        running.append((request, hits))
        if len(running) >= in_flight:
            request, hits = running.pop(0)
            request.complete_load(0, hits)
            request.complete_store()
            request.finish()
        if part > len(keys):
            ours = {one for one in keys if drive.manager._policy.get(one) is not None}
            assert ours == {one for one in keys if one in reference}, f"request {number}"
    check_invariants(drive.manager)
    stats = reference.stats()
    if "guard=0" in policy:
        assert stats["not_admitted"] > 1000
    if part > 100:
        assert drive.hits == stats["hit_blocks"]
        assert drive.stored == stats["stored_blocks"]
    else:  # a part is decided on the space that the parts before it have left
        assert abs(drive.hits - stats["hit_blocks"]) <= 0.1 * stats["hit_blocks"]


def test_a_chain_leaves_tail_first_though_it_was_stored_in_parts():
    manager = KVOffloadManager(6, "hit-density")
    drive = Drive(manager, 2)
    drive.run([key(n) for n in range(6)])
    evicted = manager._policy.evict(6, ())
    assert [one for one, _ in evicted] == [key(n) for n in reversed(range(6))]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("policy", DECLINES)
def test_the_real_scheduler_takes_what_is_declined(tmp_path, host_platform, policy, num_groups):
    extra = {**SPECS["kvoffload"], "eviction_policy": policy}
    engine = Engine(tmp_path, extra, num_groups, num_chunks=60)
    manager = engine.connector.manager
    assert type(manager) is KVOffloadManager
    offered = stored = 0
    prepare = manager.prepare_store

    def counted(keys, req_context):
        nonlocal offered, stored
        absent = [one for one in keys if manager._policy.get(one) is None]
        output = prepare(keys, req_context)
        assert output is not None
        offered += len(absent)
        stored += len(output.keys_to_store)
        check_invariants(manager)
        return output

    manager.prepare_store = counted
    talk = Talk([engine], random.Random(SEED), num_conversations=8)
    while talk.loads == 0 or stored == offered or len(talk.prompts) < 80:
        talk.turn()
        assert len(talk.prompts) < 400
    talk.drain()
    assert 0 < stored < offered
    assert manager._usage() == (0, 0)  # nothing pinned, nothing pending
    check_invariants(manager)


def test_above_a_tier_nothing_is_declined(tmp_path, engines):
    """Through the file tier: every chunk is written, and comes back byte for byte."""
    engine = engines(files(tmp_path), 30, eviction_policy="hit-density?guard=0")
    hits = 0
    requests = popular_and_unique(random.Random(4), 60)
    for ids in requests:
        hits += engine.request([key(one) for one in ids])
        check_invariants(engine.primary)
    assert hits > 0
    assert any(job[0] == "submit_load" for job in engine.jobs)
    written = len(list(tmp_path.rglob("*.bin")))
    assert written == len({one for ids in requests for one in ids})
    assert_nothing_is_left(engine)


def test_without_a_tier_a_primary_tier_declines():
    spec = create(30, **OURS, secondary_tiers=[], eviction_policy="hit-density?guard=0")
    manager = spec.get_manager()
    drive = Drive(manager.primary_tier, 8)
    for ids in popular_and_unique(random.Random(4), 60):
        drive.run([key(one) for one in ids])
    drive.end()
    fresh = [key(10**9 + number) for number in range(30)]
    output = manager.primary_tier.prepare_store(fresh, context(fresh))
    assert len(output.keys_to_store) < len(fresh)
    manager.shutdown()


# -- other policies of the library ---------------------------------------------------------------


def run(manager, keys, load_own=False):
    """Run a request, which loads what hits and stores the rest; return the evicted keys."""
    request = Request(manager, keys)
    request.load()
    output = request.store(keys[len(request.hits) :])
    if load_own:
        manager.prepare_load(output.keys_to_store, request.context)
        manager.complete_load(output.keys_to_store, request.context)
    request.finish()
    return output.evicted_keys


def test_a_use_is_counted_once_a_request_and_an_insertion_is_none():
    manager = KVOffloadManager(4, "slru?protected=0.5")
    run(manager, [key(1)])
    run(manager, [key(2)], load_own=True)  # reading back what it stored is no use either
    run(manager, [key(1)])  # used again: protected
    run(manager, [key(3)])
    run(manager, [key(4)])
    assert run(manager, [key(5)]) == [key(2)]
    assert run(manager, [key(6)]) == [key(3)]
    assert run(manager, [key(7)]) == [key(4)]
    assert manager._policy.get(key(1)) is not None
    check_invariants(manager)


@pytest.mark.parametrize(
    "cache_policy",
    [name for name in registry.names() if registry.entry(name).tail_first != "never"],
)
def test_a_chain_leaves_tail_first(cache_policy):
    manager = KVOffloadManager(4, cache_policy)
    run(manager, [key(n) for n in range(4)])
    evicted = []
    for number in (9, 8, 9, 8):  # a policy that declines them the first time stores them the second
        evicted += run(manager, [key(number)])
    assert evicted == [key(3), key(2)]
