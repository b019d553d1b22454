"""hit-density under vLLM: it learns from whole requests and stores a part of what is offered."""

from __future__ import annotations

import random

import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.testing.policies import check_invariants
from tests.vllm.configuration import create
from tests.vllm.conftest import SEED
from tests.vllm.engine import SPECS, Engine, Talk
from tests.vllm.requests import CHUNK_TOKENS, Drive, context, key
from tests.vllm.tiered import OURS, assert_nothing_is_left, files

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
@pytest.mark.parametrize("part", [3, 10**9])
def test_it_decides_as_the_library_s_own_manager(policy, part):
    """Request after request, offered whole or in parts: the same hits, stores and evictions."""
    requests = popular_and_unique(random.Random(SEED), 400)
    drive = Drive(KVOffloadManager(60, policy), part)
    reference = CPUOffloadingManager(CHUNK_TOKENS, 60, policy)
    for number, ids in enumerate(requests):
        keys = [key(one) for one in ids]
        drive.run(keys)
        request = reference.begin(keys)
        hits = request.lookup()
        request.prepare_load(0, hits)
        request.complete_load(0, hits)
        request.prepare_store()
        request.finish()
        request.complete_store()
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


def test_a_request_is_one_use_and_what_it_only_stored_is_none():
    manager = KVOffloadManager(40, "hit-density")
    policy = manager._rules.policy
    drive = Drive(manager, 2)
    keys = [key(n) for n in range(8)]

    def classes():
        return [
            next((number for number, ring in enumerate(policy.rings) if one in ring), None)
            for one in keys
        ]

    drive.run(keys)  # four stores, one request
    assert policy.num_requests == 1
    assert classes() == [0] * 8
    drive.run([key(9)])
    drive.run(keys)  # loads them all
    assert policy.num_requests == 3
    assert set(classes()) == {1}
    made = context(keys)
    manager.on_new_request(made)
    for one in keys:  # what is only looked up is not used
        manager.lookup(one, made)
    manager.on_request_finished(made)
    assert policy.num_requests == 3


def test_the_same_prompt_twice_at_a_time_is_no_second_use_and_served_to_the_trials():
    manager = KVOffloadManager(40, "hit-density")
    policy = manager._rules.policy
    drive = Drive(manager, 4, in_flight=3)
    keys = [key(n) for n in range(8)]
    for number in range(10, 14):  # a store takes three requests, as the trials learn from the first
        drive.run([key(number)])
    for _ in range(2):  # the second begins while the first one's store is under way
        drive.run(keys)
        assert policy.num_requests == 5
    drive.end()
    assert policy.trial_hits["lru"] == 0
    for number in range(1, 3):
        drive.run(keys)
        assert round(policy.trial_hits["lru"]) == 8 * number
        assert policy.num_requests == 5
    drive.end()
    check_invariants(manager)


def test_a_chain_leaves_tail_first_though_it_was_stored_in_parts():
    manager = KVOffloadManager(6, "hit-density")
    drive = Drive(manager, 2)
    drive.run([key(n) for n in range(6)])
    evicted = manager._policy.evict(6, ())
    assert [one for one, _ in evicted] == [key(n) for n in reversed(range(6))]


def test_what_is_declined_is_known_when_it_comes_again():
    """The second request for it counts as the reuse that it is, whoever ran in between."""
    manager = KVOffloadManager(8, "hit-density")
    drive = Drive(manager, 4)
    popular = [[key(10 * n + place) for place in range(4)] for n in range(2)]
    for _ in range(3):
        for keys in popular:
            drive.run(keys)
    other = [key(n) for n in range(100, 104)]
    drive.run(other)
    assert all(manager._policy.get(one) is None for one in other)  # what is used is better
    for _ in range(2):  # of two that overlap, the first finishes when the other has begun
        first, second = context(other), context(popular[1])
        manager.on_new_request(first)
        output = manager.prepare_store(other, first)
        manager.on_new_request(second)
        manager.prepare_load(popular[1], second)
        manager.complete_load(popular[1], second)
        manager.complete_store(output.keys_to_store, first)
        manager.on_request_finished(first)
        manager.on_request_finished(second)
        if output.keys_to_store:
            break
    assert output.keys_to_store == other
    check_invariants(manager)


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
