"""The classes that have twins, in Python. The same names stand in ``_compiled``."""

from __future__ import annotations

from kvoffload.backends._cpu_py import CPUBackend  # noqa: F401
from kvoffload.managers._manager_py import Manager
from kvoffload.policies.base import CachePolicy
from tests.rebuilt import managers_over, policy_of_twin

CPUOffloadingManager, LRUOffloadingManager, ARCOffloadingManager = managers_over(Manager)


def policy_class(name: str) -> type[CachePolicy]:
    """Return the class of a registered policy, by the text that asks for it."""
    return policy_of_twin(name, "py")


ARCCachePolicy, LRUCachePolicy = map(policy_class, ("arc", "lru"))
