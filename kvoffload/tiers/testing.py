"""The former place of ``kvoffload.testing.tiers``."""

from kvoffload.testing.tiers import FaultyTier, TierConformance, tier_machine

__all__ = ["FaultyTier", "TierConformance", "tier_machine"]
