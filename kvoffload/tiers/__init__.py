"""Keep and move the bytes of blocks that left host memory: on disks, in memory, on servers."""

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
from .memory import MemoryTier
from .namespace import Namespace, weights_identity
from .opening import open_tier
from .region import Region
from .seal import stored_key
from .slab import FileTier

__all__ = [
    "Done",
    "FileTier",
    "Health",
    "MemoryTier",
    "Namespace",
    "Region",
    "State",
    "Status",
    "Tier",
    "TierError",
    "TierEvent",
    "TierInUseError",
    "TierSpaceError",
    "open_tier",
    "stored_key",
    "weights_identity",
]
