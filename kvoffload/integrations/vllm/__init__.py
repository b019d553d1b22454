"""The offload managers of this package as parts of vLLM.

vLLM is not changed: it loads the classes of this package by name, from
``kv_connector_extra_config``. Importing this package needs a supported vLLM, whose rules it then
follows, and the compiled layer. Classes that need vLLM's tiers are imported at first use: only then
is their interface checked.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from kvoffload._implementation import import_compiled

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

_VARIABLE = "KVOFFLOAD_PURE_PYTHON"


def _require_compiled_layer() -> None:
    """Check that the compiled layer is available and not switched off.

    Raise ImportError if not; the message names the variable or the cause.
    """
    if os.environ.get(_VARIABLE, "") not in ("", "0"):
        raise ImportError(
            "kvoffload.integrations.vllm needs the compiled implementation, and "
            f"{_VARIABLE}={os.environ[_VARIABLE]} asks for the Python one; unset it"
        )
    try:
        import_compiled()
        importlib.import_module("kvoffload.integrations.vllm._manager_c")
    except ImportError as cause:
        raise ImportError(
            "kvoffload.integrations.vllm needs the compiled implementation, which cannot be "
            f"imported: {cause}"
        ) from cause


installed_release()
_require_compiled_layer()

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

#: Name -> module of the classes that need vLLM's tiers.
_TIERING = {
    "KVOffloadFileTier": "secondary_tiers",
    "KVOffloadObjectTier": "secondary_tiers",
    "KVOffloadPrimaryTier": "tiering",
    "KVOffloadRedisTier": "secondary_tiers",
    "KVOffloadSharedTier": "secondary_tiers",
    "KVOffloadTier": "secondary_tiers",
    "KVOffloadTieringSpec": "tiering",
}


def __getattr__(name: str) -> Any:
    """Import a class that needs vLLM's tiers.

    Raise ImportError if their interface is not as expected; the message names each difference.
    """
    if name not in _TIERING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_TIERING[name]}", __name__)
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
