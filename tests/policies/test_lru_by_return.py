"""LRU that ranks by returns: as LRU until the first hint, then by density, and nothing declined."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

import kvoffload
from kvoffload import Hints
from kvoffload.policies import registry
from tests.blocks import A, B, C, D, E, F, block_hash
from tests.differential.workloads import GENERATED
from tests.observation import as_value, attempt, observe
from tests.policies.steps import evict, idle, pinned, policy_of

NAME = "lru?hints=1"
ENDS = Hints(ends=True)
SEEDS = 12


def manager_of(twin: ModuleType, capacity: int, policy: str = NAME) -> Any:
    return twin.CPUOffloadingManager(16, capacity, policy, True)


class Beside:
    """LRU and the same with hints, on which every step is done twice and compared."""

    def __init__(self, twin: ModuleType, capacity: int) -> None:
        self.both = [manager_of(twin, capacity, name) for name in ("lru", NAME)]

    def do(self, things: list[Any], method: str, *arguments: Any) -> Any:
        lru, other = (attempt(thing, method, *arguments) for thing in things)
        assert lru == other, method
        return lru[1]

    def agree(self) -> None:
        lru, other = self.both
        assert lru.stats().items() <= {**other.stats(), "ghosts": 0}.items()
        assert as_value(lru.policy.block_table) == as_value(other.policy.block_table)
        assert lru.policy.num_released == other.policy.num_released
        self.do(self.both, "take_events")

    def leave(self) -> None:
        """Empty both, one block by one, by stores that end."""
        for number in range(10**6, 10**6 + self.both[0].policy.cache_capacity):
            self.do(self.both, "prepare_store", [block_hash(number)])


@pytest.mark.parametrize("capacity", [1, 5, 16, 60])
@pytest.mark.parametrize("workload", GENERATED)
def test_without_hints_of_returns_it_decides_as_lru(
    twin: ModuleType, seed: int, workload: str, capacity: int
) -> None:
    for number in range(SEEDS):
        draw = random.Random(seed + number)
        beside = Beside(twin, capacity)
        loading: list[tuple[list[Any], int]] = []
        storing: list[list[Any]] = []
        for step, hashes in enumerate(GENERATED[workload](seed + number, 60)):
            said = ENDS if draw.random() < 0.1 else None
            requests = [manager.begin(hashes, hints=said) for manager in beside.both]
            found = beside.do(requests, "lookup")
            if found and draw.random() < 0.7:
                beside.do(requests, "prepare_load", 0, found)
                loading.append((requests, found))
            beside.do(requests, "prepare_store")
            if draw.random() < 0.3:
                answer = [block_hash(10**5 + step)]
                for request in requests:
                    request.extend(answer)
                beside.do(requests, "prepare_store")
            storing.append(requests)
            told = ENDS if draw.random() < 0.1 else None
            for request in requests:
                request.finish(hints=told)
            while len(loading) > draw.randrange(4):
                loaded, end = loading.pop(0)
                beside.do(loaded, "complete_load", 0, end)
            while len(storing) > draw.randrange(4):
                beside.do(storing.pop(0), "complete_store", draw.random() < 0.9)
            if draw.random() < 0.1:
                beside.do(beside.both, "touch", draw.sample(hashes, len(hashes)))
            if draw.random() < 0.1:
                beside.do(beside.both, "release", draw.sample(hashes, len(hashes) // 2))
            if draw.random() < 0.02:
                beside.do(beside.both, "reset_cache")
            beside.agree()
        beside.leave()
        beside.agree()


def test_used_alone_it_evicts_as_lru(twin: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    blocks = [block_hash(number) for number in range(30)]
    policies = [policy_of(twin, name, 20) for name in ("lru", NAME)]
    for _ in range(400):
        chosen = draw.choice(blocks)
        call = draw.choice(("insert", "touch", "remove", "release", "evict", "make_room"))
        arguments: tuple[Any, ...] = ([draw.choice(blocks) for _ in range(4)],)
        if call == "insert":
            arguments = (chosen, draw.choice((idle, pinned))(draw.randrange(100)))
        elif call == "remove":
            arguments = (chosen,)
        elif call == "evict":
            arguments = (draw.randrange(4), arguments[0])
        elif call == "make_room":
            if any(policies[0].get(block) for block in arguments[0]):
                continue
            arguments = (list(dict.fromkeys(arguments[0])), draw.randrange(3), {chosen})
        lru, other = (attempt(policy, call, *arguments) for policy in policies)
        assert lru == other, call
        assert as_value(policies[0].block_table) == as_value(policies[1].block_table)


def serve(manager: Any, hashes: list[bytes], now: float, hints: Hints | None = None) -> None:
    request = manager.begin(hashes, hints=hints, now=now)
    request.prepare_store()
    request.complete_store()
    request.finish()


def says(seconds: float) -> Hints:
    return Hints(expect_s=seconds, source="one")


def hits_of_sessions(manager: Any, seed: int) -> int:
    """Serve sessions of which half return within seconds and half within minutes, as they say."""
    draw = random.Random(seed)
    due = [(0.0, number) for number in range(60)]
    hits = 0
    for _ in range(3000):
        now, number = min(due)
        wait = draw.choice((5.0, 300.0)) * draw.uniform(0.8, 1.2)
        due[number] = now + wait, number
        blocks = [block_hash(number * 4 + step) for step in range(4)]
        request = manager.begin(blocks, hints=says(wait), now=now)
        hits += request.lookup()
        request.prepare_store()
        request.complete_store()
        request.finish()
    return hits


def test_sessions_that_say_when_they_return_hit_more_than_by_lru(
    twin: ModuleType, seed: int
) -> None:
    """On average 13 % more; on one seed in many, 9 %: five together are never so far off."""
    lru, other = (
        sum(hits_of_sessions(manager_of(twin, 40, name), seed + more) for more in range(5))
        for name in ("lru", NAME)
    )
    assert other > 1.1 * lru


def test_who_returns_late_leaves_before_older_blocks(twin: ModuleType) -> None:
    manager = manager_of(twin, 3)
    serve(manager, [A], 0.0)
    serve(manager, [B], 1.0, says(1e6))
    serve(manager, [C], 2.0)
    serve(manager, [D], 3.0)
    assert [block in manager for block in (A, B, C, D)] == [True, False, True, True]
    serve(manager, [E], 4.0)  # of blocks of no turn the oldest
    assert [block in manager for block in (A, C, D, E)] == [False, True, True, True]


def test_it_stores_everything_or_nothing(twin: ModuleType) -> None:
    manager = manager_of(twin, 3)
    serve(manager, [A, B, C], 0.0, says(1.0))
    manager.prepare_load([A])
    assert manager.prepare_store([D, E, F]) is None
    assert manager.stats()["refused_stores"] == 1
    assert all(block in manager for block in (A, B, C))
    manager.complete_load([A])
    output = manager.prepare_store([D, E, F])
    assert list(output.block_hashes_to_store) == [D, E, F]


def test_a_policy_used_alone_refuses_a_store_without_a_trace(twin: ModuleType) -> None:
    policy = policy_of(twin, NAME, 3, (A, B))
    policy.insert(C, pinned(2))
    before = observe(policy)
    assert policy.make_room([D, E, F], 0, ()) is None
    assert observe(policy) == before
    assert evict(policy, 2) == "AB"


def test_its_rule_is_lru_and_it_has_no_guard(twin: ModuleType) -> None:
    policy = manager_of(twin, 4).policy
    assert (policy.rule, policy.guard, policy.trial_hits, policy.hint_gain) == ("lru", 0, {}, None)


@pytest.mark.parametrize("text", ["lru", "lru?hints=0"])
def test_plain_lru_stays_itself(twin: ModuleType, text: str) -> None:
    assert type(manager_of(twin, 4, text).policy) is twin.LRUCachePolicy


@pytest.mark.parametrize("value", ["2", "-1", "0.5", "yes"])
def test_the_option_is_0_or_1(twin: ModuleType, value: str) -> None:
    with pytest.raises(ValueError, match="hints must be"):
        manager_of(twin, 4, f"lru?hints={value}")


def test_it_has_an_entry_of_its_own(twin: ModuleType) -> None:
    spec = registry.parse(NAME)
    assert (str(spec), spec.entry.name, spec.kind.name) == (NAME, "lru", NAME)
    assert spec.kind.ranks_by_return
    assert spec.kind.learns_by_request
    assert not spec.entry.ranks_by_return
    policy = manager_of(twin, 4).policy
    assert registry.entry_of(type(policy)) is spec.kind
    assert registry.entry_of(type("Own", (type(policy),), {})) is None
    assert "LRUByReturnCachePolicy" not in kvoffload.__all__
