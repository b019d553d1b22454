"""The parts of SGLang that meet HiCache's storage, small and on a CPU: all of them SGLang's own."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

from kvoffload.integrations.sglang import KVOffloadStorage

PAGE_TOKENS = 4
DEVICE_TOKENS = 64
HOST_RATIO = 4.0
LAYERS, HEADS, HEAD_SIZE = 2, 2, 8
BACKEND = {
    "backend_name": "kvoffload",
    "module_path": "kvoffload.integrations.sglang",
    "class_name": "KVOffloadStorage",
}
WAIT_S = 300
PARALLEL = {  # of an engine of one process
    "attn_dcp_size": 1,
    "attn_dcp_rank": 0,
    "attn_dp_size": 1,
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
}
Rank = tuple[int, int, str]
"""Number of a rank, how many there are, and a file through which they find each other."""


def device_pool(
    kind: str = "mha",
    dtype: torch.dtype = torch.bfloat16,
    value_size: int = 0,
    head_size: int = HEAD_SIZE,
) -> Any:
    """Return the memory of an accelerator, on the CPU."""
    common: dict[str, Any] = {
        "size": DEVICE_TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": dtype,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=16, qk_rope_head_dim=8, **common)
    return MHATokenToKVPool(
        head_num=HEADS, head_dim=head_size, v_head_dim=value_size or head_size, **common
    )


def host_pool(device: Any, layout: str = "page_first", ratio: float = HOST_RATIO) -> Any:
    """Return HiCache's host memory, filled with random bytes."""
    info = device.get_device_pool_infos()[0].buffer_info
    more: dict[str, Any] = {
        "device_capacity_tokens": device.size,
        "start_layer": device.start_layer,
        "end_layer": device.end_layer,
    }
    if isinstance(device, MLATokenToKVPool):
        kind = MLATokenToKVPoolHost
        more["target_layer_num"] = LAYERS
    else:
        kind = get_mha_host_pool_cls(info)
    host = kind(info, ratio, 0, PAGE_TOKENS, layout, pin_memory=False, **more)
    for buffer in host.kv_buffer if isinstance(host.kv_buffer, tuple | list) else [host.kv_buffer]:
        buffer.view(torch.uint8).random_()
    return host


def mamba_pool(slots: int = 16, *, side: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return SGLang's host memory of Mamba's states, filled with random bytes.

    `side`: whether the model has other states in each slot, which SGLang copies only.
    """
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, slots, HEADS, HEAD_SIZE, dtype=torch.float32),
        conv=(
            torch.zeros(LAYERS, slots, HEAD_SIZE, 3, dtype=dtype),
            torch.zeros(LAYERS, slots, HEADS, 3, dtype=dtype),
        ),
        extra_checkpoint_buffers=(torch.zeros(slots, 5, dtype=torch.uint8),) if side else (),
    )
    host = MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")
    for buffer in host.get_hybrid_pool_buffer():
        buffer.view(-1).view(torch.uint8).random_()
    return host


def config(url: str | None, *, copied: bool = False, **fields: Any) -> HiCacheStorageConfig:
    """Return what SGLang tells a storage; of one rank unless `fields` say otherwise."""
    extra = {**BACKEND, "url": url, "interface_v1": int(not copied), **fields.pop("extra", {})}
    return HiCacheStorageConfig(
        **{
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "model",
            "extra_config": extra,
            **fields,
        }
    )


def storage(url: str, host: Any, **fields: Any) -> KVOffloadStorage:
    """Return the storage as SGLang's factory makes it, with host memory."""
    made = StorageBackendFactory.create_backend("dynamic", config(url, **fields), host)
    made.register_mem_pool_host(host)
    made.on_host_pools_registered()
    return made


def page_keys(tokens: list[int]) -> list[str]:
    """Return SGLang's hash of each page of a prompt."""
    return get_storage_hash_str(array("q", tokens), None, page_size=PAGE_TOKENS)


def page_bytes(host: Any, first: int) -> bytes:
    """Return the bytes of the page that begins with a token of the host memory."""
    page = host.get_data_page(first, flat=True).contiguous()
    return page.view(torch.uint8).numpy().tobytes()


class Controller:
    """SGLang's controller of HiCache with its threads, over a storage.

    `layout` is that of host memory; `pools` has host memory and tier of each pool beside the KV
    cache, by its name.
    """

    def __init__(
        self,
        url: str,
        layout: str = "page_first",
        *,
        copied: bool = False,
        rank: Rank | None = None,
        pools: dict[str, tuple[Any, str]] | None = None,
    ) -> None:
        self.rank = rank
        self.pools = {PoolName(name): host for name, (host, _) in (pools or {}).items()}
        device = device_pool()
        self.host = host_pool(device, layout)
        entry = PoolEntry(PoolName.KV, self.host, device, lambda layer: layer, True)
        extra = {**BACKEND, "url": url, "interface_v1": int(not copied)}
        if pools:
            extra["pools"] = {name: tier for name, (_, tier) in pools.items() if tier}
        beside = [
            PoolEntry(name, pool, None, lambda layer: layer) for name, pool in self.pools.items()
        ]
        with one_process(rank):
            self.controller = HybridCacheController(
                PagedTokenToKVPoolAllocator(
                    DEVICE_TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", device, False
                ),
                HostPoolGroup([entry, *beside]),
                PAGE_TOKENS,
                torch.distributed.group.WORLD,
                threading.Event(),
                write_policy="write_through",
                io_backend="direct",
                storage_backend="dynamic",
                prefetch_threshold=PAGE_TOKENS,
                model_name="model",
                storage_backend_extra_config=extra,
            )

    @property
    def storage(self) -> KVOffloadStorage:
        return self.controller.storage_backend

    def store(
        self, tokens: list[int], states: dict[PoolName, list[int]] | None = None
    ) -> list[bytes]:
        """Back a prompt's pages up, as a request that was computed is; return their bytes.

        `states`: blocks of the other pools' host memory, which belong to the last pages. A pool of
        an indexer has pages at the places of the KV cache's.
        """
        indices = self.controller.mem_pool_host.alloc(len(tokens))
        keys = page_keys(tokens)
        extra = [
            trailing(name, keys[-len(blocks) :], tokens_of(self.pools[name], blocks))
            for name, blocks in (states or {}).items()
        ] + self._derived()
        self.controller.write_storage(indices, array("q", tokens), keys, extra_pools=extra or None)
        operation = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        assert operation.completed_tokens == len(tokens)
        pages = [page_bytes(self.host, int(first)) for first in indices[::PAGE_TOKENS]]
        self.controller.mem_pool_host.free(indices)
        return pages

    def load(
        self, tokens: list[int], states: dict[PoolName, list[int]] | None = None
    ) -> list[bytes]:
        """Prefetch a prompt's pages, as for a new request; return the bytes of those that came.

        `states`: blocks of the other pools' host memory, for what they have of the last pages.
        Of those that came, `loaded` has the number by pool.
        """
        controller = self.controller
        self.loaded: dict[str, int] = {}
        extra = [
            trailing(name, ["__placeholder__"] * len(blocks), None)
            for name, blocks in (states or {}).items()
        ] + self._derived()
        handle = CacheRequestHandle("request", 0)
        controller.prefetch(handle, array("q", tokens), extra_pools=extra or None)
        operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
        indices = controller.mem_pool_host.alloc(operation.storage_hit_count)
        for buffer in [self.host.kv_buffer]:
            buffer.view(torch.uint8).random_()  # nothing is left there of before
        operation.host_indices = indices
        for name, blocks in (states or {}).items():
            (transfer,) = [transfer for transfer in extra if transfer.name == name]
            transfer.host_indices = tokens_of(self.pools[name], blocks)
        controller.prefetch_buffer.put(operation)
        count = 0
        while True:
            ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
            if ack.completed_tokens is not None:
                count = ack.completed_tokens
            if ack.pool_hits is not None:
                self.loaded = ack.pool_hits
            if ack.completed_req:
                break
        pages = [page_bytes(self.host, int(first)) for first in indices[:count:PAGE_TOKENS]]
        controller.mem_pool_host.free(indices)
        return pages

    def _derived(self) -> list[PoolTransfer]:
        """Return the transfers of pools whose pages are at the places of the KV cache's."""
        names = [PoolName.INDEXER] if PoolName.INDEXER in self.pools else []
        return [PoolTransfer(name, indices_from_pool=PoolName.KV) for name in names]

    def close(self) -> None:
        with one_process(self.rank):
            self.controller.detach_storage_backend()


def trailing(name: PoolName, keys: list[str], indices: torch.Tensor | None) -> PoolTransfer:
    """Return what SGLang says of a pool that has only the last pages of a prefix."""
    return PoolTransfer(name, indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def tokens_of(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the tokens of pages of a host memory."""
    first = [torch.arange(pool.page_size) + page * pool.page_size for page in pages]
    return torch.cat([torch.empty(0, dtype=torch.int64), *first])


@contextmanager
def one_process(rank: Rank | None = None) -> Iterator[None]:
    """Run as the one process of an engine, or as one of its tensor-parallel ranks."""
    number, size, file = rank or (0, 1, "")
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(file, size) if file else torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=size)
    with get_parallel().override(**{**PARALLEL, "tp_rank": number, "tp_size": size}):
        yield


def slab(folder: Path, capacity: int, policy: str = "lru") -> str:
    """Return the text of a slab of so many bytes.

    A page can be asked for as soon as its store has ended; without ``ack=stored`` a little later.
    """
    return f"slab:{folder}?capacity={capacity}&policy={policy}&ack=stored"
