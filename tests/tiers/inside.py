"""The insides of tiers that no caller can reach and some tests have to: all in one place."""

import math
from collections.abc import Callable
from dataclasses import replace
from threading import Condition
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
    tier._catalog.verdicts.clear()


def doubt(tier: RemoteTier) -> None:
    """Have the next call visit the medium, as some time later."""
    tier._shared._visited_at = -math.inf


def number_of(tier: ComposedTier) -> int:
    """Return the number of the tier's generation."""
    return tier._jobs.generation.number


def medium_of(tier: RemoteTier) -> Any:
    """Return the tier's `RemoteStore`."""
    return tier._shared.medium


def files_of(tier: FileTier) -> Any:
    """Return the files of a slab."""
    return tier._medium._files


def threads_of(tier: ComposedTier) -> Any:
    """Return the tier's threads."""
    return tier._jobs.pool


def num_taken(tier: ComposedTier) -> int:
    """Return the number of jobs that a thread works on, of the Python twin."""
    return sum(job.in_flight > 0 for job in threads_of(tier)._jobs.values())


def expire(tier: ComposedTier, *jobs: int) -> None:
    """Have the deadlines of jobs pass, of the Python twin."""
    pool = threads_of(tier)
    with pool._lock:
        for job in jobs:
            pool._jobs[job].deadline = 0.0
        pool._wake_at = 0.0
        pool._keep.notify_all()


def idle_of(tier: ComposedTier) -> Condition:
    """Return the condition on which callers wait for the tier's threads, of the Python twin."""
    idle: Condition = threads_of(tier)._idle
    return idle


def slots_of(tier: ComposedTier, keys: list[bytes]) -> list[int]:
    """Return the slots of keys that a local tier has."""
    return tier._catalog.slots_of(keys)


def limit_queue(tier: ComposedTier, nbytes: int) -> None:
    """Leave room for so many bytes in the queue."""
    tier._jobs.options = replace(tier._jobs.options, max_queued_bytes=nbytes)
