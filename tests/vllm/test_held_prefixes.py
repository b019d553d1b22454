"""A request that waits for promotions keeps what it has found, and is answered.

Whatever the policy, the tier and the size of host memory; vLLM's real tiering manager, file tier
and scheduler. Walks end at the first miss, as vLLM's do.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from kvoffload.integrations.vllm import KVOffloadPrimaryTier
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.vllm.conftest import SEED
from tests.vllm.engine import BLOCK_TOKENS
from tests.vllm.engine import Engine as SchedulerEngine
from tests.vllm.requests import Drive, key
from tests.vllm.requests import context as context_of
from tests.vllm.test_admission import popular_and_unique
from tests.vllm.test_construction import Region
from tests.vllm.tiered import OURS, files, slab, wait_for

POLICIES = pytest.mark.parametrize("policy", registry.names())
MOST_STEPS = 2000  # until the last request is answered


class TieredEngine(SchedulerEngine):
    """An engine that waits after each step until its tier has nothing left to do."""

    def __init__(self, folder, tier, num_chunks, cache_policy):
        extra = {**OURS, "secondary_tiers": [tier], "eviction_policy": cache_policy}
        super().__init__(folder, extra, 1, num_chunks)
        self.manager = self.connector.manager
        self.primary = self.manager.primary_tier
        (self.tier,) = self.manager.secondary_tiers
        assert type(self.primary) is KVOffloadPrimaryTier

    def step(self, delay):
        orders = super().step(delay)
        wait_for(self.tier)
        return orders


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of 5 to 12 chunks that share beginnings, each some times."""

    def words(number):
        return [rng.randrange(1, 999) for _ in range(number)]

    made = [words(rng.randint(5, 12) * BLOCK_TOKENS + rng.randrange(16)) for _ in range(3)]
    while len(made) < count:
        made.append(rng.choice(made)[: rng.randint(20, 190)] + words(rng.randrange(40)))
    return made


def run_to_the_end(engine, rng, waiting) -> None:
    """Serve prompts until nothing is held."""
    rng.shuffle(waiting)
    while waiting or not engine.is_idle():
        if waiting and rng.random() < 0.5:
            engine.add(f"r{len(waiting)}", waiting.pop(), rng.randint(1, 4))
            if rng.random() < 0.7 and not engine.is_loading():
                engine.scheduler.reset_prefix_cache(False, False)
        engine.step(rng.randrange(2))
        assert engine.steps < MOST_STEPS, [*engine.scheduler.requests]
    for _ in range(3):
        engine.step(0)
    assert engine.primary._usage() == (0, 0)
    assert not engine.primary._held
    check_invariants(engine.primary)


AT_NIGHT = [(files, 1), (slab, 4), (files, 8), (slab, 12), (files, 20)]


@pytest.mark.usefixtures("host_platform")
@POLICIES
@pytest.mark.parametrize(
    ("kind", "num_chunks"),  # a prompt has up to 12
    [
        *((slab, 1), (files, 4), (slab, 8), (files, 12), (slab, 20)),
        *(pytest.param(kind, n, marks=pytest.mark.nightly) for kind, n in AT_NIGHT),
    ],
)
def test_in_the_real_scheduler_all_is_answered_and_no_walk_loses_what_an_earlier_one_found(
    tmp_path, policy, kind, num_chunks
):
    rng = random.Random(SEED + num_chunks)
    options = {"capacity_bytes": 2**24} if kind is slab else {}
    engine = TieredEngine(tmp_path, kind(tmp_path / "tier") | options, num_chunks, policy)
    primary, manager = engine.primary, engine.manager
    walks = defaultdict(list)  # by request and step: what its lookups found
    promoting = {}  # by request: the step of its first promotion
    lookup, write = manager.lookup, primary.prepare_write
    load, reset = primary.prepare_load, primary.reset_cache

    def looked_up(one, context):
        answer = lookup(one, context)
        walks[context.req_id, engine.steps].append((one, answer))
        return answer

    def written(keys, context):
        output = write(keys, context)
        if output is not None:
            promoting.setdefault(context.req_id, engine.steps)
        return output

    compared = 0

    def loaded(keys, context):
        nonlocal compared
        first = promoting.pop(context.req_id, None)
        if first is not None:
            # Meanwhile the accelerator's own cache may have got a part of the beginning.
            position_of = context.get_offload_key_position
            for one, answer in walks[context.req_id, first]:
                if answer is not LookupResult.HIT:
                    break
                assert position_of(one) <= position_of(keys[-1])
                compared += 1
        return load(keys, context)

    def forgotten():
        reset()
        promoting.clear()

    manager.lookup, primary.prepare_write = looked_up, written
    primary.prepare_load, primary.reset_cache = loaded, forgotten
    try:
        run_to_the_end(engine, rng, prompts(rng, 8) * 6)
        assert compared or num_chunks < 12
    finally:
        manager.shutdown()


# -- how a hold ends -------------------------------------------------------------------------------


def tier(num_chunks: int, cache_policy: str = "lru") -> KVOffloadPrimaryTier:
    return KVOffloadPrimaryTier(num_chunks, Region(), cache_policy)


def waiting(primary, keys, name="r"):
    """Return the context of a request that holds keys 0 and 1 and waits for key 2."""
    stored = context_of(keys[:2], "stored")
    primary.prepare_store(keys[:2], stored)
    primary.complete_store(keys[:2], stored)
    primary.on_request_finished(stored)
    context = context_of(keys, name)
    for one in keys:
        if primary.lookup(one, context) is LookupResult.MISS:
            assert primary.prepare_write([one], context).keys_to_store == [one]
            primary.complete_write([one], context)
    return context


@pytest.mark.parametrize("end", ["load", "store", "finish", "scheduled", "dropped", "reset"])
def test_a_hold_ends_with_the_wait(end):
    primary, keys = tier(6), [key(number) for number in range(3)]
    context = waiting(primary, keys)
    primary.prepare_write([key(7), key(8)], context)
    primary.complete_write([key(7)], context, False)  # which holds nothing
    primary.on_schedule_end(ScheduleEndContext((), ()))
    assert primary._usage() == (4, 1)  # other requests' steps change nothing
    if end == "load":
        primary.prepare_load(keys[:1], context)
        primary.complete_load(keys[:1], context)
    elif end == "store":
        primary.prepare_store([key(9)], context)
        primary.complete_store([key(9)], context)
    elif end == "finish":
        primary.on_request_finished(context)
    elif end == "scheduled":
        primary.on_schedule_end(ScheduleEndContext(("r",), ()))
    elif end == "dropped":
        del context
        gc.collect()
        primary.on_new_request(context_of([], "other"))  # until then the last context is kept
        primary.on_schedule_end(ScheduleEndContext((), ()))
    else:
        primary.reset_cache()
        primary.on_request_finished(context)
    primary.complete_write([key(8)], ReqContext("r"))  # under way when the request went on
    assert primary._usage() == (0, 0)
    assert (primary.lookup(key(8), None) is LookupResult.HIT) == (end != "reset")
    assert not primary._held
    check_invariants(primary)


def test_vllm_s_manager_tells_of_the_end_of_a_step(engines, tmp_path):
    engine = engines(files(tmp_path), 6)
    context = waiting(engine.primary, [key(number) for number in range(3)])
    engine.manager.on_schedule_end(ScheduleEndContext((context.req_id,), ()))
    assert engine.primary._usage() == (0, 0)


def test_a_refused_first_promotion_holds_nothing():
    primary, keys = tier(2), [key(number) for number in range(3)]
    stored = context_of(keys[:2], "stored")
    primary.prepare_store(keys[:2], stored)
    primary.complete_store(keys[:2], stored)
    context = context_of(keys)
    assert [primary.lookup(one, context) for one in keys][-1] is LookupResult.MISS
    assert primary.prepare_write(keys[2:], context) is None
    assert primary._usage() == (0, 0)
    assert not primary._held


def test_what_is_ready_further_on_leaves_only_for_a_promotion_without_other_room():
    """Memory for 6: keys 4 to 7 of a chain, and two others, which leave first; then 7, then 6."""
    primary, keys = tier(6), [key(number) for number in range(8)]
    for name, some in (("chain", keys[4:]), ("others", [key(50), key(51)])):
        stored = context_of(some, name)
        primary.prepare_store(some, stored)
        primary.complete_store(some, stored)
        primary.on_request_finished(stored)
    context = context_of(keys)
    left = []
    for one in keys[:4]:
        assert primary.lookup(one, context) is LookupResult.MISS
        left += primary.prepare_write([one], context).evicted_keys
    assert set(left[:2]) == {key(50), key(51)}
    assert left[2:] == [keys[7], keys[6]]
    assert primary.lookup(keys[4], context) is LookupResult.HIT
    primary.on_schedule_end(ScheduleEndContext((), ()))
    assert primary._usage() == (5, 4)  # the promoted ones and key 4; 5 was not found
    primary.on_request_finished(context)
    for one in keys[:4]:
        primary.complete_write([one], context)
    assert primary._usage() == (0, 0)


def test_a_promotion_that_is_declined_is_none_and_one_that_is_there_is_not():
    """On one fixed sequence: on 4 of 300 the guard follows LRU, which declines nothing."""
    primary = tier(60, "hit-density")
    drive = Drive(primary, 8)
    requests = popular_and_unique(random.Random(1), 300)
    for ids in requests:
        drive.run([key(one) for one in ids])
    drive.end()
    fresh = [key(10**9 + number) for number in range(60)]
    answers = [primary.prepare_write([one], context_of([one])) for one in fresh]
    assert None in answers
    for one, answer in zip(fresh, answers, strict=True):
        assert answer is None or answer.keys_to_store == [one]
    asked = {key(one) for ids in requests for one in ids}
    present = next(one for one in asked if primary._chunk(one) is not None)
    assert primary.prepare_write([present], ReqContext("r")).keys_to_store == []
    check_invariants(primary)
