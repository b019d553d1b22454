"""A disk behind host memory: its additional hits, and what is written to it.

Every block that is stored in host memory is offered to the disk too, whose own policy decides, as
vLLM cascades stores to its secondary tiers. A request is served up to the first
block that neither has; blocks that came from the disk are offered to host memory as all blocks are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, OffloadingManager

from .decoded import DecodedTrace
from .policies import new_manager

__all__ = ["TierCounts", "simulate_tiers"]


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of host memory with a disk behind it.

    Attributes
    ----------
    asked : int
        Blocks that the two were asked for.
    host_hits, disk_hits : int
        Blocks of those that came from host memory, and from the disk.
    host_stored, disk_stored : int
        Blocks written to each.
    """

    asked: int
    host_hits: int
    disk_hits: int
    host_stored: int
    disk_stored: int

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked for that came from either; 0 if there are none."""
        return (self.host_hits + self.disk_hits) / self.asked if self.asked else 0.0


def simulate_tiers(
    trace: DecodedTrace,
    keys: list[BlockHash],
    *,
    policy: str,
    capacity: int,
    disk_policy: str,
    disk_capacity: int,
    device_hits: npt.NDArray[np.int64],
) -> TierCounts:
    """Replay a decoded trace through host memory and a disk; loads and stores complete at once.

    Parameters
    ----------
    trace, keys, device_hits
        As in `simulate`.
    policy, disk_policy : str
        Policy strings, no ceilings.
    capacity, disk_capacity : int
        Blocks of host memory and of the disk.
    """
    host, disk = new_manager(policy, capacity), new_manager(disk_policy, disk_capacity)
    key_of = keys.__getitem__
    asked = host_hits = disk_hits = 0
    for row, on_device in zip(trace.rows(), device_hits.tolist(), strict=True):
        request = list(map(key_of, row))
        missing = request[on_device:]
        asked += len(missing)
        for manager in (host, disk):
            manager.touch(request)
        reached = 0
        while reached < len(missing):
            in_host = _load(host, missing[reached:])
            on_disk = _load(disk, missing[reached + in_host :])
            if not in_host + on_disk:
                break
            host_hits += in_host
            disk_hits += on_disk
            reached += in_host + on_disk
        in_host_now = _offer(host, request)
        on_disk_now = _offer(disk, in_host_now)
        for manager, stored in ((host, in_host_now), (disk, on_disk_now)):
            manager.touch(request)
            manager.complete_store(stored)
    return TierCounts(
        asked,
        host_hits,
        disk_hits,
        host.stats()["stored_blocks"],
        disk.stats()["stored_blocks"],
    )


def _load(manager: OffloadingManager, blocks: list[BlockHash]) -> int:
    """Load the leading blocks that a tier has; return their number."""
    found = manager.lookup(blocks)
    if found:
        manager.prepare_load(blocks[:found])
        manager.complete_load(blocks[:found])
    return found


def _offer(manager: OffloadingManager, blocks: list[BlockHash]) -> list[BlockHash]:
    """Offer blocks to a tier; return those that it is storing."""
    output = manager.prepare_store(blocks)
    return [] if output is None else output.block_hashes_to_store
