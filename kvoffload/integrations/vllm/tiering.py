"""Host memory as the primary tier of vLLM's secondary tiers, and the spec that builds it.

A request whose chunks are in a secondary tier waits until all of them are in the primary one. In
vLLM itself a promotion may evict chunks promoted before it, for the same or another waiting
request, and with little memory they evict each other forever. Here a promoted chunk is pinned for
its request until that loads, stores or finishes. So every promotion advances a waiting request, or
finds no room, which also ends the wait.

A secondary tier is offered only chunks that the primary one stores, and is read through its chunks.
So with a secondary tier, the policy of the primary tier declines nothing while a chunk may leave.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from kvoffload.errors import describe
from kvoffload.policies.base import CachePolicy

from ._upstream import (
    LoadStoreSpec,
    OffloadingConfig,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    TieringOffloadingSpec,
    primary_tier_exchanged,
)
from .manager import KVOffloadManager
from .spec import OwnPolicy

__all__ = ["KVOffloadPrimaryTier", "KVOffloadTieringSpec"]

logger = logging.getLogger("vllm.kvoffload")


class KVOffloadPrimaryTier(KVOffloadManager):
    """A manager of host memory that vLLM's secondary tiers read and write.

    Parameters
    ----------
    num_chunks : int
        Chunks that fit in host memory.
    mmap_region : SharedOffloadRegion
        The memory, which `shutdown` releases.
    cache_policy, cache_policy_module_path, enable_events, info
        As for `KVOffloadManager`.
    """

    def __init__(  # noqa: PLR0917  (vLLM's own constructor)
        self,
        num_chunks: int,
        mmap_region: Any,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        info: Any = None,
    ) -> None:
        self._require_new()
        self._promoted: dict[str, list[bytes]] = {}  # request id -> keys pinned for it
        self._mmap_region = mmap_region
        self._memory: memoryview = mmap_region.create_kv_memoryview()
        try:
            super().__init__(
                num_chunks,
                cache_policy,
                cache_policy_module_path,
                enable_events=enable_events,
                info=info,
            )
        except BaseException:
            self._memory.release()
            raise

    def decline_nothing(self) -> None:
        """Store every chunk for which another may leave, even if its session ends."""
        self._require_ready()
        self._stores_all = True
        policy = self._rules.policy
        if isinstance(policy, CachePolicy):
            policy._set_declining(False)

    def prepare_read(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        """Pin chunks that a secondary tier will read, without an access of the request."""
        return self._prepare_read(keys, req_context)

    def complete_read(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Release the pins of `prepare_read`."""
        self.complete_load(keys, req_context)

    def prepare_write(
        self, keys: Collection[bytes], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room for chunks that a secondary tier will write; None if none of them is stored.

        Also return None if the policy stores none of them: vLLM treats an output without keys as a
        promotion under way, and would wait for it.
        """
        self._require_ready()
        keys = list(keys)
        self._promoted.setdefault(req_context.req_id, [])
        output = super().prepare_store(keys, req_context)
        if output is None or output.keys_to_store:
            return output
        return None if any(self._chunk(key) is None for key in keys) else output

    def complete_write(
        self, keys: Collection[bytes], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make the chunks of `prepare_write` readable, or drop them.

        If the request still waits for them, they are pinned for it.
        """
        self._require_ready()
        keys = list(keys)
        held = self._promoted.get(req_context.req_id)
        if not success or held is None:
            self.complete_store(keys, req_context, success)
            return
        statuses = [(key, self._chunk(key)) for key in dict.fromkeys(keys)]
        written = [key for key, status in statuses if status is not None and status[0] < 0]
        held = held + written
        self.complete_store(keys, req_context)
        with suppress(MemoryError):  # then they may be evicted, as in vLLM
            self._hold(written, req_context)
            self._promoted[req_context.req_id] = held

    def prepare_load(self, keys: Iterable[bytes], req_context: ReqContext) -> LoadStoreSpec:
        """Pin chunks for reading, and count the access; the request waits no longer."""
        spec = super().prepare_load(keys, req_context)
        with suppress(MemoryError):  # then a later call releases them
            self._let_go(req_context)
        return spec

    def prepare_store(
        self, keys: Iterable[bytes], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room for the chunks that are absent; the request waits no longer."""
        output = super().prepare_store(keys, req_context)
        with suppress(MemoryError):  # then a later call releases them
            self._let_go(req_context)
        return output

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Count the keys that the request has used as one access, tail first."""
        self._let_go(req_context)
        super().on_request_finished(req_context)

    def reset_cache(self) -> None:
        """Drop every chunk; counted offers, events and samples stay, ids start at 0 again."""
        super().reset_cache()
        self._promoted.clear()

    def _let_go(self, req_context: ReqContext) -> None:
        """Release the chunks promoted for a request."""
        self._require_ready()
        held = self._promoted.get(req_context.req_id)
        if held:
            self.complete_load(held, req_context)
        self._promoted.pop(req_context.req_id, None)

    def get_kv_memoryview(self) -> memoryview:
        """Return the memory, one row per chunk: ``(num_chunks, bytes per chunk)``."""
        self._require_ready()
        return self._memory

    def shutdown(self) -> None:
        """Release the memory. The manager is not used afterwards."""
        self._require_ready()
        super().shutdown()
        self._memory.release()
        self._mmap_region.cleanup()


class KVOffloadTieringSpec(OwnPolicy, TieringOffloadingSpec):  # type: ignore[misc]
    """A spec of vLLM's secondary tiers below a primary tier of this package.

    ``{"spec_name": "KVOffloadTieringSpec", "spec_module_path": "kvoffload.integrations.vllm"}`` in
    ``kv_connector_extra_config``; every option of vLLM's ``TieringOffloadingSpec`` is valid.

    Parameters
    ----------
    config : OffloadingConfig
        From vLLM.

    Raises
    ------
    TypeError, ValueError
        For keys that begin with ``kvoffload_`` and are unknown or have a wrong value. An unknown
        policy is an error of `get_manager`.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        tiers = config.extra_config.get("secondary_tiers")
        named = {"kv_connector_extra_config": config.extra_config}
        if isinstance(tiers, list):  # else vLLM's own error says that it must be one
            named |= {f"secondary_tiers[{index}]": tier for index, tier in enumerate(tiers)}
        for name, options in named.items():
            if not isinstance(options, Mapping):
                raise TypeError(f"{name} must be an object, got {describe(options)}")
            backpressure = options.get("backpressure")
            if backpressure is not None and not isinstance(backpressure, Mapping):
                raise TypeError(
                    f"backpressure of {name} must be an object, got {describe(backpressure)}"
                )
        super().__init__(config)

    def _new_manager(self) -> OffloadingManager:
        """Build vLLM's tiering manager over this package's primary tier.

        Raise RuntimeError if vLLM's module does not have the class to replace.
        """
        if self._policy_text is None:
            return super()._new_manager()
        with primary_tier_exchanged(KVOffloadPrimaryTier):
            own_policy, self.eviction_policy = self.eviction_policy, self._policy_text
            try:
                manager = super()._new_manager()
            finally:
                self.eviction_policy = own_policy
        if not isinstance(manager.primary_tier, KVOffloadPrimaryTier):
            raise RuntimeError("kvoffload: vLLM did not build the primary tier by its known name")
        if manager.secondary_tiers:
            manager.primary_tier.decline_nothing()
        logger.info(
            "kvoffload: compiled primary tier active, policy %s, %d chunks",
            self._policy_text,
            self.num_chunks,
        )
        return manager
