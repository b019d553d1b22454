"""The compiled twin of every public class, gathered. The same names stand in ``_python``."""

from __future__ import annotations

from kvoffload.backends._cpu_c import CPUBackend
from kvoffload.managers import _public_docs
from kvoffload.managers._manager_c import Manager
from kvoffload.managers.arc import ARCConstruction
from kvoffload.managers.base import OffloadingManager
from kvoffload.managers.cpu import CPUConstruction
from kvoffload.managers.lru import LRUConstruction
from kvoffload.policies import registry
from kvoffload.policies._arc_c import ARCCachePolicy
from kvoffload.policies._lru_c import LRUCachePolicy
from kvoffload.policies.base import CachePolicy
from kvoffload.types import CPULoadStoreSpec, Spec_co

__all__ = [
    "ARCCachePolicy",
    "ARCOffloadingManager",
    "CPUBackend",
    "CPUOffloadingManager",
    "LRUCachePolicy",
    "LRUOffloadingManager",
    "policy_class",
]


class CPUOffloadingManager(CPUConstruction, Manager, OffloadingManager[CPULoadStoreSpec]):
    __doc__ = _public_docs.CPU
    _twin = "c"
    _backend_class = CPUBackend


class LRUOffloadingManager(LRUConstruction[Spec_co], Manager, OffloadingManager[Spec_co]):
    __doc__ = _public_docs.LRU
    _twin = "c"
    _backend_class = CPUBackend


class ARCOffloadingManager(ARCConstruction[Spec_co], Manager, OffloadingManager[Spec_co]):
    __doc__ = _public_docs.ARC
    _twin = "c"
    _backend_class = CPUBackend


def policy_class(name: str) -> type[CachePolicy]:
    """Return the compiled class of a registered policy."""
    return registry.load(registry.entry(name), "c")


# All twins or none: a policy without its compiled twin makes this import fail.
for _name in registry.names():
    policy_class(_name)
