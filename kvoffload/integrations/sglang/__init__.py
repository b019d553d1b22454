"""The tiers of ``kvoffload.tiers`` as a storage backend of SGLang's HiCache.

Nothing of SGLang is changed: its ``dynamic`` backend loads `KVOffloadStorage` by name, from
``--hicache-storage-backend-extra-config``. Importing it needs SGLang, with the interface that
``interface.json`` declares: another release with the same one works, and a difference is named in
an ImportError.
"""

from pathlib import Path

from sglang.version import __version__

from kvoffload.integrations.structure import check_interface

check_interface(__name__, "SGLang", __version__, Path(__file__).with_name("interface.json"))

from .storage import KVOffloadStorage  # noqa: E402 - it uses what was checked

__all__ = ["KVOffloadStorage"]
