"""Requests in both twins: every policy, any number open, whole prompts and parts of them."""

from __future__ import annotations

import random
import tracemalloc
from types import ModuleType
from typing import Any

import pytest

from kvoffload import Hints
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.differential.pairs import OpenPair, Pair, Twins
from tests.differential.workloads import GENERATED
from tests.parts import ListBackend


def step(opened: OpenPair, chance: random.Random, keys: list[bytes]) -> None:
    """Do one call, some of them wrong."""
    start = chance.randint(0, opened.size)
    stop = chance.randint(start, opened.size + (chance.random() < 0.1))
    roll = chance.randrange(8)
    if roll in (0, 7):
        opened.do("lookup", start if roll == 0 else 0)
    elif roll == 5:
        opened.do("complete_store", chance.random() < 0.8)
    elif roll == 6:
        opened.do("extend", chance.choices(keys, k=chance.randrange(3)))
    else:
        method = ("prepare_load", "complete_load", "prepare_store", "prepare_store")[roll - 1]
        opened.do(method, start, stop)


def drive(pair: Pair, workload: str, seed: int, *, requests: int = 90) -> None:
    """Serve requests that overlap by random calls; compare after each."""
    chance = random.Random(seed)
    open_pairs: list[OpenPair] = []
    for number, keys in enumerate(GENERATED[workload](seed, requests, 36)):
        open_pairs.append(OpenPair(pair, keys))
        for _ in range(6):
            step(chance.choice(open_pairs), chance, keys)
        if chance.random() < 0.2:
            pair.do("prepare_store", keys)  # bare calls between
            pair.do("touch", keys)
            pair.do("complete_store", keys, chance.random() < 0.8)
        while len(open_pairs) > chance.randrange(1, 7):
            ended = open_pairs.pop(chance.randrange(len(open_pairs)))
            if chance.random() < 0.9:
                ended.finish(Hints(ends=True) if chance.random() < 0.3 else None)
                ended.do("complete_store")
                step(ended, chance, keys)  # mostly an error
        if chance.random() < 0.1:
            pair.do("release", keys)
        if number % 20 == 19 and chance.random() < 0.5:
            pair.do("reset_cache")
        if number % 10 == 0:
            pair.agree()
            pair.do("take_events")
    pair.agree()


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("workload", GENERATED)
@pytest.mark.parametrize("capacity", [1, 16, 60])
def test_requests_that_overlap(
    twins: Twins, seed: int, name: str, workload: str, capacity: int
) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name, True))
    drive(pair, workload, seed)


@pytest.mark.parametrize("name", registry.names())
def test_requests_over_a_subclass_of_a_policy(twins: Twins, seed: int, name: str) -> None:
    """A derived policy goes through the Python manager in both twins, and decides as its base."""

    def build(twin: ModuleType) -> Any:
        return twin.CPUOffloadingManager(16, 20, type("Same", (twin.policy_class(name),), {}))

    derived = Pair(twins, build)
    drive(derived, "scans", seed)
    plain = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 20, name))
    drive(plain, "scans", seed)
    assert derived.python.stats() == plain.python.stats()


@pytest.mark.parametrize("manager", ["LRUOffloadingManager", "ARCOffloadingManager"])
def test_requests_over_a_user_s_backend(twins: Twins, seed: int, manager: str) -> None:
    pair = Pair(twins, lambda twin: getattr(twin, manager)(ListBackend(16, 20), True))
    drive(pair, "scans", seed)


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
    chance = random.Random(seed)
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 6_000, "lru"))
    keys = [number.to_bytes(4, "big") * (8 if number % 50 else 80) for number in range(9_000)]
    for _ in range(12):
        first = chance.randrange(3_000)
        served = OpenPair(pair, keys[first : first + chance.randrange(1, 5_000)])
        for _ in range(5):
            step(served, chance, keys)
        served.do("finish")
        served.do("complete_store")
    pair.agree()


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
