"""The memory tier passes the suite of all tiers, in both implementations; and what it has
besides."""

import pytest

from kvoffload.tiers import MemoryTier, Namespace, Tier
from kvoffload.tiers.testing import FaultyTier, TierConformance
from kvoffload.tiers.twins import Twin


class TestMemoryTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _twin(self, tier_twin: Twin, namespace: Namespace) -> None:
        self.twin, self.namespace = tier_twin, namespace

    def open_tier(self, num_blocks: int) -> Tier:
        return MemoryTier(num_blocks * 4096, namespace=self.namespace, twin=self.twin)


class TestFaultyTierThatBehaves(TierConformance):
    """A staged tier passes it too."""

    @pytest.fixture(autouse=True, params=["copied", "stored"])
    def _ack(self, request: pytest.FixtureRequest, namespace: Namespace) -> None:
        self.ack, self.namespace = request.param, namespace

    def open_tier(self, num_blocks: int) -> Tier:
        return FaultyTier(num_blocks * 4096, namespace=self.namespace, ack=self.ack)


class TestSmallStaging(TierConformance):
    """Two buffers are enough for everything."""

    @pytest.fixture(autouse=True)
    def _namespace(self, namespace: Namespace) -> None:
        self.namespace = namespace

    def open_tier(self, num_blocks: int) -> Tier:
        return FaultyTier(num_blocks * 4096, namespace=self.namespace, staging_bytes=0)
