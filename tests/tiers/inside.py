"""The insides of tiers that no caller can reach and some tests have to: all in one place."""

from collections.abc import Callable
from typing import Any

from kvoffload.tiers import Tier
from kvoffload.tiers.engine.jobs import PooledTier
from kvoffload.tiers.remote.tier import RemoteTier


def is_busy(tier: Tier) -> bool:
    """Return whether a thread of the tier has work: a job or a chore."""
    return tier.stats()["unsettled_jobs"] > 0


def set_clock(tier: PooledTier, clock: Callable[[], float]) -> None:
    """Have both breakers go by a clock."""
    for breaker in (tier._reads, tier._writes):
        breaker._clock = clock


def let_probe(tier: PooledTier) -> None:
    """Let the time pass that open breakers wait for."""
    for breaker in (tier._reads, tier._writes):
        breaker._retry_at = 0.0


def ask_anew(tier: RemoteTier) -> None:
    """Have the medium asked, whatever was found out before."""
    tier._verdicts.clear()


def doubt(tier: RemoteTier) -> None:
    """Have the next call ask for the epoch, as when it is no longer believed."""
    tier._store.recheck()


def epoch_of(tier: RemoteTier) -> int:
    """Return the epoch of the tier, 0 for none."""
    return tier._store.epoch


def medium_of(tier: RemoteTier) -> Any:
    """Return the tier's `RemoteStore`."""
    return tier._medium
