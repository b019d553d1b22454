"""Managers to run the contract on: built-in and user parts, by one builder a kind."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.parts import KeepingListPolicy, ListBackend, ListPolicy, RebuiltListPolicy

Build = Callable[..., Any]
USER_POLICIES = {
    "user-policy": ListPolicy,
    "user-keeping-policy": KeepingListPolicy,
    "user-rebuilt-policy": RebuiltListPolicy,
}


def build_manager(
    twin: ModuleType,
    kind: str,
    num_blocks: int,
    block_size: int = 16,
    enable_events: bool = False,
) -> Any:
    """Return an empty manager of `kind` with room for `num_blocks` blocks."""
    if kind.startswith("cpu-"):
        name = kind.removeprefix("cpu-")
        return twin.CPUOffloadingManager(block_size, num_blocks, name, enable_events)
    if kind in USER_POLICIES:
        return twin.CPUOffloadingManager(block_size, num_blocks, USER_POLICIES[kind], enable_events)
    policy_name, _, where = kind.partition("-over-")
    backend = {"cpu-backend": twin.CPUBackend, "user-backend": ListBackend}[where]
    manager = {"lru": twin.LRUOffloadingManager, "arc": twin.ARCOffloadingManager}[policy_name]
    return manager(backend(block_size, num_blocks), enable_events)


RECENCY_KINDS = (
    "cpu-lru",
    "lru-over-cpu-backend",
    "lru-over-user-backend",
    "user-policy",
    "user-keeping-policy",
)
"""Managers that evict the least recently used block."""

ARC_KINDS = ("cpu-arc", "arc-over-cpu-backend", "arc-over-user-backend")
KINDS = RECENCY_KINDS + ARC_KINDS
"""Every manager with every policy and pool, which ``test_machine`` drives."""

DISTINCT_KINDS = ("cpu-lru", "arc-over-user-backend", "user-keeping-policy")
"""One of each: a manager, a policy, a pool, built in or a user's."""


def builder(twin: ModuleType, kind: str) -> Build:
    """Return `build_manager` for one twin and kind."""

    def build(num_blocks: int, block_size: int = 16, enable_events: bool = False) -> Any:
        return build_manager(twin, kind, num_blocks, block_size, enable_events)

    return build


@pytest.fixture(params=DISTINCT_KINDS)
def build(twin: ModuleType, request: pytest.FixtureRequest) -> Build:
    """Build a manager of any distinct kind."""
    return builder(twin, request.param)


@pytest.fixture(params=("cpu-lru", "arc-over-cpu-backend", "user-keeping-policy"))
def build_pooled(twin: ModuleType, request: pytest.FixtureRequest) -> Build:
    """Build a manager that takes its slots from the built-in pool."""
    return builder(twin, request.param)
