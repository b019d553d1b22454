"""Fixtures of the tests of tiers, which need the extensions."""

from __future__ import annotations

import pytest

from kvoffload import IMPLEMENTATION

if IMPLEMENTATION == "compiled":
    from kvoffload.testing.tiers import PATIENCE_S
    from kvoffload.tiers import Namespace
else:
    collect_ignore_glob = ["test_*.py"]

WAITS = (
    "engine.tier.QUERY_DEADLINE_S",
    "engine.tier.TRANSFER_DEADLINE_S",
    "local.slab.tier.FORGET_S",
    "local.slab.folder.READERS_S",
)
"""The seconds after which a call without a deadline gives up."""


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give calls without a deadline all the time that a busy machine needs.

    Servers hang in tests, and calls wait for them.
    """
    if IMPLEMENTATION == "compiled" and not request.node.get_closest_marker("servers"):
        for name in WAITS:
            monkeypatch.setattr(f"kvoffload.tiers.{name}", PATIENCE_S)


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(model="test", block_bytes=4096)
