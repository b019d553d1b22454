"""The tiers of ``kvoffload.tiers`` as a storage backend of SGLang's HiCache.

SGLang is not changed: its ``dynamic`` backend loads `KVOffloadStorage` by name, from
``--hicache-storage-backend-extra-config``. Importing this package needs SGLang with the interface
that ``interface.json`` declares: another release with the same interface works, and an ImportError
names each difference.
"""

from pathlib import Path

from sglang.version import __version__

from kvoffload.integrations.structure import check_interface

check_interface(__name__, "SGLang", __version__, Path(__file__).with_name("interface.json"))

from .storage import KVOffloadStorage  # noqa: E402 - uses the checked interface

__all__ = ["KVOffloadStorage"]
