"""The tiers of ``kvoffload.tiers`` as an L2 adapter of LMCache.

Nothing of LMCache is changed: its ``plugin`` adapter loads `KVOffloadL2Adapter` by name, from
``--l2-adapter``. Importing it needs LMCache.
"""

from .adapter import KVOffloadL2Adapter, KVOffloadL2AdapterConfig

__all__ = ["KVOffloadL2Adapter", "KVOffloadL2AdapterConfig"]
