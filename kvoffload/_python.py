"""The Python twin of every public class, gathered. The same names stand in ``_compiled``."""

from __future__ import annotations

from .backends._cpu_py import CPUBackend
from .managers import _public_docs
from .managers._manager_py import Manager
from .managers.arc import ARCConstruction
from .managers.cpu import CPUConstruction
from .managers.lru import LRUConstruction
from .policies import registry
from .policies._arc_py import ARCCachePolicy
from .policies._lru_py import LRUCachePolicy
from .policies.base import CachePolicy
from .types import CPULoadStoreSpec, Spec_co

__all__ = [
    "ARCCachePolicy",
    "ARCOffloadingManager",
    "CPUBackend",
    "CPUOffloadingManager",
    "LRUCachePolicy",
    "LRUOffloadingManager",
    "policy_class",
]


class CPUOffloadingManager(CPUConstruction, Manager[CPULoadStoreSpec]):
    __doc__ = _public_docs.CPU


class LRUOffloadingManager(LRUConstruction[Spec_co], Manager[Spec_co]):
    __doc__ = _public_docs.LRU


class ARCOffloadingManager(ARCConstruction[Spec_co], Manager[Spec_co]):
    __doc__ = _public_docs.ARC


def policy_class(name: str) -> type[CachePolicy]:
    """Return the Python class of a registered policy."""
    return registry.load(registry.entry(name), "py")
