"""Requests in both twins: every policy, any number open, whole prompts and parts of them."""

from __future__ import annotations

import random
import tracemalloc
from types import ModuleType
from typing import Any

import pytest

from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.conftest import read_budget
from tests.differential.pairs import Twins
from tests.differential.traffic import Traffic
from tests.differential.workloads import GENERATED
from tests.parts import ListBackend

SEQUENCES = 60
"""Random sequences of calls per policy, before the budget is applied."""


@pytest.mark.parametrize("name", registry.names())
def test_requests_that_overlap(twins: Twins, seed: int, name: str) -> None:
    for number in range(max(1, round(SEQUENCES * read_budget()))):
        Traffic.of(twins, name, seed + number).run(80)


@pytest.mark.parametrize("name", registry.names())
def test_requests_over_a_subclass_of_a_policy(twins: Twins, seed: int, name: str) -> None:
    """A derived policy goes through the Python manager in both twins, and decides as its base."""

    def derive(twin: ModuleType, capacity: int) -> Any:
        policy = type("Same", (twin.policy_class(name),), {})
        return twin.CPUOffloadingManager(16, capacity, policy)

    def plain(twin: ModuleType, capacity: int) -> Any:
        return twin.CPUOffloadingManager(16, capacity, name)

    stats = []
    for build in (derive, plain):
        traffic = Traffic(twins, str(seed), build, 20)
        traffic.hints = (None,)  # managers do not know what a derived policy has released
        traffic.run(300)
        stats.append(traffic.pair.python.stats())
    assert stats[0] == stats[1]


@pytest.mark.parametrize("manager", ["LRUOffloadingManager", "ARCOffloadingManager"])
def test_requests_over_a_user_s_backend(twins: Twins, seed: int, manager: str) -> None:
    def build(twin: ModuleType, capacity: int) -> Any:
        return getattr(twin, manager)(ListBackend(16, capacity), True)

    Traffic(twins, str(seed), build, 20).run(300)


@pytest.mark.parametrize("name", ["lru", "arc", "arc-classic", "slru", "sieve"])
@pytest.mark.parametrize("workload", GENERATED)
def test_a_policy_that_counts_no_requests_decides_as_by_bare_calls(
    twins: Twins, seed: int, name: str, workload: str
) -> None:
    chance = random.Random(seed)
    for twin in twins:
        by_request, by_calls = (twin.CPUOffloadingManager(16, 30, name) for _ in range(2))
        under_way: list[tuple[Any, list[bytes], list[bytes]]] = []
        for keys in GENERATED[workload](seed, 150, 36):
            request = by_request.begin(keys)
            by_calls.touch(keys)
            assert request.lookup() == by_calls.lookup(keys)
            output, expected = request.prepare_store(), by_calls.prepare_store(keys)
            assert (output is None) == (expected is None)
            storing = [] if expected is None else list(expected.block_hashes_to_store)
            if output is not None and expected is not None:
                assert output.block_hashes_evicted == expected.block_hashes_evicted
            under_way.append((request, keys, storing))
            while len(under_way) > chance.randrange(4):
                request, keys, storing = under_way.pop(0)
                request.finish()
                by_calls.touch(keys)
                request.complete_store()
                by_calls.complete_store(storing)
        assert by_request.stats() == by_calls.stats()


def test_requests_of_thousands_of_blocks(twins: Twins, seed: int) -> None:
    Traffic.of(twins, "lru", seed, 6_000).run(60)


def test_ten_thousand_open_requests_take_at_most_48_bytes_per_block(twins: Twins) -> None:
    _, compiled = twins
    manager = compiled.CPUOffloadingManager(16, 4_000, "lru")
    keys = [number.to_bytes(4, "big") * 8 for number in range(4_128)]
    prompts = [keys[number % 4_000 : number % 4_000 + 128] for number in range(10_000)]
    manager.begin(prompts[0]).finish()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        requests = [manager.begin(prompt) for prompt in prompts]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / (128 * len(requests)) <= 48
    for request in requests[:50]:
        request.prepare_store()
        request.finish()
        request.complete_store()
    assert manager.lookup(prompts[0]) == 128
    check_invariants(manager)
