"""The classes that have twins, compiled. The same names stand in ``_python``."""

from __future__ import annotations

import kvoffload
from kvoffload.backends._cpu_c import CPUBackend
from kvoffload.managers._manager_c import Manager
from kvoffload.policies import registry
from kvoffload.policies.base import CachePolicy
from tests.rebuilt import rebuild

__all__ = [
    "ARCCachePolicy",
    "ARCOffloadingManager",
    "CPUBackend",
    "CPUOffloadingManager",
    "LRUCachePolicy",
    "LRUOffloadingManager",
    "policy_class",
]

CPUOffloadingManager = rebuild(kvoffload.CPUOffloadingManager, Manager)
LRUOffloadingManager = rebuild(kvoffload.LRUOffloadingManager, Manager)
ARCOffloadingManager = rebuild(kvoffload.ARCOffloadingManager, Manager)


def policy_class(name: str) -> type[CachePolicy]:
    """Return the class of a registered policy, by the text that asks for it."""
    return registry.load(registry.parse(name).entry, "c")


ARCCachePolicy = policy_class("arc")
LRUCachePolicy = policy_class("lru")
