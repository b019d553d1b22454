"""Requests in both twins: every policy, any number open, whole prompts and parts of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from kvoffload import IMPLEMENTATION, Hints
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from kvoffload.watch import Watch
from tests.conftest import read_budget
from tests.differential.pairs import Pair, Twins
from tests.differential.traffic import STEPS, Traffic
from tests.parts import ListBackend


@pytest.mark.parametrize("name", registry.names())
def test_requests_that_overlap(twins: Twins, seed: int, name: str) -> None:
    for number in range(max(1, round(40 * read_budget()))):
        Traffic.of(twins, name, seed + number).run(80)


@pytest.mark.parametrize("capacity", [24, 60, pytest.param(400, marks=pytest.mark.thorough)])
def test_a_long_run_of_sessions_with_hints(twins: Twins, seed: int, capacity: int) -> None:
    """What hit density learns of their sources, and both trials of hints, take their time."""
    traffic = Traffic.of(twins, "hit-density", seed, capacity, policy="hit-density")
    traffic.steps = STEPS | {"begin": 60.0, "finish": 40.0, "reset": 0.0}
    traffic.run(1500)
    policy = traffic.pair.compiled.policy
    assert policy.hint_sources
    assert policy.hint_gain is not None


def test_sessions_longer_than_small_caches_end_around_shared_blocks(twins: Twins) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 2, "hit-density"))
    for prompt in ("1.", "331", "4303", "054301.", "234444.", "321"):
        request = pair.begin([block.encode() for block in prompt.rstrip(".")])
        request.do("prepare_store")
        request.do("complete_store")
        request.finish(Hints(ends=prompt.endswith(".")))
    pair.agree()


def said_by(source: str) -> Hints:
    return Hints(expect_s=2.0, source=source)


@pytest.mark.parametrize("method", ["begin", "begun", "finished"])
def test_a_batch_that_tells_hints_keeps_those_of_its_own_call(twins: Twins, method: str) -> None:
    def build(twin: ModuleType) -> Any:
        manager = twin.CPUOffloadingManager(16, 2, "hit-density")
        return manager if method == "begin" else twin.policy_class("hit-density")(2)

    def tell(thing: Any, source: str, inner: str = "") -> Iterator[bytes]:
        if inner:
            getattr(thing, method)(tell(thing, inner), hints=said_by(inner))
        yield source.encode()

    pair = Pair(twins, build)
    for thing in pair.both:
        getattr(thing, method)(tell(thing, "outer", "inner"), hints=said_by("outer"))
    pair.agree()


@pytest.mark.skipif(IMPLEMENTATION == "python", reason="a watch needs the extensions")
def test_a_clock_that_tells_hints_keeps_those_of_a_finish(twin: ModuleType) -> None:
    def clock() -> float:
        if calls:
            calls.pop()(hints=said_by("inner"))
        return 1.0

    calls: list[Any] = []
    manager = twin.CPUOffloadingManager(16, 4, "hit-density", watch=Watch(clock=clock))
    request = manager.begin([b"outer"])
    calls.append(partial(manager.begin, [b"inner"]))
    request.finish(hints=said_by("outer"))
    assert "outer" in [source.name for source in manager.policy.hint_sources]


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
        traffic.has_hints = False  # managers do not know what a derived policy has released
        traffic.run(300)
        stats.append(traffic.pair.python.stats())
    assert stats[0] == stats[1]


@pytest.mark.parametrize("name", registry.names())
def test_requests_over_a_policy_of_the_other_twin(twins: Twins, seed: int, name: str) -> None:
    def build(twin: ModuleType, capacity: int) -> Any:
        (other,) = {*twins} - {twin}
        return twin.CPUOffloadingManager(16, capacity, other.policy_class(name)(capacity), True)

    traffic = Traffic(twins, str(seed), build, 20)
    traffic.has_hints = False
    traffic.run(150)


@pytest.mark.parametrize("pool", ["a user's", "the twin's", "the other twin's"])
@pytest.mark.parametrize("manager", ["LRUOffloadingManager", "ARCOffloadingManager"])
def test_requests_over_a_backend(twins: Twins, seed: int, manager: str, pool: str) -> None:
    def build(twin: ModuleType, capacity: int) -> Any:
        (other,) = {*twins} - {twin}
        makers = {"a user's": ListBackend, "the twin's": twin.CPUBackend}
        return getattr(twin, manager)(makers.get(pool, other.CPUBackend)(16, capacity), True)

    traffic = Traffic(twins, str(seed), build, 20)
    if pool == "the other twin's":  # whose ids begin at 0 after a reset only in its own manager
        traffic.steps = STEPS | {"reset": 0.0}
    traffic.run(300)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name != "lru"))
        for name in registry.names()
    ],
)
def test_requests_of_thousands_of_blocks(twins: Twins, seed: int, name: str) -> None:
    """Searches pass over thousands that are in use; storage and index grow."""
    traffic = Traffic.of(twins, name, seed, 6_000)
    traffic.run(60)
    while not traffic.pair.compiled.stats()["evicted_blocks"]:
        traffic.run(20)


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
