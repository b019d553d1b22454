"""A policy belongs to its manager: no second one, no change from outside, free when it is gone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvoffload import PolicyError
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, once, slots, store
from tests.observation import observe
from tests.parts import ListBackend, ListPolicy, RebuiltListPolicy
from tests.policies.steps import idle

Change = Callable[[Any], Any]

CHANGES: dict[str, Change] = {
    "insert": lambda policy: policy.insert(F, idle(0)),
    "remove": lambda policy: policy.remove(A),
    "touch": lambda policy: policy.touch(once([B, A])),
    "release": lambda policy: policy.release([A]),
    "evict": lambda policy: policy.evict(1, ()),
    "make_room": lambda policy: policy.make_room([E, F], 0, set()),
    "clear": lambda policy: policy.clear(),
    "__init__": lambda policy: policy.__init__(9),
}
"""Every method that changes a policy, each with arguments that are legal on a policy alone."""


def filled(manager: Any) -> Any:
    """Store four blocks, one of them pinned, one pending."""
    store(manager, [A, B, C])
    manager.prepare_load([B])
    manager.prepare_store([D])
    return manager


def owners(twin: ModuleType) -> dict[str, Any]:
    """Return managers over built-in policies, built in every way."""
    by_name = {name: twin.CPUOffloadingManager(16, 5, name) for name in registry.names()}
    return {
        **by_name,
        "a class": twin.CPUOffloadingManager(16, 5, twin.LRUCachePolicy),
        "an instance": twin.CPUOffloadingManager(16, 5, twin.ARCCachePolicy(9)),
        "over the pool": twin.LRUOffloadingManager(twin.CPUBackend(16, 5)),
        "over a user's backend": twin.ARCOffloadingManager(ListBackend(16, 5)),
    }


@pytest.mark.parametrize("call", CHANGES)
def test_only_its_manager_changes_a_policy(twin: ModuleType, call: str) -> None:
    for how, manager in owners(twin).items():
        before = observe(filled(manager))
        with pytest.raises(PolicyError) as caught:
            CHANGES[call](manager.policy)
        text = f"{call}: the policy belongs to a manager, and only that manager may change it"
        assert str(caught.value) == text, how
        assert observe(manager) == before, how
        check_invariants(manager)
        manager.complete_store([D])
        manager.complete_load([B])
        assert manager.lookup([A, B, C, D]) == 4


def test_arguments_are_checked_before_whose_the_policy_is(twin: ModuleType) -> None:
    policy: Any = twin.CPUOffloadingManager(16, 4).policy
    for call in (
        lambda: policy.insert(5, idle(0)),
        lambda: policy.insert(A, 5),
        lambda: policy.remove(None),
        lambda: policy.touch([A, 5]),
        lambda: policy.evict("1", ()),
        lambda: policy.evict(1, [5]),
        lambda: policy.make_room([5], 0, ()),
        lambda: policy.make_room([A], "0", ()),
    ):
        with pytest.raises(TypeError):
            call()


def parts_of_a_user(twin: ModuleType) -> list[Any]:
    class Extended(twin.LRUCachePolicy):  # type: ignore[misc, name-defined]
        pass

    class Unhashable(ListPolicy):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    class WithoutWeakReferences(ListPolicy):
        __slots__ = ()

    return [ListPolicy(4), Unhashable(4), WithoutWeakReferences(4), Extended(4)]


def policies(twin: ModuleType) -> list[Any]:
    built_in = [twin.policy_class(name)(4) for name in registry.names()]
    return [*built_in, *parts_of_a_user(twin)]


def test_a_second_manager_over_a_policy_is_refused(twin: ModuleType) -> None:
    for policy in policies(twin):
        first = twin.CPUOffloadingManager(16, 4, policy)
        for _ in range(2):
            with pytest.raises(
                ValueError, match="cache_policy must not belong to another"
            ) as caught:
                twin.CPUOffloadingManager(16, 2, policy)
            assert type(policy).__name__ in str(caught.value)
            store(first, [A, B])
        assert slots(first.prepare_load([A, B])) == [0, 1]
        check_invariants(first)


def test_the_policy_of_a_manager_over_a_backend_is_its_own_too(twin: ModuleType) -> None:
    manager = twin.LRUOffloadingManager(twin.CPUBackend(16, 4))
    with pytest.raises(ValueError, match="cache_policy must not belong to another"):
        twin.CPUOffloadingManager(16, 4, manager.policy)
    store(manager, [A])
    assert manager.lookup([A]) == 1


def test_a_policy_is_free_again_when_its_manager_is_gone(twin: ModuleType) -> None:
    for policy in policies(twin):
        for _ in range(3):
            manager = twin.CPUOffloadingManager(16, 4, policy)
            store(manager, [A, B])
            assert slots(manager.prepare_load([B, A])) == [1, 0]
            del manager
            policy.touch([A])
            policy.clear()
        policy.insert(A, idle(7))
        assert policy.get(A).block_id == 7


def test_a_policy_is_free_again_when_a_cycle_with_its_manager_is_collected(
    twin: ModuleType,
) -> None:
    class Linked(twin.CPUOffloadingManager):  # type: ignore[misc, name-defined]
        pass

    every = policies(twin)
    for policy in every:
        manager = Linked(16, 4, policy, True)
        manager.myself = manager
        store(manager, [A])
        manager.events[0].block_hashes.append(manager)
        del manager
    gc.collect()
    for policy in every:
        policy.clear()
        twin.CPUOffloadingManager(16, 4, policy)


def test_a_construction_that_fails_takes_no_policy(twin: ModuleType) -> None:
    for policy in policies(twin):
        with pytest.raises(ValueError, match="num_blocks"):
            twin.CPUOffloadingManager(16, -1, policy)
        policy.insert(A, idle(0))
        with pytest.raises(ValueError, match="cache_policy must be empty"):
            twin.CPUOffloadingManager(16, 4, policy)
        policy.remove(A)
        twin.CPUOffloadingManager(16, 4, policy)


def test_a_users_policy_answers_for_itself(twin: ModuleType) -> None:
    for policy in parts_of_a_user(twin):
        manager = twin.CPUOffloadingManager(16, 4, policy)
        store(manager, [A])
        policy.touch([A])
        policy.insert(B, idle(3))
        policy.remove(B)
        assert manager.lookup([A]) == 1


def test_the_policy_that_a_reset_builds_is_owned_and_the_old_one_free(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 4, RebuiltListPolicy)
    first = manager.policy
    store(manager, [A])
    manager.reset_cache()
    with pytest.raises(ValueError, match="must not belong to another"):
        twin.CPUOffloadingManager(16, 4, manager.policy)
    first.remove(A)
    twin.CPUOffloadingManager(16, 4, first)


def test_a_reset_that_is_given_anothers_policy_changes_nothing(twin: ModuleType) -> None:
    shared: list[Any] = []

    class Repeated(RebuiltListPolicy):
        def __new__(cls, cache_capacity: int) -> Any:
            return shared[0] if shared else super().__new__(cls)

    manager = twin.CPUOffloadingManager(16, 4, Repeated)
    store(manager, [A, B])
    shared.append(Repeated(4))
    other = twin.CPUOffloadingManager(16, 4, shared[0])
    before = observe(manager)
    with pytest.raises(ValueError, match="must not belong to another"):
        manager.reset_cache()
    assert observe(manager) == before
    assert manager.lookup([A, B]) == 2
    assert len(other) == 0


@pytest.mark.parametrize("name", registry.names())
def test_a_policy_without_its_manager_reads_ref_cnt_at_the_call(
    twin: ModuleType, name: str
) -> None:
    manager = twin.CPUOffloadingManager(16, 5, name)
    store(manager, [A, B, C, D])
    manager.prepare_load([A, B, C, D])
    declines = registry.entry(name).learns_by_request
    assert manager.prepare_store([E, F]) is None or declines  # it has passed over all
    manager.complete_load([C])
    policy = manager.policy
    del manager
    check_invariants(policy)
    assert policy.evict(2, ()) is None
    policy.get(A).ref_cnt = 0
    policy.get(C).ref_cnt = 2
    assert policy.evict(2, ()) is None or policy.get(E) is not None
    policy.get(C).ref_cnt = 0
    check_invariants(policy)
    assert {block for block, _ in policy.evict(2, [E, F])} == {A, C}
    check_invariants(policy)
    assert policy.get(B).ref_cnt == policy.get(D).ref_cnt == 1
