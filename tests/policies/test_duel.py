"""The duel of hit density: its sample, its miniatures, the rule that it follows."""

from __future__ import annotations

import contextvars
import itertools
import random
from hashlib import blake2b
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload._sampling import (
    REPEATABLE,
    SECRET_BYTES,
    hash_key,
    sample_of,
    secrets_from,
    words_of,
)
from kvoffload.policies._hit_density import sample_shift
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, block_hash, block_hashes
from tests.differential.pairs import Pair, Twins
from tests.policies.steps import request
from tests.policies.stress import WORKLOADS, serve

# A workload, its length and a capacity that end with the rule LRU.
ENDS_WITH_LRU = ("chats", 600, 130)


def manager_of(twin: ModuleType, capacity: int, options: str = "") -> Any:
    return twin.CPUOffloadingManager(16, capacity, f"hit-density{options}")


def is_sampled(block: bytes, shift: int, secret: bytes = REPEATABLE) -> bool:
    return sample_of(hash_key(block, words_of(secret))) % (1 << shift) == 0


def following_lru(twin: ModuleType) -> tuple[Any, dict[bytes, int]]:
    """Return a manager that evicts by recency, and the request that last used each block."""
    name, length, capacity = ENDS_WITH_LRU
    requests = WORKLOADS[name](1, length)
    manager = manager_of(twin, capacity)
    serve(manager, requests)
    assert manager.policy.rule == "lru"
    return manager, {
        block: number for number, ids in enumerate(requests) for block in block_hashes(*ids)
    }


@pytest.mark.parametrize(
    ("capacity", "shift"),
    [
        (127, 0),
        (128, 1),
        (255, 1),
        (256, 2),
        (511, 2),
        (512, 3),
        (4095, 3),
        (4096, 4),
        (200_000, 9),
    ],
)
def test_a_miniature_has_few_blocks_whatever_the_capacity(capacity: int, shift: int) -> None:
    assert sample_shift(capacity) == shift
    assert 1 <= capacity >> shift <= 1023


@pytest.mark.parametrize("shift", [0, 1, 3, 6])
def test_one_block_in_so_many_is_sampled(shift: int) -> None:
    sampled = sum(is_sampled(block_hash(number), shift) for number in range(20_000))
    assert sampled == pytest.approx(20_000 >> shift, rel=0.15)


def test_a_block_is_sampled_by_the_whole_of_its_hash() -> None:
    hashes = [
        bytes(place) + bytes([1]) + bytes(length - place - 1)
        for length in (1, 7, 8, 9, 36)
        for place in range(length)
    ]
    sampled = [is_sampled(block, 1) for block in hashes]
    assert 0.3 < sum(sampled) / len(sampled) < 0.7


def under_attack(twin: ModuleType, guessed: bytes | None, secret: bytes) -> float:
    """Return the recent hits of the miniatures where one client asks for every twelfth block.

    That client asks twice for each prompt, and takes only keys that a duel with the secret that it
    has `guessed` would sample; None: it takes any.
    """
    shift = sample_shift(4096)
    draw, numbers = random.Random(1), itertools.count()
    candidates = map(block_hash, itertools.count(10**9))
    keys = (key for key in candidates if guessed is None or is_sampled(key, shift, guessed))
    popular = [block_hashes(*itertools.islice(numbers, 10)) for _ in range(2000)]
    with secrets_from(secret):
        manager = manager_of(twin, 4096)
    for number in range(2000):
        request(manager, popular[min(int(draw.expovariate(0.0015)), 1999)])
        if number % 20 == 0:
            own = list(itertools.islice(keys, 16))
        if number % 10 == 0:
            request(manager, own)
    check_invariants(manager)
    return sum(manager.policy.trial_hits.values())


@pytest.mark.thorough
def test_keys_that_a_client_chooses_do_not_steer_it(twins: Twins) -> None:
    guessed = bytes(range(SECRET_BYTES))
    chosen, others = (under_attack(twins[1], each, guessed) for each in (guessed, None))
    assert chosen > 1.5 * others
    for number in range(3):
        secret = blake2b(b"%d" % number, digest_size=SECRET_BYTES).digest()
        chosen, others = (under_attack(twins[1], each, secret) for each in (guessed, None))
        assert chosen == pytest.approx(others, rel=0.1)


def test_the_secret_is_drawn_for_each_manager_unless_one_is_given(twin: ModuleType) -> None:
    requests = WORKLOADS["mixture"](1, 150)

    def hits(managers: list[Any]) -> list[tuple[float, ...]]:
        for manager in managers:
            serve(manager, requests)
        return [tuple(manager.policy.trial_hits.values()) for manager in managers]

    context = contextvars.Context()  # an empty one: nobody gives a secret there
    drawn = [context.run(manager_of, twin, 600) for _ in range(3)]
    assert len(set(hits(drawn))) == 3
    given = [manager_of(twin, 600) for _ in range(2)]
    assert len(set(hits(given))) == 1


def test_it_is_on_by_default_and_can_be_turned_off(twin: ModuleType) -> None:
    assert manager_of(twin, 8).policy.guard == 1
    manager = manager_of(twin, 60, "?guard=0")
    assert manager.policy.guard == 0
    serve(manager, WORKLOADS["pairs"](1, 300))
    assert manager.policy.rule == "hit-density"
    assert manager.policy.trial_hits == {}
    check_invariants(manager)


def test_a_cache_of_no_blocks_needs_no_guard(twin: ModuleType) -> None:
    manager = manager_of(twin, 0)
    request(manager, [A, B])
    assert (manager.policy.guard, manager.policy.rule) == (0, "hit-density")
    check_invariants(manager)


def test_the_twins_sample_alike_where_a_policy_holds_more_than_its_capacity(twins: Twins) -> None:
    """The hand's walk has no room for all records then; the miniatures serve them all the same."""
    seen = []
    for twin in twins:
        policy = twin.policy_class("hit-density")(8)
        for number in range(300):
            policy.insert(block_hash(number), status := BlockStatus(number))
            status.ref_cnt = 0
        for first in range(0, 300, 3):
            policy.begun(block_hashes(first, first + 1, first + 2))
        for first in range(0, 300, 3):
            policy.begun(block_hashes(first))
        check_invariants(policy)
        seen.append((policy.trial_hits, policy.densities))
    assert seen[0] == seen[1]
    assert sum(seen[0][0].values()) > 0


def test_a_request_is_served_to_the_miniatures_once(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    for _ in range(2):
        request(manager, [A, B])
        request(manager, [C])
    served = manager.begin([A, B])
    before = dict(manager.policy.trial_hits)
    assert before["lru"] > 0
    served.prepare_store()
    served.finish()
    assert manager.policy.trial_hits == before


def test_a_store_of_a_miniature_takes_as_long_as_the_cache_s(twin: ModuleType) -> None:
    manager = manager_of(twin, 64)
    storing: list[Any] = []
    for number in range(8):  # each store ends two requests later
        served = manager.begin(block_hashes(2 * number, 2 * number + 1))
        served.prepare_store()
        served.finish()
        storing.append(served)
        if len(storing) > 2:
            storing.pop(0).complete_store()
    storing.pop().complete_store()  # the last one ends early
    assert set(manager.policy.trial_hits.values()) == {0.0}
    manager.touch(block_hashes(14, 15))  # the cache has it, no miniature would yet
    assert set(manager.policy.trial_hits.values()) == {0.0}
    manager.touch(block_hashes(8, 9))
    assert set(manager.policy.trial_hits.values()) == {2.0}
    manager.reset_cache()
    for number in range(2):  # the stores end at once again
        request(manager, [A, B])
        request(manager, [block_hash(100 + number)])
    assert min(manager.policy.trial_hits.values()) > 1.9
    check_invariants(manager)


def test_an_immediate_repeat_is_served_to_the_miniatures_and_no_use(
    twin: ModuleType,
) -> None:
    manager = manager_of(twin, 8)
    for number in range(4):
        request(manager, [A, B])
        assert manager.policy.num_requests == 1
        assert round(manager.policy.trial_hits["lru"]) == 2 * number
    request(manager, [C])
    request(manager, [A])  # a part of what came before
    request(manager, [A, B])
    assert manager.policy.num_requests == 4
    assert round(manager.policy.trial_hits["lru"]) == 9
    check_invariants(manager)


def test_by_lru_s_rule_the_least_recent_leave(twin: ModuleType) -> None:
    manager, last_use = following_lru(twin)
    assert len({number for number, ring in enumerate(manager.policy.rings) if ring}) > 1
    policy = manager.policy
    del manager  # which alone changes it while it is there
    victims = [last_use[block] for block, _ in policy.evict(100, ())]
    assert all(one <= other for one, other in pairwise(victims))
    check_invariants(policy)


def test_by_lru_s_rule_everything_is_stored_or_nothing(twin: ModuleType) -> None:
    manager, _ = following_lru(twin)
    capacity = manager.policy.cache_capacity
    before = manager.stats()
    output = manager.prepare_store(block_hashes(*range(10**6, 10**6 + capacity)))
    assert len(output.block_hashes_to_store) == len(output.block_hashes_evicted) == capacity
    manager.complete_store(output.block_hashes_to_store)
    output = manager.prepare_store(block_hashes(*range(10**7, 10**7 + capacity + 1)))
    assert output.block_hashes_to_store == output.block_hashes_evicted == []
    after = manager.stats()
    assert after["not_admitted"] - before["not_admitted"] == capacity + 1
    assert after["refused_stores"] == before["refused_stores"]
    check_invariants(manager)


def test_clear_forgets_the_rule(twin: ModuleType) -> None:
    manager, _ = following_lru(twin)
    manager.reset_cache()
    assert manager.policy.rule == "hit-density"
    assert set(manager.policy.trial_hits.values()) == {0.0}
    name, length, _ = ENDS_WITH_LRU
    serve(manager, WORKLOADS[name](1, length))
    assert manager.policy.rule == "lru"
    check_invariants(manager)


def test_it_finds_back_when_the_traffic_changes(twin: ModuleType) -> None:
    manager, _ = following_lru(twin)
    requests = WORKLOADS["scans"](5, 700)
    serve(manager, [[number + 10**8 for number in request] for request in requests])
    assert manager.policy.rule == "hit-density"


@pytest.mark.parametrize("capacity", [120, 150])
def test_the_rule_is_that_of_the_miniature_that_leads_by_a_mean_request(
    twin: ModuleType, capacity: int
) -> None:
    manager = manager_of(twin, capacity)
    policy = manager.policy
    rule, changes, mean_length, seen = "hit-density", 0, 0.0, 0
    for ids in WORKLOADS["phases"](1, 600):
        request(manager, block_hashes(*ids))
        if policy.num_requests > seen:
            seen = policy.num_requests
            mean_length += (len(ids) - mean_length) * (0.01 if mean_length else 1.0)
        (other,) = {"hit-density", "lru"} - {rule}
        lead = policy.trial_hits[other] - policy.trial_hits[rule]
        if lead * 2 ** sample_shift(capacity) > mean_length:
            rule, changes = other, changes + 1
        assert policy.rule == rule
    assert changes >= 2


def test_the_miniatures_count_nothing(twin: ModuleType) -> None:
    """All is learned from the requests of the cache, whatever the miniatures make of them."""
    policies = []
    for options in ("", "?guard=0"):
        manager = manager_of(twin, 300, options)
        serve(manager, WORKLOADS["scans"](1, 400))
        policies.append(manager.policy)
    assert policies[0].rule == "hit-density"
    assert policies[0].densities == policies[1].densities


def test_an_eviction_of_no_block_begins_no_store(twins: Twins) -> None:
    """A block that is inserted after it is none whose age is the lag of stores."""
    pair = Pair(twins, lambda twin: twin.policy_class("hit-density")(4))
    assert pair.do("evict", 0, ()) == ("returned", [])
    pair.do("insert", A, BlockStatus(0))  # pending
    for _ in range(5):
        pair.do("touch", [B, C])
    for policy in pair.both:
        policy.get(A).ref_cnt = 0
    for number in range(6):
        for _ in range(3):  # a repeat hits in the miniature of LRU as soon as a store has ended
            pair.do("touch", block_hashes(100 + number))
            pair.agree()
