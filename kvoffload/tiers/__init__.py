"""Keep and move the bytes of blocks that left host memory: on disks, in memory, on servers."""

from .address import open_tier
from .base import (
    Done,
    Health,
    State,
    Status,
    Tier,
    TierError,
    TierEvent,
    TierInUseError,
    TierSpaceError,
)
from .engine.native import Twin
from .local.memory import MemoryTier
from .local.slab import FileTier
from .namespace import Namespace, weights_identity
from .region import Region
from .remote.directory import DirectoryTier
from .remote.mooncake import MooncakeTier
from .remote.objects import ObjectTier
from .remote.redis import RedisTier
from .seal import stored_key
from .tiered_store import Fetched, TieredStore

__all__ = [
    "DirectoryTier",
    "Done",
    "Fetched",
    "FileTier",
    "Health",
    "MemoryTier",
    "MooncakeTier",
    "Namespace",
    "ObjectTier",
    "RedisTier",
    "Region",
    "State",
    "Status",
    "Tier",
    "TierError",
    "TierEvent",
    "TierInUseError",
    "TierSpaceError",
    "TieredStore",
    "Twin",
    "open_tier",
    "stored_key",
    "weights_identity",
]
