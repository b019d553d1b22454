"""A tier of ``kvoffload.tiers`` as HiCache's storage: pages of its host memory, by their hashes.

Structure
    A page of HiCache is a block of the tier. With ``interface_v1`` the tier's region is HiCache's
    own host memory, whose pages move without a copy; without it, pages are copied through memory
    of this object, in whatever layout HiCache flattens them to.
Invariants
    What is not certainly the page that was stored is a miss. Trouble with a tier is a miss or a
    page that is not stored, never an exception.
Cost
    A call takes as long as its transfer, at most until the tier's deadline where the tier has
    buffers of its own (`Tier`, *Deadlines*); HiCache calls from threads of its own.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)
from sglang.version import __version__ as sglang_version

from kvoffload.errors import describe
from kvoffload.tiers import (
    Namespace,
    Region,
    State,
    Status,
    Tier,
    TierError,
    open_tier,
    weights_identity,
)

from .blocking import BlockingTier

__all__ = ["KVOffloadStorage"]

log = logging.getLogger("kvoffload.sglang")

CLOSE_S = 5.0
"""Seconds that transfers under way have when the storage is closed."""
COPY_BYTES = 64 * 2**20
"""Bytes of each of the two buffers for pages that are copied."""
_OPTIONS = ("url", "weights_id", "revision", "salt")
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_PAGE_HASH = re.compile(r"[0-9a-f]{64}")
_LOCAL = ("slab", "memory")  # tiers that one process has to itself


class KVOffloadStorage(HiCacheStorage):  # type: ignore[misc]
    """HiCache's pages in any tier of ``kvoffload.tiers``.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        From SGLang. Its ``extra_config`` has, beside what SGLang needs to find this class,

        - ``url``: the tier, as for `open_tier`, such as ``"slab:/nvme/kv?capacity=2TB"``;
        - ``weights_id``: identity of the weights; by default `weights_identity` of the model's
          path;
        - ``revision``: the revision that was asked for, where the model's path is no directory; by
          default SGLang's;
        - ``salt``: anything else that keeps namespaces apart.
    kwargs : dict, optional
        From SGLang; not used.

    Attributes
    ----------
    tier : Tier or None
        The tier; None until host memory is registered.
    namespace : Namespace or None
        What the bytes mean.

    Raises
    ------
    TypeError, ValueError
        If an option is wrong.

    Notes
    -----
    Thread-safety: any thread may call any method at any time. Complexity: linear in the keys of a
    call. SGLang's ranks are processes, and each has a tier of its own: a slab of ``capacity`` each
    below the same folder, or one shared directory or server for all.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> None:
        options = dict(storage_config.extra_config or {})
        for name in options:
            if name not in _OPTIONS and name not in _OF_SGLANG:
                raise ValueError(
                    f"an option must be one of {', '.join(_OPTIONS)}, got {str(name)[:100]!r}"
                )
        for name in _OPTIONS:
            value = options.get(name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be text, got {describe(value)}")
        if options.get("weights_id") == "":
            raise ValueError("weights_id must not be empty, got ''")
        copies_nothing = options.get("interface_v1", False)
        if copies_nothing not in (False, True):  # 0 and 1 are, too; SGLang takes "no" for true
            raise TypeError(f"interface_v1 must be 0 or 1, got {describe(copies_nothing)}")
        if not options.get("url"):
            raise ValueError(
                "url must name a tier, as slab:/nvme/kv?capacity=2TB, "
                f"got {describe(options.get('url'))}"
            )
        self._config = storage_config
        self._options = options
        self._is_copying = not copies_nothing
        self._url = _own_url(options["url"], storage_config)
        self._page_tokens = 0
        self._buffers: list[_Buffer] = []  # for reads and for writes, where pages are copied
        self._calls: BlockingTier | None = None
        self._is_waiting = False  # for the medium to confirm a `clear`
        self.tier: Tier | None = None
        self.namespace: Namespace | None = None

    # -- what SGLang does once ---------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take note of HiCache's host memory, and open the tier.

        TypeError or ValueError if the memory's pages are not what a tier can move, or `url` has a
        wrong option; TierError if the tier cannot be opened.
        """
        if self.tier is not None:
            raise ValueError("mem_pool_host must be registered once, and the storage has one")
        super().register_mem_pool_host(mem_pool_host)
        self._page_tokens = mem_pool_host.page_size
        if self._is_copying:
            region = self._make_buffers(mem_pool_host)
            page = [region.block_bytes]
        else:
            region = pages_of(mem_pool_host)
            page = [nbytes for _, _, nbytes in region.parts]
        self.namespace = namespace_of(self._config, mem_pool_host, page, self._options)
        tier = open_tier(self._url, self.namespace)
        try:
            tier.attach(region)
            self._calls = BlockingTier(tier)
        except BaseException:
            tier.close(0.0)
            raise
        self.tier = tier
        log.info(
            "kvoffload: tier %r active for HiCache, namespace %s, %s pages found",
            tier.name,
            self.namespace.fingerprint.hex(),
            self._calls.stats().get("restored", "unknown"),
        )

    def _make_buffers(self, mem_pool_host: Any) -> Region:
        """Allocate memory through which pages are copied: half for reads, half for writes."""
        try:
            page = mem_pool_host.get_dummy_flat_data_page()
        except NotImplementedError as error:
            raise ValueError(
                f"host memory must have flat pages, got {type(mem_pool_host).__name__}: {error}"
            ) from error
        nbytes = page.numel() * page.element_size()
        count = max(1, COPY_BYTES // nbytes)
        region = Region.allocate(2 * count, nbytes)
        self._buffers = [_Buffer(region, range(start, start + count)) for start in (0, count)]
        return region

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take note of a pool that SGLang keeps beside; ValueError if it is not the KV cache.

        Other state of the model would have to be stored with it.
        """
        if host_pool_name != PoolName.KV:
            self.close()  # SGLang gives up on it
            raise ValueError(
                "host_pool_name must be 'kv': models with state besides the KV cache are not "
                f"supported, got {describe(str(host_pool_name))}"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def close(self) -> None:
        """Close the tier; a second call does nothing.

        TierError if a call of the kernel's has not returned that may still write to HiCache's
        memory.
        """
        calls, self._calls = self._calls, None
        if calls is None:
            return
        tier, self.tier = self.tier, None
        if not calls.close(CLOSE_S) and tier is not None and tier.direct:
            raise TierError(
                f"tier {tier.name!r} has a call that has not returned in {CLOSE_S:.0f} s; it may "
                "still use HiCache's memory"
            )

    def clear(self) -> bool:
        """Drop everything, as after an update of the weights.

        SGLang calls it for ``/clear_hicache_storage_backend`` only, not when weights change. False,
        and logged, where the medium has not confirmed it: nothing is stored or loaded until it has.
        """
        calls = self._calls
        if calls is None:
            return False
        self._is_waiting = True
        self._is_waiting = not calls.forget()
        if self._is_waiting:
            log.error(
                "the tier's medium has not confirmed that everything was dropped; nothing is "
                "stored or loaded until it has"
            )
        return not self._is_waiting

    def _serving(self) -> BlockingTier | None:
        """Return the tier's calls; None where it is closed or has not confirmed a `clear`."""
        calls = self._calls
        if calls is not None and self._is_waiting:
            if not calls.has_forgotten():
                return None
            self._is_waiting = False
            log.warning("the tier's medium has confirmed that everything was dropped")
        return calls

    def stats(self) -> dict[str, int]:
        """Return the tier's counters since it was opened, and present sizes."""
        calls = self._calls
        return {} if calls is None else calls.stats()

    # -- what is there -----------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(
        self,
        keys: list[str],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> int:
        """Return how many pages are there from the first on, without a gap."""
        calls = self._serving()
        if calls is None:
            return 0
        stored = [stored_key(key) for key in keys]
        known = calls.lookup(stored)
        count = _leading(known == State.HIT)
        if count < len(stored) and known[count] == State.UNKNOWN:
            count += _leading(calls.query(stored[count:]) == Status.OK)
        return count

    # -- pages of HiCache's memory -----------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into HiCache's memory; say of each whether it was loaded."""
        ids = self._page_ids(keys, host_indices)
        return self._get([stored_key(key) for key in keys], ids, extra_info)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        """Store pages of HiCache's memory; say of each whether nothing is wrong.

        A page that the policy declines is not wrong: SGLang gives up on a prompt at the first that
        is.
        """
        ids = self._page_ids(keys, host_indices)
        return self._put([stored_key(key) for key in keys], ids)

    def _page_ids(self, keys: list[str], host_indices: torch.Tensor) -> npt.NDArray[np.int64]:
        """Return the blocks of pages; ValueError if the indices are not as many as their tokens."""
        if self._is_copying:
            raise TierError("interface_v1 must be 1 for pages of HiCache's memory, got 0")
        num_tokens = len(keys) * self._page_tokens
        if host_indices.numel() != num_tokens:
            raise ValueError(
                f"host_indices must be {num_tokens}, {self._page_tokens} for each of {len(keys)} "
                f"keys, got {host_indices.numel()}"
            )
        first: npt.NDArray[np.int64] = host_indices[:: self._page_tokens].numpy()
        return first // self._page_tokens

    # -- pages that are copied ---------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load one page into a tensor of its size; return it, or None."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors of their size; return each, or None."""
        targets = self._tensors("target_locations", keys, target_locations)
        stored = [stored_key(key) for key in keys]
        found: list[torch.Tensor | None] = []
        while len(found) < len(stored):
            buffer = self._buffers[0]
            with buffer.lock:
                part = slice(len(found), len(found) + len(buffer.ids))
                are_there = self._get(stored[part], buffer.ids[: len(stored[part])])
                for index, is_there in enumerate(are_there):
                    target = targets[len(found)]
                    if is_there:
                        _bytes_of(target)[:] = buffer.page(index)
                    found.append(target if is_there else None)
        return found

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one page, a tensor; say whether nothing is wrong."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store pages, tensors; say whether nothing is wrong."""
        pages = self._tensors("values", keys, values)
        stored = [stored_key(key) for key in keys]
        done = 0
        is_right = True
        while done < len(stored) and is_right:
            buffer = self._buffers[1]
            with buffer.lock:
                part = stored[done : done + len(buffer.ids)]
                for index, page in enumerate(pages[done : done + len(part)]):
                    buffer.page(index)[:] = _bytes_of(page)
                is_right = all(self._put(part, buffer.ids[: len(part)]))
            done += len(part)
        return is_right

    def _tensors(self, name: str, keys: list[str], tensors: Any) -> list[torch.Tensor]:
        """Check tensors that are copied from or to.

        TypeError or ValueError if one is no tensor of a page's size; TierError with
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
        nbytes = self._buffers[0].region.block_bytes if self._buffers else 0
        for index, tensor in enumerate(pages):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}[{index}] must be a tensor, got {describe(tensor)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}[{index}] must be contiguous")
            found = tensor.numel() * tensor.element_size()
            if found != nbytes:
                raise ValueError(f"{name}[{index}] must have {nbytes} bytes, got {found}")
        return pages

    # -- transfers ---------------------------------------------------------------------------

    def _get(
        self,
        stored: list[bytes],
        ids: npt.NDArray[np.int64],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        calls = self._serving()
        if calls is None or not stored:
            return [False] * len(stored)
        are_there: list[bool] = (calls.get(stored, ids) == Status.OK).tolist()
        if any(are_there):  # one access; where SGLang tells what is before, that is as recent
            there = [key for key, is_there in zip(stored, are_there, strict=True) if is_there]
            calls.touch([*_prefix(extra_info), *there])
        return are_there

    def _put(self, stored: list[bytes], ids: npt.NDArray[np.int64]) -> list[bool]:
        calls = self._serving()
        if calls is None or not stored:
            return [False] * len(stored)
        done = calls.put(stored, ids)
        are_ok = done.status == Status.OK
        if not done.nbytes and are_ok.all():  # all were there: they were asked for once more
            calls.touch(stored)
        are_right: list[bool] = (are_ok | (done.status == Status.DECLINED)).tolist()
        return are_right


class _Buffer:
    """Pages of one's own, blocks of a region, which a transfer is copied through."""

    def __init__(self, region: Region, ids: range) -> None:
        self.region = region
        self.ids = np.array(ids, np.int64)
        self.lock = threading.Lock()

    def page(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a page."""
        (view,) = self.region.views(int(self.ids[index]))
        return np.frombuffer(view, np.uint8)


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a contiguous tensor's memory as bytes."""
    array: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[bytes]:
    """Return the stored keys of the pages before those of a call, where SGLang tells them."""
    keys: Sequence[str] = () if extra_info is None else extra_info.prefix_keys or ()
    return [stored_key(key) for key in keys]


def _leading(are_there: npt.NDArray[np.bool_]) -> int:
    """Return how many are True from the first on."""
    return len(are_there) if are_there.all() else int(are_there.argmin())


def stored_key(key: str) -> bytes:
    """Return the tier's key of a page: the 32 bytes of SGLang's hash, or the text."""
    return bytes.fromhex(key) if _PAGE_HASH.fullmatch(key) else b"text:" + key.encode()


def _own_url(url: str, config: HiCacheStorageConfig) -> str:
    """Return the tier's text for one rank; ValueError if ranks would have to share a local one."""
    kind, colon, rest = url.partition(":")
    if kind not in _LOCAL:
        return url
    if config.is_mla_model and config.tp_size > 1:
        raise ValueError(
            f"url must name a tier that the {config.tp_size} ranks of an MLA model share, as "
            f"dir:/mnt/kv?capacity=2TB, got {kind}:"
        )
    location, question, options = rest.partition("?")
    if kind == "slab" and location and config.dp_rank:
        location = f"{location.rstrip('/')}/replica{config.dp_rank}"
    return f"{kind}{colon}{location}{question}{options}"


def pages_of(mem_pool_host: Any) -> Region:
    """Return HiCache's host memory as a region whose blocks are its pages.

    ValueError if its pages do not lie in one tensor at equal distances.
    """
    layout = mem_pool_host.layout
    if not str(layout).startswith("page_"):
        raise ValueError(
            "hicache_mem_layout must be page_first, page_first_direct or page_head with "
            f"interface_v1 1, got {describe(layout)}"
        )
    buffer = mem_pool_host.kv_buffer
    if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous():
        raise ValueError(
            f"host memory must be one tensor, got {type(mem_pool_host).__name__} of another form"
        )
    page_tokens, num_pages = mem_pool_host.page_size, mem_pool_host.page_num
    address = buffer.data_ptr()

    def offsets_of(page: int) -> list[int]:
        first = page * page_tokens
        tokens = torch.arange(first, first + page_tokens)
        pointers, _ = mem_pool_host.get_page_buffer_meta(tokens)
        return [pointer - address for pointer in pointers]

    try:
        _, sizes = mem_pool_host.get_page_buffer_meta(torch.arange(page_tokens))
        start = offsets_of(0)
        second, last = (offsets_of(min(page, num_pages - 1)) for page in (1, num_pages - 1))
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"interface_v1 must be 0 for the layout {describe(layout)} of "
            f"{type(mem_pool_host).__name__}, got 1"
        ) from error
    parts = []
    for offset, next_offset, last_offset, nbytes in zip(start, second, last, sizes, strict=True):
        stride = next_offset - offset if num_pages > 1 else nbytes
        if last_offset != offset + (num_pages - 1) * stride:
            raise ValueError(
                "interface_v1 must be 0 for host memory whose pages are not at equal distances, "
                f"got 1 and {type(mem_pool_host).__name__}"
            )
        parts.append((offset, stride, nbytes))
    return Region.of_parts(_bytes_of(buffer), parts, num_pages)


def namespace_of(
    config: HiCacheStorageConfig, mem_pool_host: Any, page: list[int], options: dict[str, Any]
) -> Namespace:
    """Return what the bytes of a page depend on; `page` has the bytes of each of its parts.

    That includes the rank, unless the ranks of an MLA model have the same bytes.
    """
    served = _served_model()
    path = served.get("model_path") or config.model_name or ""
    weights = options.get("weights_id")
    if weights is None:
        weights = weights_identity(path, options.get("revision") or served.get("revision"))
    parallel: dict[str, Any] = {
        "pipeline": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size],
        "decode_context": [config.dcp_rank, config.dcp_size],
    }
    if not config.is_mla_model:
        parallel["tensor"] = [config.tp_rank, config.tp_size]
    return Namespace(
        model=config.model_name or path,
        block_bytes=sum(page),
        engine=f"sglang {'.'.join(sglang_version.split('.')[:3])}",
        weights=weights,
        kv_dtype=str(mem_pool_host.dtype).removeprefix("torch."),
        layout={
            "memory": mem_pool_host.layout,
            "pool": type(mem_pool_host).__name__,
            "page": page,
            "layers": [mem_pool_host.start_layer, mem_pool_host.end_layer],
            "asked_dtype": served.get("kv_cache_dtype"),  # 8-bit types have the same storage
            "quantization": served.get("quantization"),
        },
        tokens_per_hash=mem_pool_host.page_size,
        tokens_per_block=mem_pool_host.page_size,
        parallel=parallel,
        salt=options.get("salt") or "",
    )


def _served_model() -> dict[str, str | None]:
    """Return what SGLang was told about the model; nothing where no engine runs."""
    try:
        model = runtime_context.get_model()
    except ValueError:
        return {}
    names = ("model_path", "revision", "kv_cache_dtype", "quantization")
    values = {name: getattr(model, name, None) for name in names}
    return {name: None if value is None else str(value) for name, value in values.items()}
