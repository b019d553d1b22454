"""Tiers for blocks that left host memory: on disks, in other memory, on servers."""

from .base import (
    Done,
    Health,
    State,
    Status,
    Tier,
    TierError,
    TierEvent,
    TierInterruptedError,
    TierInUseError,
    TierSpaceError,
)
from .engine.contract import Block
from .local.memory import MemoryTier
from .local.slab import FileTier
from .namespace import Namespace, weights_identity
from .options import TierOptions, open_tier, read_options
from .region import Region
from .remote.directory import DirectoryTier
from .remote.objects import ObjectTier
from .remote.redis import RedisTier
from .remote.store import RemoteStore
from .remote.tier import RemoteTier
from .seal import stored_key
from .tiered_store import TieredStore

__all__ = [
    "Block",
    "DirectoryTier",
    "Done",
    "FileTier",
    "Health",
    "MemoryTier",
    "Namespace",
    "ObjectTier",
    "RedisTier",
    "Region",
    "RemoteStore",
    "RemoteTier",
    "State",
    "Status",
    "Tier",
    "TierError",
    "TierEvent",
    "TierInUseError",
    "TierInterruptedError",
    "TierOptions",
    "TierSpaceError",
    "TieredStore",
    "open_tier",
    "read_options",
    "stored_key",
    "weights_identity",
]
