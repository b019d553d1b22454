"""Tiers of ``kvoffload.tiers`` as HiCache's storage of pages of its host memory by hash.

Structure
    A page of HiCache is a block of a tier. The KV cache has one tier, and so has each *pool* of
    state that a model keeps beside it. With ``interface_v1`` the region of the KV cache's tier is
    HiCache's own host memory, whose pages move without a copy; without it, pages are copied through
    memory of this object, in the layout that HiCache flattens them to. Pages of the other pools
    move without a copy if SGLang gives their addresses.
Invariants
    Data that is not certainly the stored page is a miss. An error of a tier is a miss or a page
    that is not stored, never an exception. A prefix counts only if every pool can serve its end.
Cost
    A call takes as long as its transfer, at most until the tier's deadline if the tier is staged
    (`Tier`, *Deadlines*); HiCache calls from its own threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.version import __version__ as sglang_version

from kvoffload.errors import describe
from kvoffload.integrations.tiers import check_options
from kvoffload.tiers import Namespace, Region, Tier, TierError, weights_identity
from kvoffload.tiers.generation import GenerationSource

from .memory import bytes_of, memory_of, pages_by_address, pages_of
from .pool import CopiedPool, Copies, Pool, log

_OPTIONS = ("url", "pools", "weights_id", "revision", "salt", "generation", "generation_file")
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_PAGE_HASH = re.compile(r"[0-9a-f]{64}")
_LOCAL = ("slab", "memory")  # tiers that only one process can use
_KV = str(PoolName.KV)
_CUT_BY_RANK = (str(PoolName.MAMBA),)
"""Pools whose parts differ between the ranks of an MLA model, and that SGLang stores per rank."""


class KVOffloadStorage(HiCacheStorage):  # type: ignore[misc]
    """HiCache's pages in any tiers of ``kvoffload.tiers``.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        From SGLang. Besides SGLang's own options, its ``extra_config`` has

        - ``url``: the tier of the KV cache, as for `open_tier`, such as
          ``"slab:/nvme/kv?capacity=2TB"``;
        - ``pools``: the tier of each pool of state that the model keeps beside its KV cache, by the
          pool's name, such as ``{"mamba": "slab:/nvme/kv?capacity=200GB"}``;
        - ``weights_id``: identity of the weights; by default `weights_identity` of the model's
          path;
        - ``revision``: the revision that was asked for, where the model's path is no directory; by
          default SGLang's;
        - ``salt``: anything else that keeps namespaces apart;
        - ``generation`` or ``generation_file``: the weights' name at the start, or a file that has
          it and is read again when everything is dropped; see `Tier.forget`.
    kwargs : dict, optional
        From SGLang; not used.

    Attributes
    ----------
    tier : Tier or None
        The tier of the KV cache; None until host memory is registered.
    namespace : Namespace or None
        The namespace of the KV cache's bytes.

    Raises
    ------
    TypeError, ValueError
        If an option is wrong.

    Notes
    -----
    Thread-safety: any thread may call any method at any time. Complexity: linear in the keys of a
    call. SGLang's ranks are processes, and each has its own tiers: slabs of ``capacity`` each below
    the same folder, or one shared directory or server.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> None:
        options = dict(storage_config.extra_config or {})
        check_options(options, _OPTIONS, _OF_SGLANG)
        if options.get("weights_id") == "":
            raise ValueError("weights_id must not be empty, got ''")
        copies_nothing = options.get("interface_v1", False)
        if copies_nothing not in (False, True):  # 0 and 1 are, too; SGLang takes "no" for true
            raise TypeError(f"interface_v1 must be 0 or 1, got {describe(copies_nothing)}")
        self._config = storage_config
        self._options = options
        self._is_copying = not copies_nothing
        self._urls = {_KV: _own_url("url", _KV, options["url"], storage_config)}
        for name, url in _check_pools(options.get("pools", {})).items():
            self._urls[name] = _own_url(f"pools[{name!r}]", name, url, storage_config)
        self._generations = GenerationSource(
            options.get("generation") or "", options.get("generation_file")
        )
        self._generation = self._generations.first
        self._pools: dict[str, Pool] = {}
        self.tier: Tier | None = None
        self.namespace: Namespace | None = None

    # -- registration and closing ------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register HiCache's host memory, and open the tier.

        Raise TypeError or ValueError if a tier cannot move the memory's pages, or `url` has a wrong
        option; TierError if the tier cannot be opened.
        """
        if _KV in self._pools:
            raise ValueError("mem_pool_host must be registered once, and the storage has one")
        if not memory_of(mem_pool_host):
            raise ValueError(
                "mem_pool_host must have memory: a KV cache that is kept in other pools, or by "
                f"another rank, is not supported, got {type(mem_pool_host).__name__}"
            )
        super().register_mem_pool_host(mem_pool_host)
        memory = Copies(mem_pool_host) if self._is_copying else pages_of(mem_pool_host)
        layout = _layout_of(mem_pool_host, memory)
        namespace = namespace_of(self._config, mem_pool_host, layout, self._options)
        self.tier = self._open_pool(_KV, mem_pool_host, memory, namespace)
        self.namespace = namespace

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a pool that SGLang keeps beside the KV cache, and open its tier.

        Raise ValueError if `pools` names no tier for it, or a tier cannot move its pages; TierError
        if the tier cannot be opened. Both close the storage, which SGLang then does not use.
        """
        name = str(host_pool_name)
        if name != _KV:
            try:
                self._register_pool(name, host_pool)
            except BaseException:
                self.close()
                raise
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _register_pool(self, name: str, host_pool: Any) -> None:
        if self.namespace is None:
            raise ValueError(f"mem_pool_host must be registered before pool {name!r}")
        if name in self._pools:
            raise ValueError(f"pool {name!r} must be registered once, and the storage has it")
        if name not in self._urls:
            raise ValueError(
                f"pools must name a tier for {name!r}, which the model keeps beside its KV cache, "
                f"as slab:/nvme/kv?capacity=200GB, got {describe([*self._urls][1:])}"
            )
        _check_pool(name, host_pool, self._config)
        try:
            memory: Region | Copies = pages_by_address(host_pool)
        except (NotImplementedError, ValueError) as error:
            log.info("kvoffload: pages of pool %r are copied: %s", name, error)
            try:
                memory = Copies(host_pool)
            except ValueError as refusal:
                raise ValueError(f"pool {name!r}: {refusal}") from error
        layout = _layout_of(host_pool, memory)
        namespace = _namespace_of_pool(self._config, self.namespace, name, host_pool, layout)
        try:
            self._open_pool(name, host_pool, memory, namespace)
        except ValueError as error:
            raise ValueError(f"pools[{name!r}]: {error}") from error

    def _open_pool(
        self, name: str, host_pool: Any, memory: Region | Copies, namespace: Namespace
    ) -> Tier:
        """Open and return the tier of a pool, whose pages are in `memory` or copied through it."""
        url, generation = self._urls[name], self._generation
        if isinstance(memory, Copies):
            pool: Pool = CopiedPool(name, host_pool, url, namespace, generation, copies=memory)
        else:
            pool = Pool(name, host_pool, url, namespace, generation, region=memory)
        self._pools[name] = pool
        return pool.tier

    def close(self) -> None:
        """Close the tiers; a second call does nothing.

        Raise TierError if a system call that may still write to HiCache's memory has not returned.
        """
        pools, self._pools = self._pools, {}
        self.tier = None
        with ExitStack() as closing:  # closes all, even if one raises
            for pool in pools.values():
                closing.callback(pool.close)

    def clear(self) -> bool:
        """Drop all pages in all tiers, for example after new weights.

        The generation is then the file's, or a random one. SGLang calls it only for
        ``/clear_hicache_storage_backend``, not when weights change. Returns whether every tier's
        `Tier.forget` returned True.
        """
        self._generation = self._generations.after_reset()
        are_confirmed = [pool.forget(self._generation) for pool in [*self._pools.values()]]
        return bool(are_confirmed) and all(are_confirmed)

    def stats(self, pool: str = "kv") -> dict[str, int]:
        """Return the counters of a pool's tier since it was opened, and present sizes."""
        found = self._pools.get(str(pool))
        return {} if found is None else found.calls.stats()

    # -- lookups -----------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is present."""
        return self.batch_exists([key]) == 1

    def batch_exists(
        self,
        keys: list[str],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> int:
        """Return the number of leading pages that are present without a gap."""
        pool = self._pools.get(_KV)
        return 0 if pool is None else pool.num_leading([stored_key(key) for key in keys])

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """Return which prefixes every pool can serve.

        A prefix needs all its pages of the KV cache and, by the policy of each other pool, all or
        the last pages of that pool.

        Raise ValueError for any other policy.
        """
        transfers = list(pool_transfers or ())
        _check_policies(transfers)
        count = self.batch_exists(keys)
        stored = [stored_key(key) for key in keys[:count]]
        hits: dict[Any, int] = {PoolName.KV: count} if count else {}
        are_restorable = np.ones(count, np.bool_)  # per prefix of i + 1 pages
        for transfer in transfers:
            if not are_restorable.any():
                break
            can_serve = self._served_ends(transfer, stored)
            ends = np.flatnonzero(can_serve)
            if len(ends):
                hits[transfer.name] = int(ends[-1]) + 1
            are_restorable &= can_serve
        restorable = (np.flatnonzero(are_restorable) + 1).tolist()
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _served_ends(self, transfer: PoolTransfer, stored: list[bytes]) -> npt.NDArray[np.bool_]:
        """Return whether a pool can serve the prefix that ends with each page, ``(n,)`` bool."""
        pool = self._pools.get(str(transfer.name))
        places = np.arange(len(stored))
        if pool is None:
            return np.zeros(len(stored), np.bool_)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return places < pool.num_leading(stored)
        last_missing = np.maximum.accumulate(np.where(pool.are_there(stored), -1, places))
        first_needed = np.maximum(places + 1 - max(1, len(transfer.keys or ())), 0)
        are_served: npt.NDArray[np.bool_] = last_missing < first_needed
        return are_served

    # -- pages of pools beside the KV cache --------------------------------------------------

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of pools into their host memory; return per page whether it was loaded.

        Raise ValueError if a pool's policy is neither all pages nor the last ones.
        """
        found = {}
        for transfer, pool, stored in self._transfers(transfers):
            # A window or a state does not need the pages before it.
            is_whole = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
            prefix = _prefix(extra_info) if is_whole else ()
            found[transfer.name] = [False] * len(stored)
            if pool is not None:
                found[transfer.name] = pool.load(stored, transfer.host_indices, prefix)
        return found

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """Store pages of pools from their host memory; return per page whether there was no error.

        Raise ValueError if a pool's policy is neither all pages nor the last ones.
        """
        return {
            transfer.name: [False] * len(stored)
            if pool is None
            else pool.store(stored, transfer.host_indices)
            for transfer, pool, stored in self._transfers(transfers)
        }

    def _transfers(
        self, transfers: list[PoolTransfer]
    ) -> Iterator[tuple[PoolTransfer, Pool | None, list[bytes]]]:
        """Yield transfers with their pools, None where nothing can be moved, and stored keys."""
        _check_policies(transfers)
        for transfer in transfers:
            stored = [stored_key(key) for key in transfer.keys or ()]
            pool, indices = self._pools.get(str(transfer.name)), transfer.host_indices
            found = 0 if indices is None else indices.numel()
            if pool is not None and found != len(stored) * pool.page_tokens:
                log.error(
                    "host_indices of pool %r must be %d, %d for each of %d keys, got %d",
                    pool.name,
                    len(stored) * pool.page_tokens,
                    pool.page_tokens,
                    len(stored),
                    found,
                )
                pool = None
            yield transfer, pool if stored else None, stored

    # -- pages of HiCache's memory -----------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into HiCache's memory; return per page whether it was loaded."""
        pool = self._pool_in_place(keys, host_indices)
        if pool is None:
            return [False] * len(keys)
        return pool.load([stored_key(key) for key in keys], host_indices, _prefix(extra_info))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        """Store pages of HiCache's memory; return per page whether there was no error.

        A page that the policy declines is not an error: SGLang stops a prompt at the first error.
        """
        pool = self._pool_in_place(keys, host_indices)
        if pool is None:
            return [False] * len(keys)
        return pool.store([stored_key(key) for key in keys], host_indices)

    def _pool_in_place(self, keys: list[str], host_indices: torch.Tensor) -> Pool | None:
        """Return the pool of the KV cache, None if closed; ValueError if the indices are wrong.

        Raise TierError without ``interface_v1``.
        """
        if self._is_copying:
            raise TierError("interface_v1 must be 1 for pages of HiCache's memory, got 0")
        pool = self._pools.get(_KV)
        if pool is not None and host_indices.numel() != len(keys) * pool.page_tokens:
            raise ValueError(
                f"host_indices must be {len(keys) * pool.page_tokens}, {pool.page_tokens} for each "
                f"of {len(keys)} keys, got {host_indices.numel()}"
            )
        return pool

    # -- pages that are copied ---------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load one page into a tensor of its size; return the tensor, or None."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors of their size; return each tensor, or None."""
        pool, targets = self._pool_copied("target_locations", keys, target_locations)
        if pool is None:
            return [None] * len(keys)

        def take(index: int, page: npt.NDArray[np.uint8]) -> None:
            bytes_of(targets[index])[:] = page

        are_there = pool.copy_out([stored_key(key) for key in keys], take)
        return [
            target if is_there else None
            for target, is_there in zip(targets, are_there, strict=True)
        ]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one page, a tensor; return whether there was no error."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store pages, tensors; return whether there was no error."""
        pool, pages = self._pool_copied("values", keys, values)
        if pool is None:
            return not keys
        stored = [stored_key(key) for key in keys]
        return all(pool.copy_in(stored, lambda index: bytes_of(pages[index])))

    def _pool_copied(
        self, name: str, keys: list[str], tensors: Any
    ) -> tuple[CopiedPool | None, list[torch.Tensor]]:
        """Return the pool of the KV cache, None if closed, and checked tensors.

        Raise TypeError or ValueError if one is not a tensor of a page's size; TierError with
        ``interface_v1``.
        """
        if not self._is_copying:
            raise TierError(
                "interface_v1 must be 0 for pages that are copied, got "
                f"{describe(self._options['interface_v1'])}"
            )
        pages: list[torch.Tensor] = list(tensors or ())
        if len(pages) != len(keys):
            raise ValueError(f"{name} must be as many as keys, {len(keys)}, got {len(pages)}")
        pool = self._pools.get(_KV)
        if not isinstance(pool, CopiedPool):
            return None, pages
        nbytes = pool.copies.region.block_bytes
        for index, tensor in enumerate(pages):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}[{index}] must be a tensor, got {describe(tensor)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}[{index}] must be contiguous")
            found = tensor.numel() * tensor.element_size()
            if found != nbytes:
                raise ValueError(f"{name}[{index}] must have {nbytes} bytes, got {found}")
        return pool, pages


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[bytes]:
    """Return the stored keys of the pages before those of a call, if SGLang gives them."""
    keys: Sequence[str] = () if extra_info is None else extra_info.prefix_keys or ()
    return [stored_key(key) for key in keys]


def stored_key(key: str) -> bytes:
    """Return the tier's key of a page: the 32 bytes of SGLang's hash, or the text."""
    return bytes.fromhex(key) if _PAGE_HASH.fullmatch(key) else b"text:" + key.encode()


def _check_policies(transfers: list[PoolTransfer]) -> None:
    for transfer in transfers:
        if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
            raise ValueError(
                f"hit_policy of pool {str(transfer.name)!r} must be all_pages or trailing_pages, "
                f"got {describe(policy)}"
            )


def _check_pools(pools: Any) -> dict[str, str]:
    """Return the option ``pools``; TypeError or ValueError if it does not map pools to tiers."""
    if not isinstance(pools, dict):
        raise TypeError(f"pools must map names of pools to tiers, got {type(pools).__name__}")
    known = [str(name) for name in PoolName if str(name) != _KV]
    for name, url in pools.items():
        if name not in known:
            raise ValueError(
                "pools must have names of SGLang's pools beside the KV cache, such as mamba or "
                f"swa, got {describe(name)}"
            )
        if not isinstance(url, str):
            raise TypeError(f"pools[{name!r}] must be text, got {type(url).__name__}")
        if not url:
            raise ValueError(
                f"pools[{name!r}] must name a tier, as slab:/nvme/kv?capacity=200GB, got ''"
            )
    return pools


def _check_pool(name: str, host_pool: Any, config: HiCacheStorageConfig) -> None:
    """Raise ValueError for a pool whose pages move or would be another rank's."""
    if getattr(host_pool, "shared_allocation_domain", None) is not None:
        raise ValueError(
            f"pool {name!r} must keep its pages in place, got {type(host_pool).__name__}, which "
            "moves them"
        )
    if _is_one_for_all(name, config) and isinstance(host_pool, MHATokenToKVPoolHost):
        raise ValueError(
            f"pool {name!r} must have the same pages on all {config.tp_size} ranks of an MLA "
            "model, of which SGLang stores the first rank's, got "
            f"{type(host_pool).__name__}, whose heads are cut among them"
        )


def _is_one_for_all(name: str, config: HiCacheStorageConfig) -> bool:
    """Return whether several ranks share the pages of a pool."""
    return config.is_mla_model and config.tp_size > 1 and name not in _CUT_BY_RANK


def _own_url(option: str, name: str, url: str, config: HiCacheStorageConfig) -> str:
    """Return the address of a pool's tier for one rank.

    Raise ValueError if ranks would have to share a local tier.
    """
    kind, colon, rest = url.partition(":")
    if kind not in _LOCAL:
        return url
    if _is_one_for_all(name, config):
        raise ValueError(
            f"{option} must name a tier that the {config.tp_size} ranks of an MLA model share, as "
            f"dir:/mnt/kv?capacity=2TB, got {kind}:"
        )
    location, question, options = rest.partition("?")
    if kind == "slab" and location and config.dp_rank:
        location = f"{location.rstrip('/')}/replica{config.dp_rank}"
    return f"{kind}{colon}{location}{question}{options}"


def _layout_of(host_pool: Any, memory: Region | Copies) -> dict[str, Any]:
    """Return the layout of a host memory's pages; ``page`` has the bytes of each of its parts."""
    return {
        "memory": host_pool.layout,
        "pool": type(host_pool).__name__,
        "page": [nbytes for _, _, nbytes in memory.parts],
        "layers": [getattr(host_pool, name, None) for name in ("start_layer", "end_layer")],
    }


def namespace_of(
    config: HiCacheStorageConfig, host_pool: Any, layout: dict[str, Any], options: dict[str, Any]
) -> Namespace:
    """Return the namespace of a page with a `_layout_of` its host memory.

    It includes the rank, unless the ranks of an MLA model have the same bytes.
    """
    path, revision, asked_dtype, quantization = _settings(
        runtime_context.get_model, "model_path", "revision", "kv_cache_dtype", "quantization"
    )
    path = path or config.model_name or ""
    weights = options.get("weights_id")
    if weights is None:
        weights = weights_identity(path, options.get("revision") or revision)
    parallel: dict[str, Any] = {
        "pipeline": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size],
        "decode_context": [config.dcp_rank, config.dcp_size],
    }
    if not config.is_mla_model:
        parallel["tensor"] = [config.tp_rank, config.tp_size]
    return Namespace(
        model=config.model_name or path,
        block_bytes=sum(layout["page"]),
        engine=f"sglang {'.'.join(sglang_version.split('.')[:3])}",
        weights=weights,
        kv_dtype=str(host_pool.dtype).removeprefix("torch."),
        layout={
            **layout,
            "asked_dtype": asked_dtype,  # 8-bit types have the same storage
            "quantization": quantization,
        },
        tokens_per_hash=host_pool.page_size,
        tokens_per_block=host_pool.page_size,
        parallel=parallel,
        salt=options.get("salt") or "",
    )


def _namespace_of_pool(
    config: HiCacheStorageConfig, kv: Namespace, name: str, host_pool: Any, layout: dict[str, Any]
) -> Namespace:
    """Return the namespace of another pool's page, which includes that of the KV cache.

    It includes the rank if each rank has its own part, and the weights of a draft model, whose
    states SGLang keeps in separate pools or with the model's.
    """
    parallel = dict(kv.parallel)
    if name in _CUT_BY_RANK:
        parallel["tensor"] = [config.tp_rank, config.tp_size]
    draft, revision = _settings(
        runtime_context.get_spec, "speculative_draft_model_path", "speculative_draft_model_revision"
    )
    weights = kv.weights
    if draft is not None:
        weights = [weights, weights_identity(draft, revision)]
    return replace(
        kv,
        block_bytes=sum(layout["page"]),
        weights=weights,
        layout={
            **layout,
            "name": name,
            "format": getattr(host_pool, "storage_format_tag", None),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in memory_of(host_pool)],
            "kv": kv.layout,
        },
        tokens_per_block=host_pool.page_size,
        parallel=parallel,
    )


def _settings(get: Callable[[], Any], *names: str) -> list[str | None]:
    """Return some of SGLang's settings, None for one without a value, or if no engine runs."""
    settings: Any = None
    with suppress(ValueError):
        settings = get()
    values = [getattr(settings, name, None) for name in names]
    return [None if value is None else str(value) for value in values]
