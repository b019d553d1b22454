"""The tiers of ``kvoffload.tiers`` as an L2 adapter of LMCache.

LMCache is not changed: its ``plugin`` adapter loads `KVOffloadL2Adapter` by name, from
``--l2-adapter``. Importing this package needs LMCache with the interface that ``interface.json``
declares: another release with the same interface works, and an ImportError names each difference.
"""

from pathlib import Path

from lmcache._version import version

from kvoffload.integrations.structure import check_interface

check_interface(__name__, "LMCache", version, Path(__file__).with_name("interface.json"))

from .adapter import KVOffloadL2Adapter, KVOffloadL2AdapterConfig  # noqa: E402 - uses what was checked

__all__ = ["KVOffloadL2Adapter", "KVOffloadL2AdapterConfig"]
