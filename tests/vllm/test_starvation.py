"""Tiny primary tiers before a file tier: every request is answered, and nothing stays pinned.

vLLM's real scheduler, connector, tiering manager and file tier; the worker is a mock.
"""

from __future__ import annotations

import random

import pytest
from vllm.v1.kv_offload.base import ReqContext

from kvoffload.integrations.vllm import KVOffloadPrimaryTier
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.vllm.conftest import SEED
from tests.vllm.engine import BLOCK_TOKENS, Engine
from tests.vllm.requests import Drive, context, key
from tests.vllm.test_admission import popular_and_unique
from tests.vllm.test_construction import Region
from tests.vllm.tiered import OURS, files, wait_for

pytestmark = pytest.mark.usefixtures("host_platform")

STEPS = 300
MOST_STEPS = 2000  # until the last request is answered
SIZES = (1, 2, 4, 6, 8)  # chunks of the primary tier; a prompt has up to 12


class TieredEngine(Engine):
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


def run_to_the_end(engine, rng, waiting, steps, resets) -> None:
    """Serve prompts in as many steps at least, until nothing is held."""
    rng.shuffle(waiting)
    count = 0
    while engine.steps < steps or waiting or not engine.is_idle():
        if waiting and (rng.random() < 0.5 or engine.steps >= steps > 0):
            engine.add(f"r{count}", waiting.pop(), rng.randint(1, 4))
            count += 1
            if rng.random() < resets and not engine.is_loading():
                engine.scheduler.reset_prefix_cache(False, False)
        engine.step(rng.randrange(2))
        assert engine.steps < MOST_STEPS, [*engine.scheduler.requests]
    for _ in range(3):
        engine.step(0)
    assert engine.primary._usage() == (0, 0)
    assert not engine.primary._held
    check_invariants(engine.primary)


@pytest.mark.parametrize("cache_policy", registry.names())
@pytest.mark.parametrize("num_chunks", SIZES)
def test_every_request_is_answered_and_nothing_stays_pinned(tmp_path, cache_policy, num_chunks):
    rng = random.Random(SEED + num_chunks)
    engine = TieredEngine(tmp_path, files(tmp_path / "tier"), num_chunks, cache_policy)
    try:
        run_to_the_end(engine, rng, prompts(rng, 6) * 3, STEPS, resets=0.3)
    finally:
        engine.manager.shutdown()


def tier(num_chunks: int, cache_policy: str = "lru") -> KVOffloadPrimaryTier:
    return KVOffloadPrimaryTier(num_chunks, Region(), cache_policy)


def promote(primary: KVOffloadPrimaryTier, number: int, request: ReqContext) -> bool:
    """Promote one chunk, as vLLM does at a lookup; tell whether there was room for it."""
    if primary.prepare_write([key(number)], request) is None:
        return False
    primary.complete_write([key(number)], request)
    return True


@pytest.mark.parametrize(
    "cache_policy",
    [name for name in registry.names() if not registry.entry(name).learns_by_request],
)
def test_promotions_for_one_request_do_not_evict_each_other(cache_policy):
    primary, request = tier(3, cache_policy), ReqContext("r")
    primary.on_new_request(request)
    assert [promote(primary, number, request) for number in range(5)] == [True] * 3 + [False] * 2
    assert primary._usage() == (3, 0)
    primary.prepare_load([key(number) for number in range(3)], request)
    primary.complete_load([key(number) for number in range(3)], request)
    assert primary._usage() == (0, 0)
    assert promote(primary, 5, ReqContext("other"))


def test_promotions_for_two_requests_do_not_evict_each_other():
    primary, first, second = tier(4), ReqContext("first"), ReqContext("second")
    for number in range(2):
        assert promote(primary, number, first)
        assert promote(primary, 10 + number, second)
    assert not promote(primary, 2, first)
    assert not promote(primary, 12, second)
    assert primary.prepare_store([key(20)], ReqContext("third")) is None
    primary.on_request_finished(first)  # aborted while it waited
    assert primary._usage() == (2, 0)
    assert promote(primary, 12, second)


def test_a_promotion_that_is_declined_is_none_and_one_that_is_there_is_not():
    """On one fixed sequence: on 4 of 300 the guard follows LRU, which declines nothing."""
    primary = tier(60, "hit-density")
    drive = Drive(primary, 8)
    requests = popular_and_unique(random.Random(1), 300)
    for ids in requests:
        drive.run([key(one) for one in ids])
    drive.end()
    fresh = [key(10**9 + number) for number in range(60)]
    answers = [primary.prepare_write([one], context([one])) for one in fresh]
    assert None in answers
    for one, answer in zip(fresh, answers, strict=True):
        assert answer is None or answer.keys_to_store == [one]
    asked = {key(one) for ids in requests for one in ids}
    present = next(one for one in asked if primary._chunk(one) is not None)
    assert primary.prepare_write([present], ReqContext("r")).keys_to_store == []
    check_invariants(primary)
