"""Every tier against a dict, in orders of calls that hypothesis chooses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.testing.tiers import FaultyTier, tier_machine
from kvoffload.tiers import FileTier, MemoryTier, Namespace, Tier

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
    made = 0

    def open_tier() -> Tier:
        nonlocal made
        made += 1
        folder = tmp_path / str(made)
        return FileTier(folder, capacity, namespace=namespace, threads=3, **options)

    check(open_tier)


@pytest.mark.parametrize("ack", ["copied", "stored"])
def test_faulty_tier_that_behaves(namespace: Namespace, ack: str) -> None:
    check(lambda: FaultyTier(ROOMY, namespace=namespace, ack=ack))
