"""The built-in policies: their table, and their classes in the chosen implementation.

To add a policy, add its entry to the table, in the order of the documentation, and its class to the
imports for type checkers, which cannot read the table. Everything else is derived from the entry:
the names that `kvoffload` exports, configuration, commands, documentation, tests.
"""

from typing import TYPE_CHECKING

from .entries import Entry as _Entry
from .entries import Option as _Option

if TYPE_CHECKING:
    from ._hit_density_py import HitDensityCachePolicy as HitDensityCachePolicy
    from ._lists_py import ARCCachePolicy as ARCCachePolicy
    from ._lists_py import ARCClassicCachePolicy as ARCClassicCachePolicy
    from ._lists_py import LFUCachePolicy as LFUCachePolicy
    from ._lists_py import LRUCachePolicy as LRUCachePolicy
    from ._lists_py import SLRUCachePolicy as SLRUCachePolicy
    from ._queue_py import S3FIFOCachePolicy as S3FIFOCachePolicy
    from ._queue_py import SieveCachePolicy as SieveCachePolicy

_ENTRIES = (
    _Entry(
        "lru",
        "LRUCachePolicy",
        "least recently used leaves first",
        simplicity=1,
        explained_by="One order of the resident blocks.",
        stem="lists",
        vllm="lru",
    ),
    _Entry(
        "arc",
        "ARCCachePolicy",
        "oldest first of the blocks seen once or again; their shares adapt, as in vLLM",
        simplicity=6,
        explained_by="Two orders, and lists of blocks that left, which move a target.",
        stem="lists",
        learns_from_ghosts=True,
        vllm="arc",
        tail_first="in each list",  # between its lists it chooses by their sizes
    ),
    _Entry(
        "arc-classic",
        "ARCClassicCachePolicy",
        "adaptive replacement as published",
        simplicity=7,
        explained_by="As much as of arc, which users of vLLM know already.",
        stem="lists",
        learns_from_ghosts=True,
        tail_first="in each list",
    ),
    _Entry(
        "slru",
        "SLRUCachePolicy",
        "LRU in two segments: blocks seen again are protected",
        simplicity=3,
        explained_by="Two orders of the resident blocks and their share.",
        stem="lists",
        options=(
            _Option("protected", 0.5, 0.0, 1.0, "share of the capacity for blocks seen again"),
        ),
    ),
    _Entry(
        "lfu",
        "LFUCachePolicy",
        "least frequently used leaves first, counts age",
        simplicity=4,
        explained_by="One count per resident block, and an age.",
        stem="lists",
    ),
    _Entry(
        "sieve",
        "SieveCachePolicy",
        "oldest not used since the hand last passed leaves",
        simplicity=2,
        explained_by="One order of the resident blocks and one bit per block.",
        stem="queue",
        tail_first="never",  # its order says nothing about chains
        scales=False,
    ),
    _Entry(
        "s3fifo",
        "S3FIFOCachePolicy",
        "new blocks that are not used soon leave first, by three FIFO queues",
        simplicity=5,
        explained_by="Two orders with fixed shares, and a list of blocks that left.",
        stem="queue",
        options=(_Option("small", 0.1, 0.0, 1.0, "share of the capacity for new blocks"),),
    ),
    _Entry(
        "hit-density",
        "HitDensityCachePolicy",
        "fewest expected hits per slot leave first; sparser blocks are not stored",
        simplicity=8,
        explained_by="What was learned from all traffic so far, which cannot be followed by hand.",
        options=(
            _Option("ghosts", 3.5, 0.0, 16.0, "ghosts for each block of the capacity"),
            _Option("guard", 1, 0, 1, "1: evict by recency while a sample hits more so"),
        ),
        learns_by_request=True,
        learns_from_ghosts=True,
        ranks_by_return=True,
        tail_first="in each list",  # a class may be denser than that of the blocks before it
        warm_up_blocks=2048,  # it computes after 1,024 blocks at the earliest, however small it is
    ),
)

if not TYPE_CHECKING:
    __all__ = [entry.class_name for entry in _ENTRIES]

    def __getattr__(name):
        """Return the class of that name, imported at its first use."""
        for entry in _ENTRIES:
            if entry.class_name == name:
                from kvoffload._implementation import IMPLEMENTATION

                from .registry import load

                found = load(entry, "c" if IMPLEMENTATION == "compiled" else "py")
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
