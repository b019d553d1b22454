"""The insides of tiers that no caller can reach and some tests have to: all in one place."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvoffload.tiers import FileTier, Tier
from kvoffload.tiers.engine.tier import ComposedTier
from kvoffload.tiers.remote.tier import RemoteTier


def is_busy(tier: Tier) -> bool:
    """Return whether a thread of the tier has work: a job or a chore."""
    return tier.stats()["unsettled_jobs"] > 0


def set_clock(tier: ComposedTier, clock: Callable[[], float]) -> None:
    """Have both breakers go by a clock."""
    for breaker in (tier._jobs.reads, tier._jobs.writes):
        breaker._clock = clock


def let_probe(tier: ComposedTier) -> None:
    """Let the time pass that open breakers wait for."""
    for breaker in (tier._jobs.reads, tier._jobs.writes):
        breaker._retry_at = 0.0


def ask_anew(tier: RemoteTier) -> None:
    """Have the medium asked, whatever was found out before."""
    tier._medium.verdicts.clear()


def doubt(tier: RemoteTier) -> None:
    """Have the next call visit the medium, as some time later."""
    tier._medium.store._visited_at = -math.inf


def number_of(tier: ComposedTier) -> int:
    """Return the number of the tier's generation."""
    return tier._jobs.generation.number


def medium_of(tier: RemoteTier) -> Any:
    """Return the tier's `RemoteStore`."""
    return tier._medium.store


def files_of(tier: FileTier) -> Any:
    """Return the files of a slab."""
    return tier._medium._files


def threads_of(tier: ComposedTier) -> Any:
    """Return the tier's threads."""
    return tier._jobs.pool


def slots_of(tier: ComposedTier, keys: list[bytes]) -> list[int]:
    """Return the slots of keys that a local tier has."""
    return tier._medium.slots_of(keys)


def limit_queue(tier: ComposedTier, nbytes: int) -> None:
    """Leave room for so many bytes in the queue."""
    tier._jobs.options = replace(tier._jobs.options, max_queued_bytes=nbytes)
