"""Offload managers for the KV cache of LLM engines: which block stays, which leaves, and when.

``IMPLEMENTATION`` is ``"compiled"`` or ``"python"``; the environment variable
``KVOFFLOAD_PURE_PYTHON`` chooses (see the reference).
"""

from importlib import metadata as _metadata

from ._implementation import IMPLEMENTATION
from .backends.base import Backend
from .backends.cpu import CPUBackend
from .errors import (
    BackendError,
    BlockNotFoundError,
    BlockNotPinnedError,
    BlockNotReadyError,
    OffloadError,
    PolicyError,
    RefCountOverflowError,
)
from .managers.arc import ARCOffloadingManager
from .managers.base import OffloadingManager
from .managers.cpu import CPUOffloadingManager
from .managers.lru import LRUOffloadingManager
from .policies.base import CachePolicy
from .policies.builtin import (
    ARCCachePolicy,
    ARCClassicCachePolicy,
    HitDensityCachePolicy,
    LFUCachePolicy,
    LRUCachePolicy,
    S3FIFOCachePolicy,
    SieveCachePolicy,
    SLRUCachePolicy,
)
from .types import (
    BlockHash,
    BlockIDsLoadStoreSpec,
    BlockStatus,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    PrepareStoreOutput,
)

try:
    __version__ = _metadata.version("kvoffload")
except _metadata.PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "IMPLEMENTATION",
    "ARCCachePolicy",
    "ARCClassicCachePolicy",
    "ARCOffloadingManager",
    "Backend",
    "BackendError",
    "BlockHash",
    "BlockIDsLoadStoreSpec",
    "BlockNotFoundError",
    "BlockNotPinnedError",
    "BlockNotReadyError",
    "BlockStatus",
    "CPUBackend",
    "CPULoadStoreSpec",
    "CPUOffloadingManager",
    "CachePolicy",
    "GPULoadStoreSpec",
    "HitDensityCachePolicy",
    "LFUCachePolicy",
    "LRUCachePolicy",
    "LRUOffloadingManager",
    "LoadStoreSpec",
    "OffloadError",
    "OffloadingEvent",
    "OffloadingManager",
    "PolicyError",
    "PrepareStoreOutput",
    "RefCountOverflowError",
    "S3FIFOCachePolicy",
    "SLRUCachePolicy",
    "SieveCachePolicy",
    "__version__",
]
