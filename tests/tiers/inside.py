"""The insides of tiers that no caller can reach and some tests have to: all in one place."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvoffload.testing.tiers import block_bytes_of
from kvoffload.tiers import DirectoryTier, FileTier, Region, Tier
from kvoffload.tiers.engine.tier import ComposedTier
from kvoffload.tiers.remote.tier import RemoteTier
from tests.waiting import wait_until


class Clock:
    """A clock that moves when it is told to."""

    now = 1000.0

    def time(self) -> float:
        return self.now


def attached(tier: Tier, num_blocks: int, keys: Sequence[bytes] = ()) -> Region:
    """Give a tier a region, whose first blocks have the bytes of keys."""
    region = Region.allocate(num_blocks, tier.namespace.block_bytes)
    tier.attach(region)
    for block_id, key in enumerate(keys):
        region.write(block_id, block_bytes_of(key, region.block_bytes))
    return region


def is_busy(tier: Tier) -> bool:
    """Return whether a thread of the tier has work: a job or a chore."""
    return tier.stats()["unsettled_jobs"] > 0


def settle(tier: Tier) -> None:
    """Wait until no thread of the tier has work; `poll` has the ends."""

    def rests() -> bool:
        tier.wait([], 0)
        return not is_busy(tier)

    wait_until(rests)


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def path_of(tier: DirectoryTier, key: bytes) -> Path:
    """Return where a block of a directory lies that is there."""
    (path,) = tier.folder.glob(f"{number_of(tier):016x}/??/{key.hex()}.kv")
    return path


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


def slots_of(tier: ComposedTier, keys: list[bytes]) -> list[int]:
    """Return the slots of keys that a local tier has."""
    return tier._medium.slots_of(keys)


def limit_queue(tier: ComposedTier, nbytes: int) -> None:
    """Leave room for so many bytes in the queue."""
    tier._jobs.options = replace(tier._jobs.options, max_queued_bytes=nbytes)
