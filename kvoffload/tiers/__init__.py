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
from .directory import DirectoryTier
from .memory import MemoryTier
from .mooncake import MooncakeTier
from .namespace import Namespace, weights_identity
from .objects import ObjectTier
from .redis import RedisTier
from .region import Region
from .seal import stored_key
from .slab import FileTier
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
    "open_tier",
    "stored_key",
    "weights_identity",
]
