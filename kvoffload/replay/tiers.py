"""A disk behind host memory: its additional hits, and the blocks written to it.

Every block stored in host memory is also offered to the disk, whose own policy decides, as vLLM
cascades stores to its secondary tiers. A request is served up to the first block that neither has.
A block from the disk needs a slot of host memory, and is resident there afterwards; without a slot
it is a miss. So host memory declines nothing, regardless of its policy: otherwise the disk would
receive no blocks and could not be read.

A request is one use of its blocks in both, before it reads; when its stores have begun, its blocks
become the most recent of both again, last block first. Host memory receives the clients' hints at
once, the disk when a request ends.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, OffloadingManager

from .hints import Told
from .policies import new_manager
from .requests import DecodedTrace

__all__ = ["TierCounts", "simulate_tiers"]


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of host memory with a disk behind it.

    Attributes
    ----------
    asked : int
        Blocks that the two tiers were asked for.
    host_hits, disk_hits : int
        Blocks of those that came from host memory, and from the disk.
    host_stored, disk_stored : int
        Blocks written to each; those from the disk count for host memory, too.
    """

    asked: int
    host_hits: int
    disk_hits: int
    host_stored: int
    disk_stored: int

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked for that came from either; 0 if none were asked for."""
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
    pending: int = 0,
    step_blocks: int | None = None,
) -> TierCounts:
    """Replay a decoded trace through host memory and a disk; reads complete at once.

    Parameters
    ----------
    trace, keys, device_hits
        As in `simulate`.
    policy, disk_policy : str
        Policy strings, not ceilings.
    capacity, disk_capacity : int
        Blocks of host memory and of the disk.
    pending : int
        Number of the latest stores that are in flight while a request is served; an offer that
        stores nothing does not count. The disk is offered a store's blocks when it completes.
    step_blocks : int, optional
        Blocks that are offered to host memory at a time, as an engine offers those of a scheduler
        step; a read without enough slots then takes as many blocks as fit. By default all blocks of
        a request, as in a fleet.

    Returns
    -------
    TierCounts
    """
    host, disk = new_manager(policy, capacity), new_manager(disk_policy, disk_capacity)
    host.policy._set_declining(False)
    rows = trace.hashes(np.array(keys, dtype=object), slice(0, trace.num_requests))
    told: Iterator[Told | None] = itertools.repeat(None, trace.num_requests)
    if trace.hints is not None:
        told = trace.hints.of_each()
    in_flight: deque[list[BlockHash]] = deque()
    asked = host_hits = disk_hits = 0
    for request, on_device, said in zip(rows, device_hits.tolist(), told, strict=True):
        missing = request[on_device:]
        asked += len(missing)
        if said is None:
            served = host.begin(request)
        else:
            served = host.begin(request, hints=said.at_begin, now=said.now_s)
        behind = disk.begin(request)
        from_host, from_disk = _read(host, disk, missing, in_parts=step_blocks is not None)
        host_hits += from_host
        disk_hits += from_disk
        step = step_blocks or max(1, len(request))
        for start in range(0, len(request), step):
            stored = _offer(host, request[start : start + step])
            if stored:
                in_flight.append(stored)
        served.finish(hints=None if said is None else said.at_finish)
        ended = [in_flight.popleft() for _ in range(len(in_flight) - pending)]
        to_disk = []
        for stored in ended:
            host.complete_store(stored)
            to_disk += _offer(disk, stored)
        behind.finish(hints=None if said is None else said.at_finish)
        disk.complete_store(to_disk)
    return TierCounts(
        asked, host_hits, disk_hits, host.stats()["stored_blocks"], disk.stats()["stored_blocks"]
    )


def _read(
    host: OffloadingManager, disk: OffloadingManager, blocks: list[BlockHash], *, in_parts: bool
) -> tuple[int, int]:
    """Read the leading blocks that either has; return the number from each.

    The disk's blocks are offered to host memory: a block already in host memory comes from there,
    and one without a slot ends the read. With `in_parts` a refused offer is repeated with its first
    half.
    """
    pinned: list[BlockHash] = []
    from_host = from_disk = 0
    while True:
        rest = blocks[len(pinned) :]
        here = rest[: host.lookup(rest)]
        host.prepare_load(here)  # or they could be evicted to make room
        pinned += here
        from_host += len(here)
        rest = rest[len(here) :]
        on_disk = offered = rest[: disk.lookup(rest)]
        promoted = _offer(host, offered)
        while in_parts and offered and not promoted:
            offered = offered[: len(offered) // 2]
            promoted = _offer(host, offered)
        host.complete_store(promoted)
        came = on_disk[: host.lookup(on_disk)]
        host.prepare_load(came)
        pinned += came
        new = len(set(came).intersection(promoted))
        from_disk += new
        from_host += len(came) - new
        if not on_disk or len(came) < len(on_disk):
            break
    host.complete_load(pinned)
    return from_host, from_disk


def _offer(manager: OffloadingManager, blocks: list[BlockHash]) -> list[BlockHash]:
    """Offer blocks to a tier; return those being stored."""
    output = manager.prepare_store(blocks)
    return [] if output is None else output.block_hashes_to_store
