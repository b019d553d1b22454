"""The offload managers of this package as parts of vLLM.

Nothing of vLLM is changed: vLLM loads the classes of this module by name, from
``kv_connector_extra_config``. Importing it needs a supported vLLM, whose rules it then follows, and
the compiled layer.
"""

import importlib
import os

from kvoffload._implementation import import_compiled

from .versions import installed_release

_VARIABLE = "KVOFFLOAD_PURE_PYTHON"


def _require_compiled_layer() -> None:
    """Check that the compiled layer is there and wanted.

    Raises
    ------
    ImportError
        If not; the message names the variable or the cause.
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
from .policy_adapter import (  # noqa: E402
    KVOffloadARC,
    KVOffloadARCClassic,
    KVOffloadHitDensity,
    KVOffloadLFU,
    KVOffloadLRU,
    KVOffloadS3FIFO,
    KVOffloadSieve,
    KVOffloadSLRU,
)
from .primary_tier import KVOffloadPrimaryTier  # noqa: E402
from .secondary_tiers import (  # noqa: E402
    KVOffloadFileTier,
    KVOffloadObjectTier,
    KVOffloadRedisTier,
    KVOffloadSharedTier,
    KVOffloadTier,
)
from .spec import KVOffloadSpec, KVOffloadTieringSpec  # noqa: E402

__all__ = [
    "KVOffloadARC",
    "KVOffloadARCClassic",
    "KVOffloadFileTier",
    "KVOffloadHitDensity",
    "KVOffloadLFU",
    "KVOffloadLRU",
    "KVOffloadManager",
    "KVOffloadObjectTier",
    "KVOffloadPrimaryTier",
    "KVOffloadRedisTier",
    "KVOffloadS3FIFO",
    "KVOffloadSLRU",
    "KVOffloadSharedTier",
    "KVOffloadSieve",
    "KVOffloadSpec",
    "KVOffloadTier",
    "KVOffloadTieringSpec",
]
