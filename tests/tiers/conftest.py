"""Fixtures of the tests of tiers: both implementations, namespaces, tiers in folders of their
own."""

import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvoffload.testing.tiers import PATIENCE_S
from kvoffload.tiers import Namespace
from kvoffload.tiers.engine.native import Twin

WAITS = (
    "engine.tier.QUERY_DEADLINE_S",
    "engine.tier.TRANSFER_DEADLINE_S",
    "tiered_store.TRANSFER_DEADLINE_S",
    "local.slab.tier.FORGET_S",
    "local.slab.folder.READERS_S",
)
"""The seconds after which a call without a deadline gives up."""


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give calls without a deadline all the time that a busy machine needs.

    Servers hang in tests, and calls wait for them.
    """
    if not request.node.get_closest_marker("servers"):
        for name in WAITS:
            monkeypatch.setattr(f"kvoffload.tiers.{name}", PATIENCE_S)


@pytest.fixture(autouse=True)
def _private() -> Iterator[None]:
    """Make files that others cannot write to: a slab with others is refused."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def tier_twin(twin: ModuleType) -> Twin:
    """Return one of the two implementations; a test that asks for it runs on both."""
    return twin_of(twin)


def twin_of(twin: ModuleType) -> Twin:
    """Return the parts of tiers that belong to ``tests._python`` or ``tests._compiled``."""
    if twin.__name__.endswith("_python"):
        return Twin.python(twin.CPUOffloadingManager)
    return Twin.compiled(twin.CPUOffloadingManager)


@pytest.fixture(scope="session")
def python_twin() -> Twin:
    """Return the implementation in Python alone."""
    return Twin.python(importlib.import_module("tests._python").CPUOffloadingManager)


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(model="test", block_bytes=4096)
