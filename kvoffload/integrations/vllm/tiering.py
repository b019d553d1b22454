"""The primary tier: the manager of host memory as vLLM's secondary tiers see it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import LoadStoreSpec, PrepareStoreOutput, ReqContext

from .manager import KVOffloadManager

__all__ = ["KVOffloadPrimaryTier"]


class KVOffloadPrimaryTier(KVOffloadManager):
    """Manage host memory that vLLM's secondary tiers read from and write to.

    Parameters
    ----------
    num_chunks : int
        Chunks that fit in host memory.
    mmap_region : SharedOffloadRegion
        The memory; released by `shutdown`.
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

    def prepare_read(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        """Pin chunks that a secondary tier will read; not an access of the request."""
        return self._prepare_read(keys, req_context)

    def complete_read(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Release the pins of `prepare_read`."""
        self.complete_load(keys, req_context)

    def prepare_write(
        self, keys: Collection[bytes], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room for chunks that a secondary tier will write; None if there is none."""
        return self.prepare_store(keys, req_context)

    def complete_write(
        self, keys: Collection[bytes], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make the chunks of `prepare_write` readable, or drop them."""
        self.complete_store(keys, req_context, success)

    def get_kv_memoryview(self) -> memoryview:
        """Return the memory, one row a chunk: ``(num_chunks, bytes a chunk)``."""
        self._require_ready()
        return self._memory

    def shutdown(self) -> None:
        """Release the memory. The manager is not used afterwards."""
        self._require_ready()
        super().shutdown()
        self._memory.release()
        self._mmap_region.cleanup()
