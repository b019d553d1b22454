"""The policies of the implementation that was chosen."""

from typing import TYPE_CHECKING

from kvoffload._implementation import IMPLEMENTATION

__all__ = [
    "ARCCachePolicy",
    "ARCClassicCachePolicy",
    "HitDensityCachePolicy",
    "LFUCachePolicy",
    "LRUCachePolicy",
    "S3FIFOCachePolicy",
    "SLRUCachePolicy",
    "SieveCachePolicy",
]

if TYPE_CHECKING or IMPLEMENTATION == "python":
    from ._arc_classic_py import ARCClassicCachePolicy
    from ._arc_py import ARCCachePolicy
    from ._hit_density_py import HitDensityCachePolicy
    from ._lfu_py import LFUCachePolicy
    from ._lru_py import LRUCachePolicy
    from ._s3fifo_py import S3FIFOCachePolicy
    from ._sieve_py import SieveCachePolicy
    from ._slru_py import SLRUCachePolicy
else:
    from ._arc_c import ARCCachePolicy
    from ._arc_classic_c import ARCClassicCachePolicy
    from ._hit_density_c import HitDensityCachePolicy
    from ._lfu_c import LFUCachePolicy
    from ._lru_c import LRUCachePolicy
    from ._s3fifo_c import S3FIFOCachePolicy
    from ._sieve_c import SieveCachePolicy
    from ._slru_c import SLRUCachePolicy
