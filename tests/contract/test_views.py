"""The views of every policy: live, read-only, and what can be asked of them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, H, names
from tests.observation import attributes
from tests.policies.steps import idle, request

View = Any
NO_HASHES: tuple[Any, ...] = ([], {}, None, 5, "A", b"", bytearray(A), (A,))


@pytest.fixture(params=registry.names())
def policy(twin: ModuleType, request: pytest.FixtureRequest) -> Any:
    """Return a policy of capacity 4 that holds A, B, C and D, and ghosts where it has any."""
    policy = twin.policy_class(request.param)(4)
    for block_id, block in enumerate((H, A, B, C, D)):
        policy.insert(block, idle(block_id))
    assert policy.evict(1, [A, B, C, D]) is not None
    policy.touch([A, B])
    policy.touch([G])
    return policy


def views(policy: Any) -> list[tuple[str, View]]:
    """Return every view of a policy's blocks, with its name."""
    found = []
    for name in attributes(policy):
        value = getattr(policy, name)
        if name == "trial_hits":  # a copy, by the names of rules
            continue
        several = value if isinstance(value, tuple) else (value,)
        found += [(name, each) for each in several if isinstance(each, Mapping | AbstractSet)]
    return found


def mappings(policy: Any) -> list[Any]:
    return [view for _, view in views(policy) if isinstance(view, Mapping)]


def test_views_are_like_the_mappings_and_sets_of_what_they_hold(policy: Any) -> None:
    for (name, view), (_, same) in zip(views(policy), views(policy), strict=True):
        content = dict(view) if isinstance(view, Mapping) else list(view)
        assert view == view == same == (content if isinstance(view, Mapping) else set(view)), name
        assert (view == {b"other": None}) is False
        assert list(reversed(view)) == list(view)[::-1]
        assert weakref.ref(view)() is view
        assert copy.copy(view) == view
        assert repr(view) == f"{type(view).__name__}({content!r})"
        for no_hash in NO_HASHES:
            assert no_hash not in view
        with pytest.raises(TypeError, match="unhashable"):
            hash(view)
        with pytest.raises(TypeError, match="cannot pickle"):
            copy.deepcopy(view)
        for change in ("add", "clear", "__dict__"):
            assert not hasattr(view, change)
    for view in mappings(policy):
        for no_hash in NO_HASHES:
            assert (view.get(no_hash), view.get(no_hash, "absent")) == (None, "absent")
            with pytest.raises(KeyError):
                view[no_hash]
        with pytest.raises(TypeError):
            view[A] = idle(0)
        with pytest.raises(TypeError):
            del view[A]
    shown = [block for view in mappings(policy) for block in view]
    assert not views(policy) or sorted(names(shown)) == list("ABCD")


def test_a_status_is_the_same_object_while_it_is_held(policy: Any) -> None:
    held = policy.get(A)
    assert policy.get(A) is held
    assert policy.get(A) == held
    assert policy.get(A) != policy.get(B)
    for view in mappings(policy):
        if A in view:
            assert view[A] is view.get(A) is held
            assert dict(view.items())[A] is held
    policy.remove(A)
    policy.insert(A, idle(9))
    assert policy.get(A) is not held
    assert (held.block_id, policy.get(A).block_id) == (1, 9)


def test_a_status_that_nobody_holds_is_made_anew(policy: Any) -> None:
    policy.get(A).ref_cnt = 3
    died = weakref.ref(policy.get(A))
    assert policy.get(A).ref_cnt == 3
    held = [policy.get(A), policy.get(A)]
    assert held[0] is held[1]
    assert died() is None or died() is held[0]


def test_a_policy_can_be_referred_to_weakly_and_takes_no_attribute(policy: Any) -> None:
    reference = weakref.ref(policy)
    assert reference() is policy
    with pytest.raises(AttributeError, match="object has no attribute 'note'"):
        policy.note = "mine"
    assert not hasattr(policy, "__dict__")


@pytest.mark.parametrize("is_built_anew", [False, True])
def test_views_show_what_is_there_now(policy: Any, is_built_anew: bool) -> None:
    before = views(policy)
    policy.insert(E, idle(7))
    if before:
        assert any(E in view for _, view in before)
    policy.__init__(2) if is_built_anew else policy.clear()
    for _, view in before:
        assert (len(view), list(view), A in view) == (0, [], False)


def test_an_iteration_goes_over_what_was_there_when_it_began(policy: Any) -> None:
    for _, view in views(policy):
        expected = list(view)
        seen = []
        for block in view:
            seen.append(block)
            policy.touch([G, block])
            policy.clear()
            policy.insert(F, idle(3))
        assert seen == expected
        break


def test_items_and_values_pass_over_what_has_left_meanwhile(policy: Any) -> None:
    view = max(mappings(policy), key=len, default=None)
    if view is None:
        return
    expected = list(view)
    pairs = []
    for block, status in view.items():
        assert isinstance(status, BlockStatus)
        pairs.append(block)
        for left in expected[1:-1]:
            if policy.get(left) is not None:
                policy.remove(left)
    assert pairs == expected[:1] + expected[1:][-1:]
    statuses = iter(view.values())
    next(statuses)
    policy.clear()
    assert list(statuses) == []


def test_a_store_while_a_view_is_gone_through(twin: ModuleType) -> None:
    for name in registry.names():
        manager = twin.CPUOffloadingManager(16, 3, name)
        request(manager, [A, B, C])
        found = [view.items() for view in mappings(manager.policy)]
        for items in found:
            for _ in items:
                request(manager, [D, E])
        check_invariants(manager)
