"""Every tier against a dict, in orders of calls that hypothesis chooses."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.testing.tiers import FaultyTier, tier_machine
from kvoffload.tiers import DirectoryTier, FileTier, MemoryTier, Namespace, Tier

BLOCK = 4096
ROOMY, TIGHT = 64 * BLOCK, 10 * BLOCK


def check(open_tier: Callable[[], Tier]) -> None:
    run_state_machine_as_test(tier_machine(open_tier, BLOCK))


@pytest.mark.parametrize(
    ("capacity", "policy"), [(ROOMY, "lru"), (TIGHT, "lru"), (TIGHT, "hit-density")]
)
def test_memory(namespace: Namespace, capacity: int, policy: str) -> None:
    check(lambda: MemoryTier(capacity, policy, namespace=namespace))


@pytest.mark.parametrize("capacity", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("mode", ["direct", "copied", "stored"])
def test_slab(tmp_path: Path, namespace: Namespace, capacity: int, mode: str) -> None:
    options = {} if mode == "direct" else {"staged": True, "ack": mode, "staging_bytes": 8 * BLOCK}
    numbers, options = itertools.count(), {"namespace": namespace, "threads": 3, **options}
    check(lambda: FileTier(tmp_path / str(next(numbers)), capacity, **options))


def test_directory(tmp_path: Path, namespace: Namespace) -> None:
    numbers = itertools.count()
    options = {"threads": 2, "namespace": namespace, "ack": "stored"}  # what is copied may be late
    check(lambda: DirectoryTier(tmp_path / str(next(numbers)), ROOMY, **options))


@pytest.mark.parametrize("ack", ["copied", "stored"])
def test_faulty_tier_that_behaves(namespace: Namespace, ack: str) -> None:
    check(lambda: FaultyTier(ROOMY, namespace=namespace, ack=ack))
