"""One of SGLang's host memories and the tier that keeps its pages.

Structure
    SGLang has a host memory for the KV cache, and one per kind of state that a model keeps beside
    it; each is a *pool* here, with its own tier and region. If pages move without a copy, the
    region is the host memory. Otherwise it is memory of this object through which pages are copied,
    in the form that SGLang flattens them to.
Invariants
    Data that is not certainly the stored page is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.integrations.tiers import close, opening
from kvoffload.tiers import Namespace, Region, State, Status, open_tier
from kvoffload.tiers.remote.objects import PROBES

from .blocking import BlockingTier
from .memory import bytes_of

#: The logger of this integration.
log = logging.getLogger("kvoffload.sglang")

Result = TypeVar("Result")
COPY_BYTES = 64 * 2**20
"""Bytes of each of the two buffers for pages that are copied."""


class Copies:
    """Memory through which a pool's pages are copied, half for reads and half for writes.

    Parameters
    ----------
    host_pool : HostKVCache
        The host memory.

    Raises
    ------
    ValueError
        If its pages cannot be copied.
    """

    def __init__(self, host_pool: Any) -> None:
        try:
            page = host_pool.get_dummy_flat_data_page()
        except NotImplementedError as error:
            raise ValueError(
                f"host memory must have flat pages, got {type(host_pool).__name__}: {error}"
            ) from error
        self.dtype: torch.dtype = page.dtype
        nbytes = page.numel() * page.element_size()
        count = max(1, COPY_BYTES // nbytes)
        self.region = Region.allocate(2 * count, nbytes)
        self.parts = self.region.parts
        self.ids = [np.arange(start, start + count) for start in (0, count)]
        self.locks = [threading.Lock(), threading.Lock()]

    def page(self, block_id: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a block."""
        (view,) = self.region.views(block_id)
        return np.frombuffer(view, np.uint8)


class Pool:
    """The pages of a host memory, in a tier.

    Parameters
    ----------
    name : str
        SGLang's name of the pool.
    host_pool : HostKVCache
        The host memory.
    url : str
        The tier, as for `open_tier`.
    namespace : Namespace
        The namespace of the bytes.
    generation : str
        The weights' name; see `Tier.forget`.
    region : Region
        The host memory, whose pages move without a copy.

    Attributes
    ----------
    tier : Tier
        The tier.
    calls : BlockingTier
        Its calls, which any thread may make.

    Raises
    ------
    TypeError, ValueError, TierError
        Like `open_tier`.
    """

    def __init__(
        self,
        name: str,
        host_pool: Any,
        url: str,
        namespace: Namespace,
        generation: str,
        *,
        region: Region,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.page_tokens: int = host_pool.page_size
        self._host_pool = host_pool
        with opening(open_tier(url, namespace, generation)) as self.tier:
            self.tier.attach(region)
            self.calls = BlockingTier(self.tier)
        log.info(
            "kvoffload: tier %r active for HiCache's pool %r, namespace %s, %s pages found",
            self.tier.name,
            name,
            namespace.fingerprint.hex(),
            self.calls.stats().get("restored", "unknown"),
        )

    def close(self) -> None:
        """Close the tier.

        Raise TierError if a system call that may still use host memory has not returned.
        """
        close(self.tier, "HiCache's", self.calls.close)

    def forget(self, generation: str) -> bool:
        """Have pages of another generation from now on; return whether that is confirmed."""
        return bool(self._try(self.calls.forget, generation))

    # -- lookups -----------------------------------------------------------------------------

    def num_leading(self, keys: list[bytes]) -> int:
        """Return the number of leading pages that are present without a gap."""
        known = self._try(self.calls.lookup, keys) if keys else None
        if known is None:
            return 0
        count = _leading(known == State.HIT)
        if count < len(keys) and known[count] == State.UNKNOWN:
            answers = self._try(self.calls.query, keys[count:])
            count += 0 if answers is None else _leading(answers == Status.OK)
        return count

    def are_there(self, keys: list[bytes]) -> npt.NDArray[np.bool_]:
        """Return whether each page is present, ``(n,)`` bool; there may be gaps."""
        known = self._try(self.calls.lookup, keys) if keys else None
        if known is None:
            return np.zeros(len(keys), np.bool_)
        found: npt.NDArray[np.bool_] = known == State.HIT
        unknown = np.flatnonzero(known == State.UNKNOWN)
        # An object store treats the keys of a longer query as a chain without gaps.
        for start in range(0, len(unknown), PROBES):
            places = unknown[start : start + PROBES]
            answers = self._try(self.calls.query, [keys[place] for place in places])
            found[places] = answers == Status.OK  # False if there are none
        return found

    # -- transfers ---------------------------------------------------------------------------

    def load(
        self, keys: list[bytes], host_indices: torch.Tensor, prefix: Sequence[bytes] = ()
    ) -> list[bool]:
        """Load pages into host memory; return per page whether it was loaded.

        Parameters
        ----------
        keys : list of bytes
            The pages.
        host_indices : torch.Tensor
            Tokens of the host memory, `page_tokens` per page.
        prefix : sequence of bytes
            The preceding pages of the prompt, which are used with them.
        """
        return self._get(keys, self._page_ids(host_indices), prefix)

    def store(self, keys: list[bytes], host_indices: torch.Tensor) -> list[bool]:
        """Store pages of host memory; return per page whether there was no error.

        Arguments as for `load`. A page that the policy declines is not an error.
        """
        return self._put(keys, self._page_ids(host_indices))

    def _page_ids(self, host_indices: torch.Tensor) -> npt.NDArray[np.int64]:
        first: npt.NDArray[np.int64] = host_indices[:: self.page_tokens].numpy()
        return first // self.page_tokens

    def _get(
        self, keys: list[bytes], ids: npt.NDArray[np.int64], prefix: Sequence[bytes]
    ) -> list[bool]:
        found = self._try(self.calls.get, keys, ids) if keys else None
        if found is None:
            return [False] * len(keys)
        are_there: list[bool] = (found == Status.OK).tolist()
        if any(are_there):  # one access; the preceding pages that SGLang gives become as recent
            there = [key for key, is_there in zip(keys, are_there, strict=True) if is_there]
            self._try(self.calls.touch, [*prefix, *there])
        return are_there

    def _put(self, keys: list[bytes], ids: npt.NDArray[np.int64]) -> list[bool]:
        done = self._try(self.calls.put, keys, ids) if keys else None
        if done is None:
            return [False] * len(keys)
        are_ok = done.status == Status.OK
        if not done.nbytes and are_ok.all():  # all were present, so this is another use
            self._try(self.calls.touch, keys)
        are_right: list[bool] = (are_ok | (done.status == Status.DECLINED)).tolist()
        return are_right

    def _try(self, call: Callable[..., Result], *arguments: Any) -> Result | None:
        """Return the result of a call of the tier; if it raises, log that and return None."""
        try:
            return call(*arguments)
        except Exception:  # a user's policy may raise any exception
            log.exception("a call of the tier of pool %r failed", self.name)
            return None


class CopiedPool(Pool):
    """The pages of a host memory without addresses, which SGLang flattens.

    Parameters
    ----------
    name, host_pool, url, namespace, generation
        As for `Pool`.
    copies : Copies
        Memory through which pages are copied.
    """

    def __init__(self, *arguments: Any, copies: Copies) -> None:
        super().__init__(*arguments, region=copies.region)
        self.copies = copies

    def load(
        self, keys: list[bytes], host_indices: torch.Tensor, prefix: Sequence[bytes] = ()
    ) -> list[bool]:
        """Load pages into host memory; return per page whether it was loaded."""
        first = host_indices[:: self.page_tokens].tolist()

        def unflatten(index: int, page: npt.NDArray[np.uint8]) -> None:
            flat = torch.from_numpy(page).view(self.copies.dtype)
            self._host_pool.set_from_flat_data_page(first[index], flat)

        return self.copy_out(keys, unflatten, prefix)

    def store(self, keys: list[bytes], host_indices: torch.Tensor) -> list[bool]:
        """Store pages of host memory; return per page whether there was no error."""
        first = host_indices[:: self.page_tokens].tolist()

        def flatten(index: int) -> npt.NDArray[np.uint8]:
            return bytes_of(self._host_pool.get_data_page(first[index], flat=True).contiguous())

        return self.copy_in(keys, flatten)

    def copy_out(
        self,
        keys: list[bytes],
        take: Callable[[int, npt.NDArray[np.uint8]], None],
        prefix: Sequence[bytes] = (),
    ) -> list[bool]:
        """Load pages and pass each that is present to `take`, with its index in the keys."""
        copies, loaded = self.copies, list[bool]()
        while len(loaded) < len(keys):
            start = len(loaded)
            with copies.locks[0]:
                ids = copies.ids[0][: len(keys) - start]
                found = self._get(keys[start : start + len(ids)], ids, prefix)
                for index in np.flatnonzero(found).tolist():
                    try:
                        take(start + index, copies.page(int(ids[index])))
                    except Exception:  # noqa: PERF203  (the other pages can be written)
                        log.exception("a page of pool %r is not loaded", self.name)
                        found[index] = False
            loaded += found
        return loaded

    def copy_in(
        self, keys: list[bytes], page_of: Callable[[int], npt.NDArray[np.uint8]]
    ) -> list[bool]:
        """Store the pages that `page_of` returns for indexes in the keys.

        If one cannot be stored, the pages after its buffer are not tried; if one cannot be read,
        nor are those after it.
        """
        copies, stored = self.copies, list[bool]()
        num_read = len(keys)
        while len(stored) < num_read and all(stored):
            start = len(stored)
            with copies.locks[1]:
                ids = copies.ids[1][: num_read - start]
                for index, block_id in enumerate(ids.tolist()):
                    try:
                        copies.page(block_id)[:] = page_of(start + index)
                    except Exception:  # noqa: PERF203
                        log.exception("a page of pool %r is not stored", self.name)
                        num_read, ids = start + index, ids[:index]
                        break
                stored += self._put(keys[start : start + len(ids)], ids)
        return stored + [False] * (len(keys) - len(stored))


def _leading(are_there: npt.NDArray[np.bool_]) -> int:
    """Return the number of leading True values."""
    return len(are_there) if are_there.all() else int(are_there.argmin())
