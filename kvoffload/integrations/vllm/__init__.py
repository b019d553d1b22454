"""The offload managers of this package as parts of vLLM.

vLLM is not changed: it loads the classes of this package by name, from
``kv_connector_extra_config``. Importing this package needs a supported vLLM, whose rules it then
follows, and the compiled layer. Classes that need vLLM's tiers are imported at first use: only then
is their interface checked.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kvoffload._implementation import require_compiled

from ._upstream import installed_release

if TYPE_CHECKING:
    from .secondary_tiers import (
        KVOffloadFileTier,
        KVOffloadObjectTier,
        KVOffloadRedisTier,
        KVOffloadSharedTier,
        KVOffloadTier,
    )
    from .tiering import KVOffloadPrimaryTier, KVOffloadTieringSpec

installed_release()
require_compiled(__name__)

# After the checks, whose messages are clearer.
from .manager import KVOffloadManager  # noqa: E402
from .spec import KVOffloadSpec  # noqa: E402

__all__ = [
    "KVOffloadFileTier",
    "KVOffloadManager",
    "KVOffloadObjectTier",
    "KVOffloadPrimaryTier",
    "KVOffloadRedisTier",
    "KVOffloadSharedTier",
    "KVOffloadSpec",
    "KVOffloadTier",
    "KVOffloadTieringSpec",
]

#: Classes of the module ``tiering``; others that need vLLM's tiers are in ``secondary_tiers``.
_TIERING = ("KVOffloadPrimaryTier", "KVOffloadTieringSpec")


def __getattr__(name: str) -> Any:
    """Import a class that needs vLLM's tiers.

    Raise ImportError if their interface is not as expected; the message names each difference.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "tiering" if name in _TIERING else "secondary_tiers"
    module = importlib.import_module(f".{home}", __name__)
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
