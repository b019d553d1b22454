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
    TierInterruptedError,
    TierInUseError,
    TierSpaceError,
)
from .engine.contract import Block
from .engine.native import Twin
from .epoch import epoch_text, parse_epoch
from .local.memory import MemoryTier
from .local.slab import FileTier
from .namespace import Namespace, weights_identity
from .options import TierOptions, read_options
from .region import Region
from .remote.directory import DirectoryTier
from .remote.mooncake import MooncakeTier
from .remote.objects import ObjectTier
from .remote.redis import RedisTier
from .remote.store import OtherEpochError, RemoteStore
from .remote.tier import RemoteTier
from .seal import stored_key
from .tiered_store import Fetched, TieredRequest, TieredStore

__all__ = [
    "Block",
    "DirectoryTier",
    "Done",
    "Fetched",
    "FileTier",
    "Health",
    "MemoryTier",
    "MooncakeTier",
    "Namespace",
    "ObjectTier",
    "OtherEpochError",
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
    "TieredRequest",
    "TieredStore",
    "Twin",
    "epoch_text",
    "open_tier",
    "parse_epoch",
    "read_options",
    "stored_key",
    "weights_identity",
]
