"""The classes that have twins, in Python. The same names stand in ``_compiled``."""

from __future__ import annotations

import kvoffload
from kvoffload.backends._cpu_py import CPUBackend
from kvoffload.managers._manager_py import Manager
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
    return registry.load(registry.parse(name).entry, "py")


ARCCachePolicy = policy_class("arc")
LRUCachePolicy = policy_class("lru")
