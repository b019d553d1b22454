"""The offload managers of this package as parts of vLLM 0.33.

Nothing of vLLM is changed: vLLM loads the classes of this module by name, from
``kv_connector_extra_config``. Importing it needs a supported vLLM and the compiled layer.
"""

from ._support import require_compiled_layer, require_vllm

require_vllm()
require_compiled_layer()

# After the checks, whose messages are clearer.
from .manager import KVOffloadManager  # noqa: E402
from .policies import (  # noqa: E402
    KVOffloadARC,
    KVOffloadARCClassic,
    KVOffloadHitDensity,
    KVOffloadLFU,
    KVOffloadLRU,
    KVOffloadS3FIFO,
    KVOffloadSieve,
    KVOffloadSLRU,
)
from .secondary_tiers import (  # noqa: E402
    KVOffloadFileTier,
    KVOffloadObjectTier,
    KVOffloadRedisTier,
    KVOffloadSharedTier,
    KVOffloadTier,
)
from .spec import KVOffloadSpec, KVOffloadTieringSpec  # noqa: E402
from .tiering import KVOffloadPrimaryTier  # noqa: E402

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
