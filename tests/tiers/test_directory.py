"""The shared directory passes the suite of all tiers; and what several processes do to one."""

from pathlib import Path

import pytest
from hypothesis import settings

from kvoffload.testing.tiers import TierConformance, tier_machine
from kvoffload.tiers import Namespace, Tier
from kvoffload.tiers.remote.directory import DirectoryTier

BLOCK = 4096


class TestDirectoryTier(TierConformance):
    @pytest.fixture(
        autouse=True, params=[{}, {"ack": "stored", "threads": 1}, {"staging_bytes": 0}], ids=str
    )
    def _setup(self, request: pytest.FixtureRequest, tmp_path: Path, namespace: Namespace) -> None:
        self.options, self.path, self.namespace = request.param, tmp_path, namespace
        self.folders = 0

    def open_tier(self, num_blocks: int) -> Tier:
        self.folders += 1
        self.blocks = num_blocks
        return self.reopen_tier()

    def reopen_tier(self) -> Tier:
        return DirectoryTier(
            self.path / str(self.folders),
            self.blocks * BLOCK,
            namespace=self.namespace,
            **self.options,
        )

    def settle(self, tier: Tier) -> None:
        super().settle(tier)
        assert isinstance(tier, DirectoryTier)
        while tier.sweep() is None:  # the tier's own thread sweeps
            pass
        tier.poll()


def test_it_behaves_like_a_dict(tmp_path: Path, namespace: Namespace) -> None:
    numbers = iter(range(10**6))
    machine = tier_machine(
        lambda: DirectoryTier(
            tmp_path / str(next(numbers)),
            64 * BLOCK,
            threads=2,
            namespace=namespace,
            ack="stored",  # a copied block may not be readable yet
        ),
        BLOCK,
    )
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
    machine.TestCase().runTest()
