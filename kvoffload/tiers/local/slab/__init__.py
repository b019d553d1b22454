"""Blocks in the slots of one large file on a local disk."""

from .inspect import OLDER, SlabFolder, Verdict, delete_blocks, find_slabs, remove_slab, verify_slab
from .tier import FileTier, open_slab

__all__ = [
    "OLDER",
    "FileTier",
    "SlabFolder",
    "Verdict",
    "delete_blocks",
    "find_slabs",
    "open_slab",
    "remove_slab",
    "verify_slab",
]
