"""The tiers of ``kvoffload.tiers`` as a storage backend of SGLang's HiCache.

Nothing of SGLang is changed: its ``dynamic`` backend loads `KVOffloadStorage` by name, from
``--hicache-storage-backend-extra-config``. Importing it needs SGLang.
"""

from .storage import KVOffloadStorage

__all__ = ["KVOffloadStorage"]
