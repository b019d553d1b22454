"""Every policy of the table beyond the contract: texts of errors, and what a caller keeps.

The contract itself is held by `kvoffload.testing.policies`, in `test_conformance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockNotFoundError, CachePolicy
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E
from tests.observation import observe
from tests.policies.steps import idle

pytestmark = pytest.mark.fast

NO_BATCH = r"must be an iterable .*: wrap it in a list"

# method, arguments, error and a part of its text
MISTAKES: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("insert", (B, idle(7)), ValueError, f"insert: .*{B.hex()}"),
    ("remove", (D,), BlockNotFoundError, f"remove: .*{D.hex()}"),
    ("evict", (-1, ()), ValueError, "n must be >= 0, got -1"),
    ("evict", (-(2**70), ()), ValueError, "n must be >= 0, got"),
    *(("evict", (n, ()), TypeError, "n must be an integer") for n in (True, 1.0, "1", None)),
    *(
        (method, arguments, error, text)
        for bad, error, text in (
            *((bad, TypeError, "must be bytes") for bad in (5, "x", bytearray(b"x"), None)),
            (b"", ValueError, "empty"),
        )
        for method, arguments in (
            ("get", (bad,)),
            ("insert", (bad, idle(9))),
            ("remove", (bad,)),
            ("touch", ([A, bad],)),
            ("evict", (1, [A, bad])),
        )
    ),
    *(("insert", (D, status), TypeError, "BlockStatus") for status in (None, 5, (0, 1))),
    ("touch", (A,), TypeError, f"hashes {NO_BATCH}"),
    ("evict", (1, A), TypeError, f"protected {NO_BATCH}"),
    ("make_room", (D, 1, ()), TypeError, f"hashes {NO_BATCH}"),
    *(("make_room", (bad, 1, ()), TypeError, "hashes") for bad in (5, None, [5], [D, None])),
    ("make_room", ([D, b""], 1, ()), ValueError, r"hashes\[1\] must not be empty"),
    ("make_room", ([D], 1.5, ()), TypeError, "num_free must be an integer"),
    ("make_room", ([D], -1, ()), ValueError, "num_free must be >= 0, got -1"),
]


@pytest.fixture(params=registry.names())
def policy_class(twin: ModuleType, request: pytest.FixtureRequest) -> Any:
    return twin.policy_class(request.param)


def filled(policy_class: Any) -> Any:
    """Return a policy of capacity 4 that holds A, B, C, idle in slots 0, 1, 2."""
    policy = policy_class(cache_capacity=4)
    for block_id, block in enumerate((A, B, C)):
        policy.insert(block, idle(block_id))
    return policy


@pytest.fixture
def policy(policy_class: Any) -> Any:
    return filled(policy_class)


def test_a_mistake_is_named_and_changes_nothing(policy: Any) -> None:
    before = observe(policy)
    for method, arguments, error, text in MISTAKES:
        with pytest.raises(error, match=text):
            getattr(policy, method)(*arguments)
        assert observe(policy) == before, (method, arguments)
    check_invariants(policy)


def test_a_policy_is_a_cache_policy_and_its_capacity_stays(policy_class: Any) -> None:
    policy = policy_class(4)
    assert isinstance(policy, CachePolicy)
    with pytest.raises(AttributeError):
        policy.cache_capacity = 5
    for wrong in (-1, 2**31, 2**70, True, 1.5, "4", None):
        with pytest.raises((TypeError, ValueError), match=r"^cache_capacity must be"):
            policy_class(wrong)


def test_the_object_passed_in_is_not_used_again(policy_class: Any) -> None:
    policy = policy_class(4)
    given = idle(5)
    policy.insert(A, given)
    given.ref_cnt, given.block_id = 9, 99
    assert (policy.get(A).ref_cnt, policy.get(A).block_id) == (0, 5)
    ((_, status),) = policy.evict(1, ())
    assert status.block_id == 5


@pytest.mark.parametrize("others", [[], [5, None], [b"", b"x" * 5000]])
def test_make_room_keeps_to_the_hashes_that_it_was_given(policy: Any, others: list[Any]) -> None:
    hashes = [D, E]

    def protected() -> Iterator[bytes]:
        hashes[:] = others
        yield A

    number, victims = policy.make_room(hashes, 1, protected())
    assert 1 <= number <= 2
    assert len(victims) == number - 1
    assert A not in dict(victims)
    check_invariants(policy)
