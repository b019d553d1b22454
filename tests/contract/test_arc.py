"""ARC, beside its model and by hand; the notation is of figure 4 of Megiddo & Modha (FAST'03)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from kvoffload.testing.policies import check_invariants
from tests import _python
from tests.blocks import A, B, C, D, E, F, G, H, block_hashes, names, store
from tests.contract.model import AdaptiveModel
from tests.policies.steps import evict, idle, policy_of

pytestmark = pytest.mark.fast

BLOCKS = (A, B, C, D, E, F, G, H)


def arc(twin: ModuleType, capacity: int, blocks: Iterable[bytes] = ()) -> Any:
    """Return a policy with `blocks` idle in T1, the first the least recent."""
    return policy_of(twin, "arc", capacity, blocks)


def lists(policy: Any) -> tuple[str, str, str, str]:
    """Return T1, T2, B1, B2, least recent first."""
    return names(policy.t1), names(policy.t2), names(policy.b1), names(policy.b2)


def with_ghosts(twin: ModuleType, capacity: int, b1: list[bytes], b2: list[bytes]) -> Any:
    """Return a policy whose only content is these ghosts, oldest first."""
    policy = arc(twin, capacity, b2)
    policy.touch(list(reversed(b2)))
    assert evict(policy, len(b2)) == names(b2)
    for block_id, block in enumerate(b1):
        policy.insert(block, idle(block_id))
    assert evict(policy, len(b1)) == names(b1)
    assert lists(policy) == ("", "", names(b1), names(b2))
    return policy


@pytest.mark.parametrize(
    ("capacity", "b1", "b2", "targets"),
    [
        pytest.param(8, [A, B], [C], [([A], 1.0)], id="a ghost of B1 raises it"),
        pytest.param(8, [A, B], [C, D, E], [([B], 1.5), ([B, A], 4.5)], id="by their ratio"),
        pytest.param(3, [A, B], [C, D, E], [([A, A, A], 3.0)], id="to the capacity at most"),
        pytest.param(8, [A, B, C], [D, E], [([A] * 4, 4.0), ([D], 2.5)], id="one of B2 lowers it"),
        pytest.param(8, [A], [B, C, D], [([A], 3.0), ([B], 2.0)], id="by one at least"),
        pytest.param(8, [A, B, C], [D], [([A], 1.0), ([D], 0.0)], id="to zero at least"),
        pytest.param(2, [A, B], [C], [([A] * 3, 2.0), ([C] * 3, 0.0)], id="between its bounds"),
    ],
)
def test_the_target_follows_the_ghosts(
    twin: ModuleType,
    capacity: int,
    b1: list[bytes],
    b2: list[bytes],
    targets: list[tuple[list[bytes], float]],
) -> None:
    policy = with_ghosts(twin, capacity, b1, b2)
    for touched, target in targets:
        policy.touch(touched)
        assert (policy.target_t1_size, type(policy.target_t1_size)) == (target, float)


def take_a_step(
    policy: Any, model: AdaptiveModel, ref_cnts: dict[bytes, int], chance: random.Random
) -> None:
    """Make a call on a policy and on its model; `ref_cnts` has the resident blocks."""
    batch = chance.choices(BLOCKS, k=chance.randrange(1, 4))
    step, block = chance.random(), batch[0]
    if step < 0.3:
        policy.touch(batch)
        for each in reversed(batch):
            model.use(each, ref_cnts.get(each) == -1)
    elif step < 0.5:
        n, protected = chance.randrange(5), frozenset(batch[1:])
        idle_ones = {each for each, ref_cnt in ref_cnts.items() if ref_cnt == 0}
        victims = model.choose(n, (idle_ones - protected).__contains__, [])
        found = policy.evict(n, protected)
        assert (None if found is None else [each for each, _ in found]) == victims
        model.evicted(victims or [])
        for each in victims or ():
            del ref_cnts[each]
    elif block not in ref_cnts:
        ref_cnts[block] = chance.choice((0, 0, -1, 1))
        policy.insert(block, idle())
        policy.get(block).ref_cnt = ref_cnts[block]
        model.enter(block)
    elif step < 0.6:
        policy.remove(block)
        model.leave(block)
        del ref_cnts[block]
    else:
        ref_cnts[block] = policy.get(block).ref_cnt = chance.choice((0, 0, -1, 1))


def test_calls_in_any_order_do_what_the_model_does(twin: ModuleType, seed: int) -> None:
    for number in range(60):
        chance = random.Random(f"{seed} {number}")
        capacity = chance.randrange(9)
        policy, model = arc(twin, capacity), AdaptiveModel(capacity)
        ref_cnts: dict[bytes, int] = {}
        for _ in range(150):
            take_a_step(policy, model, ref_cnts, chance)
            assert lists(policy) == tuple(map(names, (model.t1, model.t2, model.b1, model.b2)))
            assert policy.target_t1_size == model.target
        check_invariants(policy)


def fill(policy: Any, t1: Iterable[bytes], t2: Iterable[bytes]) -> Any:
    """Insert blocks so that T1 and T2 hold these, least recent first."""
    second = list(t2)
    for block_id, block in enumerate([*second, *t1]):
        policy.insert(block, idle(block_id))
    policy.touch(list(reversed(second)))
    return policy


def test_many_blocks_leave_in_one_scan() -> None:
    looked_at = 0

    class Counting(frozenset[bytes]):
        def __contains__(self, block: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return super().__contains__(block)

    size = 400
    blocks = block_hashes(*range(size))
    policy = fill(arc(_python, size), blocks[: size // 2], blocks[size // 2 :])
    for pinned in blocks[:50]:
        policy.get(pinned).ref_cnt = 1
    assert len(policy._evict(size - 50, Counting())) == size - 50
    assert looked_at == size - 50


def test_the_capacity_is_the_number_of_free_blocks_at_construction(twin: ModuleType) -> None:
    backend = twin.CPUBackend(16, 5)
    backend.allocate_blocks([G, H])
    manager = twin.ARCOffloadingManager(backend)
    assert manager.cache_capacity == manager.policy.cache_capacity == 3
    store(manager, [A])
    assert manager.cache_capacity == 3
    assert twin.CPUOffloadingManager(16, 7, "arc").policy.cache_capacity == 7
