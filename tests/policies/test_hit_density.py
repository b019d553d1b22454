"""Hit density, rule by rule."""

from __future__ import annotations

import itertools
import random
from operator import itemgetter
from types import ModuleType
from typing import Any

import pytest

from kvoffload import Hints
from kvoffload.policies._learned import age_bin
from kvoffload.testing.policies import check_invariants
from tests import _python
from tests.blocks import A, B, C, D, E, F, G, H, block_hash, block_hashes, names
from tests.policies.steps import announced, evict, idle, policy_of, request

NEVER_AGAIN, ONCE_AGAIN, MORE_OFTEN = range(1), range(1, 8), range(8, 15)


def density(twin: ModuleType, capacity: int, blocks: list[bytes] | tuple[()] = (), **options: Any):
    return policy_of(twin, "hit-density", capacity, blocks, **options)


def manager_of(twin: ModuleType, capacity: int, options: str = "") -> Any:
    return twin.CPUOffloadingManager(16, capacity, f"hit-density{options}")


def ring_of(policy: Any, block: bytes) -> int:
    check_invariants(policy)
    return next(number for number, ring in enumerate(policy.rings) if block in ring)


def class_of_ghost(policy: Any, block: bytes) -> int:
    """Store a block that is remembered; return the class that it brings along."""
    policy.insert(block, idle())
    return ring_of(policy, block)


def train(manager: Any, requests: int = 800) -> None:
    """Show that chains of two are asked for again, and that what comes between them is not."""
    for number in range(requests):
        request(manager, block_hashes(10**6 + 2 * number, 10**6 + 2 * number + 1))
        request(manager, block_hashes(1000 + number % 3, 2000 + number % 3))


def test_without_data_the_least_recent_leaves_first(twin: ModuleType) -> None:
    policy = density(twin, 8)
    for block in (A, B, C, D):
        policy.insert(block, idle())
        policy.touch([block])
        policy.touch([H])
    assert evict(policy, 3) == "ABC"


def test_uses_and_gaps_make_the_class(twin: ModuleType) -> None:
    policy = density(twin, 8, [A, B])
    policy.touch([H])
    assert ring_of(policy, A) in NEVER_AGAIN
    for gap, number in ((1, 1), (2, 8), (3, 9), (6, 9), (7, 10), (15, 11), (31, 12), (127, 13)):
        for other in range(gap - 1):
            policy.touch(block_hashes(100 + other))
        policy.touch([A])
        assert ring_of(policy, A) == number
    for other in range(510):
        policy.touch(block_hashes(100 + other))
    policy.touch([A])
    assert ring_of(policy, A) == 14
    assert ring_of(policy, B) in NEVER_AGAIN


def test_a_use_counts_for_all_blocks_of_the_prefix(twin: ModuleType) -> None:
    policy = density(twin, 8)
    policy.touch([A, B])
    policy.insert(A, idle())
    policy.insert(B, idle())
    policy.touch([H])
    policy.touch([B])  # behind A: a use of A as well
    policy.touch([H])
    policy.touch([A, B])
    assert ring_of(policy, B) == 8
    assert ring_of(policy, A) == 8
    policy.touch([A])  # not of B
    policy.touch([A, B])
    assert ring_of(policy, A) == ring_of(policy, B) == 8


def test_what_is_unknown_takes_its_class_from_the_known_block_behind_it(twin: ModuleType) -> None:
    policy = density(twin, 8)
    policy.touch([B])
    policy.insert(B, idle())
    for block in (H, G, F):
        policy.touch([block])
    policy.touch([A, B, C])
    assert ring_of(policy, B) == 2
    assert class_of_ghost(policy, A) == 2
    assert class_of_ghost(policy, C) in NEVER_AGAIN


def test_the_finish_of_a_request_is_no_use_where_requests_overlap(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    chains = [[A, B], [C, D]]
    for chain in chains:
        request(manager, chain)
    assert manager.policy.num_requests == 2
    requests = [manager.begin(chain) for chain in chains]
    for each in requests:
        each.prepare_store()
    for each in requests:
        each.finish()
    assert manager.policy.num_requests == 4
    assert ring_of(manager.policy, A) in ONCE_AGAIN
    for chain in [[H], *chains]:
        manager.begin(chain)
    assert manager.policy.num_requests == 7
    assert ring_of(manager.policy, A) in MORE_OFTEN


def test_what_an_answer_adds_belongs_to_the_request(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    request(manager, [C])
    with manager.begin([A, B]) as served:
        served.prepare_store()
        for block in (C, D):
            served.extend([block])
            served.prepare_store(len(served) - 1)
    served.complete_store()
    assert manager.policy.num_requests == 2
    assert ring_of(manager.policy, C) in ONCE_AGAIN
    assert ring_of(manager.policy, D) in NEVER_AGAIN
    check_invariants(manager)


def expect(manager: Any, hashes: list[bytes], source: str) -> int:
    """Serve a request that says when it returns, then another; return its source's returns."""
    request(manager, hashes, Hints(expect_s=60.0, source=source))
    request(manager, [H])
    return int(manager.policy.hint_sources[0].returns)


def test_what_several_sessions_use_belongs_to_no_source(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    assert expect(manager, [A, B], "one") == 0
    assert expect(manager, [A], "one") == 1
    assert expect(manager, [A, B], "one") == 2  # A was used after B
    assert expect(manager, [A], "one") == 2
    assert expect(manager, [B], "one") == 3


def test_sixteen_sources_are_told_apart_and_all_others_are_one(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    for number in range(19):
        hints = Hints(expect_s=60.0, source=f"client {number}")
        manager.begin(block_hashes(number), hints=hints).finish()
    shown = [(source.name, source.hints) for source in manager.policy.hint_sources]
    assert shown == [*((f"client {number}", 1) for number in range(16)), (None, 3)]


@pytest.mark.parametrize("hook", ["begun", "finished"])
def test_what_are_no_hints_is_refused(twin: ModuleType, hook: str) -> None:
    policy = policy_of(twin, "hit-density", 4, (A, B))
    policy.release([A])
    with pytest.raises(TypeError, match="hints must be Hints or None, got 5"):
        getattr(policy, hook)([A, B], 5)
    assert (policy.num_requests, policy.num_released) == (0, 1)


def test_a_hint_at_the_finish_labels_the_blocks_and_their_age_goes_on(twin: ModuleType) -> None:
    manager = manager_of(twin, 8)
    served = manager.begin([A, B])
    served.prepare_store()
    served.complete_store()
    for block in (C, D, E, F, G):
        request(manager, [block])
    served.finish(hints=Hints(expect_s=60.0, source="late"))
    request(manager, [H])
    request(manager, [A, B])
    (source,) = manager.policy.hint_sources
    assert (source.name, source.hints, source.returns) == ("late", 1, 1)
    assert ring_of(manager.policy, A) == ring_of(manager.policy, B) == 3  # 7 requests, not 1


@pytest.mark.thorough
def test_hints_that_are_right_bring_hits_and_others_take_few(twin: ModuleType) -> None:
    rows = announced(1, 900)
    draw = random.Random(2)
    hits = []
    for hints in (
        [said for _, _, said in rows],
        [None] * len(rows),
        [Hints(expect_s=draw.choice([3.0, 300.0])) for _ in rows],
    ):
        manager = manager_of(twin, 400)
        for (hashes, now, _), told in zip(rows, hints, strict=True):
            request(manager, hashes, told, now)
        hits.append(manager.stats()["hit_blocks"])
    assert hits[0] > 1.1 * hits[1]
    assert hits[2] > 0.97 * hits[1]


def test_time_is_that_of_all_known_blocks_which_are_not_released() -> None:
    policy = density(_python, 40, block_hashes(*range(40)))
    learned = policy._learned

    numbers = itertools.count(100)

    def spent(length: int) -> float:
        """Return the time that is counted in a request of new blocks."""
        before = sum(learned.time)
        policy.touch(block_hashes(*itertools.islice(numbers, length)))
        return float(sum(learned.time) - before)

    # The hand meets 4 blocks for each of the request's, and each stands for as many.
    assert [spent(1) for _ in range(3)] == pytest.approx([40, 41, 42])
    policy.release(block_hashes(*range(20)))
    assert spent(11) == pytest.approx(43 - 20)
    for released in (2, 0):
        policy.touch(block_hashes(3, 4))
        assert sum(learned.uses) == 2 - released
        policy.touch([H])
    assert spent(14) == pytest.approx(55 - 18)


@pytest.mark.parametrize("ghosts", [3.5, 0])
def test_the_sparsest_leaves_unless_the_oldest_is_nearly_as_sparse(
    twin: ModuleType, ghosts: float
) -> None:
    """What is denser than the block that would leave, and only that, is stored."""
    draw = random.Random(3)
    policy = density(twin, 40, ghosts=ghosts, guard=0)
    last_use: dict[bytes, int] = {}
    seen = set()
    for number in range(1500):
        prompt = min(int(draw.expovariate(0.05)), 80) if draw.random() < 0.7 else 100 + number
        batch = block_hashes(*range(10 * prompt, 10 * prompt + 6))
        policy.touch(batch)
        last_use |= dict.fromkeys(batch, policy.num_requests)
        missing = [block for block in batch if policy.get(block) is None]
        admitted, _ = policy.make_room(missing, 40 - len(policy), batch)
        for block in missing[:admitted]:
            policy.insert(block, idle())
        if number % 5 or len(policy) < 40:
            continue
        oldest = []
        for ring, row in zip(policy.rings, policy.densities, strict=True):
            for block in itertools.islice(ring, 1):
                age = policy.num_requests - last_use[block]
                oldest.append((row[age_bin(age + 1)], last_use[block], block))
        least, eldest = min(oldest), min(oldest, key=itemgetter(1))
        leaves = eldest if eldest[0] <= 1.25 * least[0] else least
        is_denser = policy.densities[0][age_bin(1)] > leaves[0]
        fresh = block_hash(10**6 + number)
        admitted, victims = policy.make_room([fresh], 0, ())
        assert admitted == len(victims) == is_denser
        if not is_denser:
            victims = policy.evict(1, ())
        assert [block for block, _ in victims] == [leaves[2]]
        seen |= {is_denser, ("oldest", "sparsest")[leaves is least]} if eldest != least else set()
    assert seen == {True, False, "oldest", "sparsest"}
    check_invariants(policy)


def test_a_caller_that_touches_once_is_counted_each_time(twin: ModuleType) -> None:
    policy = density(twin, 8, [A, B])
    policy.touch([H])
    for number in range(600):
        policy.touch([(A, B)[number % 2]])
        assert policy.num_requests == number + 2
    assert ring_of(policy, B) in MORE_OFTEN


def test_what_brings_fewer_hits_is_not_stored(twin: ModuleType) -> None:
    manager = manager_of(twin, 6)
    train(manager)
    before = manager.stats()
    output = manager.prepare_store(block_hashes(*range(500, 520)))
    assert output.block_hashes_to_store == output.block_hashes_evicted == []
    after = manager.stats()
    assert after["not_admitted"] - before["not_admitted"] == 20
    assert after["refused_stores"] == before["refused_stores"]
    assert manager.lookup(block_hashes(1000, 2000)) == 2


def test_free_slots_are_always_filled(twin: ModuleType) -> None:
    manager = manager_of(twin, 3)
    assert names(request(manager, [A, B]).block_hashes_to_store) == "AB"
    output = manager.prepare_store([A, B, C, D, E])
    assert names(output.block_hashes_to_store)[0] == "C"


def test_a_leading_part_is_stored(twin: ModuleType) -> None:
    policy = density(twin, 4, [A, B])
    policy.touch([A, B])
    number, victims = policy.make_room([C, D, E, F], 2, {A, B})
    assert (number, victims) == (2, [])
    number, victims = policy.make_room([C, D, E], 0, {A})
    assert number == len(victims) <= 1


def test_a_long_store_does_not_evict_what_is_protected(twin: ModuleType) -> None:
    old, new = block_hashes(*range(300)), block_hashes(*range(1000, 1200))
    policy = density(twin, 300, old, ghosts=8.0)
    for _ in range(3):  # as ghosts they become denser than what is there
        policy.touch(new[:100])
        policy.touch(new[100:])
        policy.touch([H])
    number, victims = policy.make_room(new, 0, old[:3])
    assert number == len(victims) == 200
    assert dict(victims).keys().isdisjoint(old[:3])
    check_invariants(policy)


def test_a_chain_leaves_tail_first_whatever_its_classes(twin: ModuleType) -> None:
    policy = density(twin, 8, [A, B, C, D])
    policy.touch([A, B, C, D])
    policy.touch([A, B])
    policy.touch([A])
    assert evict(policy, 4) == "DCBA"


def test_a_ghost_keeps_its_history(twin: ModuleType) -> None:
    policy = density(twin, 4, [A])
    for block in (B, A, C, A):
        policy.touch([block])
    assert evict(policy, 1) == "A"
    assert policy.num_ghosts == 3
    policy.insert(A, idle())
    assert ring_of(policy, A) in MORE_OFTEN
    assert policy.num_ghosts == 2


def test_what_was_never_used_again_does_not_displace_the_ghosts_of_what_was(
    twin: ModuleType,
) -> None:
    policy = density(twin, 40)  # 100 ghosts of the one, 40 of the other kind
    for block in (A, B):
        policy.touch([block])
        policy.touch([H])
        policy.touch([block])
    for number in range(500):
        policy.touch(block_hashes(10**6 + number))
    assert policy.num_ghosts == 103  # H too
    policy.touch([A])
    assert class_of_ghost(policy, A) in MORE_OFTEN
    policy.touch(block_hashes(10**6))
    assert class_of_ghost(policy, block_hash(10**6)) in NEVER_AGAIN


@pytest.mark.parametrize(("ghosts", "most"), [(0, 0), (0.25, 1), (1, 4), (3.5, 14), (16, 64)])
def test_ghosts_are_within_their_number(twin: ModuleType, ghosts: float, most: int) -> None:
    policy = density(twin, 4, ghosts=ghosts)
    for number in range(200):
        policy.touch(block_hashes(number, number + 300, number // 2))
        check_invariants(policy)
        assert policy.num_ghosts <= most
    assert (policy.num_ghosts > 0) == (most > 0)


def test_clear_forgets_what_was_learned(twin: ModuleType) -> None:
    manager = manager_of(twin, 6)
    fresh = manager.policy.densities
    train(manager)
    assert manager.policy.densities != fresh
    manager.reset_cache()
    check_invariants(manager.policy)
    assert manager.policy.densities == fresh
    assert manager.policy.num_requests == manager.policy.num_ghosts == 0
    train(manager)
    check_invariants(manager)


def test_a_request_longer_than_the_capacity_is_stored_in_part(twin: ModuleType) -> None:
    manager = manager_of(twin, 3)
    output = request(manager, [A, B, C, D, E, F, G])
    assert names(output.block_hashes_to_store) == "ABC"
    assert manager.lookup([A, B, C]) == 3
    check_invariants(manager)
