"""Parts of one twin in a manager of the other: slower, and just the same."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvoffload.policies import registry
from tests.differential.pairs import Pair, Twins
from tests.differential.test_replays import replay
from tests.differential.workloads import GENERATED


@pytest.mark.parametrize("name", registry.names())
def test_a_policy_of_the_other_twin(twins: Twins, seed: int, name: str) -> None:
    other = dict(zip(twins, reversed(twins), strict=True))

    def build(twin: ModuleType) -> Any:
        policy = other[twin].policy_class(name)(20)
        return twin.CPUOffloadingManager(16, 20, policy, True)

    assert replay(Pair(twins, build), GENERATED["scans"](seed, 80))["evicted_blocks"] > 0


@pytest.mark.parametrize("manager", ["LRUOffloadingManager", "ARCOffloadingManager"])
def test_a_pool_of_the_other_twin(twins: Twins, seed: int, manager: str) -> None:
    other = dict(zip(twins, reversed(twins), strict=True))

    def build(twin: ModuleType) -> Any:
        return getattr(twin, manager)(other[twin].CPUBackend(16, 20), True)

    assert replay(Pair(twins, build), GENERATED["scans"](seed, 80))["evicted_blocks"] > 0
