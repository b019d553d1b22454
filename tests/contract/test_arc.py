"""ARC, rule by rule; the notation is that of figure 4 of Megiddo & Modha (FAST'03)."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from tests import _python
from tests.blocks import A, B, C, D, E, F, G, H, block_hashes, names, store
from tests.policies.steps import evict, idle

pytestmark = pytest.mark.fast


def arc(twin: ModuleType, capacity: int, blocks: Iterable[bytes] = ()) -> Any:
    """Return a policy with `blocks` idle in T1, the first the least recent."""
    policy = twin.ARCCachePolicy(cache_capacity=capacity)
    for block_id, block in enumerate(blocks):
        policy.insert(block, idle(block_id))
    return policy


def lists(policy: Any) -> tuple[str, str, str, str]:
    """Return T1, T2, B1, B2, least recent first."""
    return names(policy.t1), names(policy.t2), names(policy.b1), names(policy.b2)


@pytest.mark.parametrize(
    ("ref_cnts", "touches", "t1", "t2"),
    [
        pytest.param({}, [[A, C]], "B", "CA", id="from T1 to T2, the last hash first"),
        pytest.param({A: -1}, [[A]], "BCA", "", id="a pending one stays, most recent"),
        pytest.param({A: -1}, [[A], [A, A]], "BCA", "", id="however often"),
        pytest.param({A: 2}, [[A]], "BC", "A", id="a pinned one is promoted"),
        pytest.param({}, [[C, B, A], [A]], "", "BCA", id="to the most recent end of T2"),
        pytest.param({}, [[A, B, A]], "C", "BA", id="a repetition is a second sight"),
    ],
)
def test_a_touch_of_a_resident_block(
    twin: ModuleType, ref_cnts: dict[bytes, int], touches: list[list[bytes]], t1: str, t2: str
) -> None:
    policy = arc(twin, 4, [A, B, C])
    for block, ref_cnt in ref_cnts.items():
        policy.get(block).ref_cnt = ref_cnt
    for touched in touches:
        policy.touch(touched)
    assert lists(policy) == (t1, t2, "", "")


def test_a_block_of_t2_that_is_pending_is_the_most_recent_too(twin: ModuleType) -> None:
    policy = arc(twin, 4, [A, B])
    policy.touch([A, B])
    policy.get(B).ref_cnt = -1
    policy.touch([B])
    assert lists(policy) == ("", "AB", "", "")


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


def test_a_ghost_hit_alone_brings_no_block_back_and_makes_its_ghost_the_newest(
    twin: ModuleType,
) -> None:
    policy = with_ghosts(twin, 8, [A, B], [C, D])
    policy.touch([A])
    policy.touch([C])
    assert lists(policy) == ("", "", "BA", "DC")
    assert (len(policy), policy.get(A), policy.get(C)) == (0, None, None)


def with_target(twin: ModuleType, capacity: int, target: int) -> Any:
    """Return an empty policy with the target and one ghost, H, in B1."""
    policy = with_ghosts(twin, capacity, [H], [])
    policy.touch([H] * target)
    assert policy.target_t1_size == float(target)
    return policy


def fill(policy: Any, t1: Iterable[bytes], t2: Iterable[bytes]) -> Any:
    """Insert blocks so that T1 and T2 hold these, least recent first."""
    second = list(t2)
    for block_id, block in enumerate([*second, *t1]):
        policy.insert(block, idle(block_id))
    policy.touch(list(reversed(second)))
    return policy


@pytest.mark.parametrize(
    ("target", "t1", "t2", "ref_cnts", "protected", "victims", "left"),
    [
        pytest.param(2, "ABC", "DE", {}, "", "ABDE", ("C", "", "HAB", "DE"), id="T1 at its target"),
        pytest.param(3, "AB", "CD", {}, "", "C", ("AB", "D", "H", "C"), id="T2 if T1 is below"),
        pytest.param(
            3, "ABC", "D", {A: -1}, "", "BD", ("AC", "", "HB", "D"), id="a pending one counts"
        ),
        pytest.param(
            3, "ABC", "D", {A: 1}, "", "BD", ("AC", "", "HB", "D"), id="a pinned one counts"
        ),
        pytest.param(
            1, "AB", "CD", {A: 1}, "B", "C", ("AB", "D", "H", "C"), id="T2 if none of T1 may"
        ),
        pytest.param(
            5, "AB", "C", {C: 1}, "", "AB", ("", "C", "HAB", ""), id="T1 if none of T2 may"
        ),
        pytest.param(5, "AB", "", {}, "", "A", ("B", "", "HA", ""), id="T1 if T2 is empty"),
        pytest.param(
            0, "ABC", "DE", {A: 1, D: 1}, "B", "CE", ("AB", "D", "HC", "E"), id="who stays, where"
        ),
    ],
)
def test_which_list_gives(
    twin: ModuleType,
    target: int,
    t1: str,
    t2: str,
    ref_cnts: dict[bytes, int],
    protected: str,
    victims: str,
    left: tuple[str, str, str, str],
) -> None:
    block_of = dict(zip("ABCDE", (A, B, C, D, E), strict=True))
    policy = fill(with_target(twin, 8, target), map(block_of.get, t1), map(block_of.get, t2))
    for block, ref_cnt in ref_cnts.items():
        policy.get(block).ref_cnt = ref_cnt
    assert evict(policy, len(victims), *map(block_of.get, protected)) == victims
    assert lists(policy) == left


def test_the_target_is_compared_as_an_integer(twin: ModuleType) -> None:
    policy = with_ghosts(twin, 8, [A, B], [C, D, E])
    policy.touch([A])
    assert policy.target_t1_size == 1.5
    fill(policy, [F], [G])
    assert evict(policy, 1) == "F"


def test_if_neither_gives_nothing_has_changed(twin: ModuleType) -> None:
    policy = fill(with_target(twin, 8, 1), [A, B], [C, D])
    policy.get(D).ref_cnt = -1
    assert evict(policy, 3, B) is None
    assert lists(policy) == ("AB", "CD", "H", "")
    assert policy.target_t1_size == 1.0
    assert [policy.get(block).block_id for block in (C, D, A, B)] == [0, 1, 2, 3]
    assert evict(policy, 2, B) == "AC"


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


def test_the_order_is_that_of_skipping_however_often_blocks_are_passed_over(
    twin: ModuleType,
) -> None:
    policy = fill(with_target(twin, 64, 1), [A, B, C, D], [E, F])
    for pinned in (A, C, E):
        policy.get(pinned).ref_cnt = 1
    assert evict(policy, 4) is None
    assert evict(policy, 1, B) == "D"
    for unpinned in (C, A):
        policy.get(unpinned).ref_cnt = 0
    policy.insert(G, idle(9))
    assert evict(policy, 3) == "ABC"
    assert (names(policy.t1), names(policy.t2)) == ("G", "EF")


def test_each_ghost_list_is_trimmed_to_the_capacity_oldest_first(twin: ModuleType) -> None:
    policy = arc(twin, 2, [A, B, C])
    assert evict(policy, 1) == "A"
    assert evict(policy, 2) == "BC"
    assert lists(policy) == ("", "", "BC", "")
    fill(policy, [], [D, E, F])
    assert evict(policy, 3) == "DEF"  # trimmed after it
    assert lists(policy) == ("", "", "BC", "EF")
    policy.insert(B, idle(0))
    policy.remove(B)
    assert lists(policy) == ("", "", "C", "EF")
    none = arc(twin, 0, [A])
    assert evict(none, 1) == "A"
    none.touch([A])
    assert (*lists(none), none.target_t1_size) == ("", "", "", "", 0.0)


def test_the_capacity_is_the_number_of_free_blocks_at_construction(twin: ModuleType) -> None:
    backend = twin.CPUBackend(16, 5)
    backend.allocate_blocks([G, H])
    manager = twin.ARCOffloadingManager(backend)
    assert manager.cache_capacity == manager.policy.cache_capacity == 3
    store(manager, [A])
    assert manager.cache_capacity == 3
    assert twin.CPUOffloadingManager(16, 7, "arc").policy.cache_capacity == 7
