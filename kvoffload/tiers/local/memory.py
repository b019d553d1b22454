"""Blocks in a second region of memory: another NUMA node, CXL, or the reference for other tiers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload import CachePolicy
from kvoffload._sizes import check_size, parse_size
from kvoffload.errors import describe
from kvoffload.tiers.engine.jobs import Jobs
from kvoffload.tiers.engine.tier import ComposedTier, check_region
from kvoffload.tiers.namespace import Namespace, check_namespace
from kvoffload.tiers.native import io
from kvoffload.tiers.options import LOCAL, Readers, TierKeywords, TierOptions, read_options
from kvoffload.tiers.region import Region

from .index import Index, check_num_slots

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MemoryTier(ComposedTier):
    """A tier in a second region of memory.

    Parameters
    ----------
    capacity_bytes : int or str
        Most bytes of blocks; a remainder smaller than a block is not used.
    policy : str, type or CachePolicy
        The policy that decides which blocks stay, as ``cache_policy`` of `CPUOffloadingManager`.
    namespace : Namespace
        The namespace of the bytes; its ``block_bytes`` is the size of a block.
    memory : Region, optional
        The second region, with blocks of the same size; by default it is allocated.
    **keywords
        The options of `TierOptions`, whose sizes may be text; by default ``threads=2`` and
        ``name="memory"``. The tier is direct, so ``staging_bytes`` and ``ack`` have no effect.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    MemoryError
        If there is not enough memory.

    Notes
    -----
    Its blocks do not outlive it, so `forget` is certain at once.
    """

    def __init__(
        self,
        capacity_bytes: int | str,
        policy: str | type[CachePolicy] | CachePolicy = "lru",
        *,
        namespace: Namespace,
        memory: Region | None = None,
        **keywords: Unpack[TierKeywords],
    ) -> None:
        block_bytes = check_namespace(namespace).block_bytes
        capacity_bytes = check_size("capacity_bytes", capacity_bytes, block_bytes)
        num_slots = check_num_slots(capacity_bytes, block_bytes)
        options = TierOptions.of(keywords, name="memory", threads=2)
        if memory is not None:
            check_region("memory", memory, block_bytes)
            num_slots = min(num_slots, memory.num_blocks)
        self.num_slots = num_slots
        medium = _SecondRegion(Jobs(options, block_bytes), namespace, policy, num_slots)
        medium.memory = Region.allocate(num_slots, block_bytes) if memory is None else memory
        super().__init__(medium, num_slots * block_bytes)


class _SecondRegion(Index):
    """The slots of a second region of memory."""

    direct = True
    memory: Region

    def open_pool(self, region: Region) -> Any:
        # Bytes of another object do not match: this one's salt seeds the sums.
        fingerprint = self.namespace.fingerprint + os.urandom(8)
        sums = np.zeros(self.memory.num_blocks, np.uint64)
        store = io.MemoryStore(self.memory, fingerprint, sums)
        return io.Pool(region, store, self.jobs.options.threads)


_READERS: Readers = {"capacity": ("capacity_bytes", parse_size), "policy": ("policy", str), **LOCAL}


def open_memory(place: str, namespace: Namespace, /, **options: str) -> MemoryTier:
    """Open ``memory:?capacity=64GiB``; see `kvoffload.tiers.open_tier`."""
    if place:
        raise ValueError(f"memory must have no place, got {describe(place)}")
    return MemoryTier(namespace=namespace, **read_options(options, _READERS))
