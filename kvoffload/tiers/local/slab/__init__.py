"""Blocks in the slots of one large file on a local disk."""

from .inspect import SlabFolder, Verdict, find_slabs, remove_slab, verify_slab
from .tier import FileTier

__all__ = ["FileTier", "SlabFolder", "Verdict", "find_slabs", "remove_slab", "verify_slab"]
