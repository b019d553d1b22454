"""Names, signatures and docstrings of the twins are the same; neither gives itself away."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvoffload.policies import registry
from tests.differential.pairs import Twins

pytestmark = pytest.mark.fast

CLASSES = (
    "LRUCachePolicy",
    "ARCCachePolicy",
    "CPUBackend",
    "CPUOffloadingManager",
    "LRUOffloadingManager",
    "ARCOffloadingManager",
)
POLICIES = tuple(f"policy {name}" for name in registry.names())
SPECIAL = ("__init__", "__len__", "__contains__", "__bool__")


@pytest.fixture(params=CLASSES + POLICIES)
def pair(twins: Twins, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return the same class from both twins."""
    kind, _, name = request.param.partition(" ")
    python, compiled = (twin.policy_class(name) if name else getattr(twin, kind) for twin in twins)
    return python, compiled


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Return names, kinds and defaults of the parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def test_the_classes_offer_the_same_names_and_are_called_alike(pair: tuple[Any, Any]) -> None:
    assert public(pair[0]) == public(pair[1])
    for name in SPECIAL:
        assert hasattr(pair[0], name) == hasattr(pair[1], name)
    assert shape(pair[0]) == shape(pair[1])


def test_the_members_are_called_alike_and_have_the_same_docstrings(pair: tuple[Any, Any]) -> None:
    python, compiled = pair
    assert inspect.getdoc(python) == inspect.getdoc(compiled)
    for name in sorted(public(python)):
        is_method = callable(getattr(python, name))
        assert is_method == callable(getattr(compiled, name)), name
        if is_method:
            assert shape(getattr(python, name)) == shape(getattr(compiled, name)), name
        text = inspect.getdoc(getattr(python, name))
        if name != "cache_capacity" or text:
            assert text, name
        assert text == inspect.getdoc(getattr(compiled, name)), name


def test_the_names_in_tracebacks_and_reprs_are_sensible(pair: tuple[Any, Any]) -> None:
    python, compiled = pair
    for cls in pair:
        assert cls.__module__.startswith("kvoffload")
        assert cls.__qualname__ == cls.__name__
    assert python.__name__ == compiled.__name__


def test_objects_are_compared_and_hashed_by_identity(twins: Twins) -> None:
    for twin in twins:
        for thing, other in (
            (twin.CPUOffloadingManager(16, 2), twin.CPUOffloadingManager(16, 2)),
            (twin.ARCCachePolicy(2), twin.ARCCachePolicy(2)),
            (twin.CPUBackend(16, 2), twin.CPUBackend(16, 2)),
        ):
            assert thing != other
            assert len({thing: 1, other: 2}) == 2
