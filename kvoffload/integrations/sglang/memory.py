"""HiCache's host memory as regions: its pages are blocks.

Structure
    SGLang has the addresses and sizes of a page's parts, and the tensors that contain them. If the
    pages of each part are equally spaced, they are the blocks of a region that spans those tensors:
    keys and values, or the states of Mamba, are parts of one block wherever they are.
Invariants
    Every part of every page is in one of the tensors, which the region keeps alive. Memory between
    the tensors is never touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.errors import describe
from kvoffload.tiers import Region


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a contiguous tensor's memory as bytes."""
    array: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array


def memory_of(host_pool: Any) -> list[torch.Tensor]:
    """Return the tensors with a host memory's pages; an empty list if it has no memory."""
    buffers = getattr(host_pool, "kv_buffer", ())
    if isinstance(buffers, torch.Tensor):
        return [buffers]
    list_all = getattr(host_pool, "get_hybrid_pool_buffer", None)
    if buffers is not None and list_all is not None:
        buffers = list_all()
    return [tensor for tensor in buffers or () if tensor is not None and tensor.numel()]


def pages_of(host_pool: Any) -> Region:
    """Return the KV cache's host memory as a region whose blocks are its pages.

    Raise ValueError, which names an option, if the layout scatters pages or they cannot be moved.
    """
    layout = host_pool.layout
    if not str(layout).startswith("page_"):
        raise ValueError(
            "hicache_mem_layout must be page_first, page_first_direct or page_head with "
            f"interface_v1 1, got {describe(layout)}"
        )
    try:
        return pages_by_address(host_pool)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"interface_v1 must be 0 for the layout {describe(layout)} of "
            f"{type(host_pool).__name__}, got 1: {error}"
        ) from error


def pages_by_address(host_pool: Any) -> Region:
    """Return a host memory as a region whose blocks are its pages.

    Raise NotImplementedError or ValueError if SGLang does not give the addresses of a page's parts,
    or they are not equally spaced.
    """
    tensors = memory_of(host_pool)
    if not tensors or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("host memory must be contiguous tensors")
    page_tokens = host_pool.page_size
    num_pages: int = host_pool.size // page_tokens

    def parts_of(page: int) -> tuple[list[int], list[int]]:
        first = page * page_tokens
        found = host_pool.get_page_buffer_meta(torch.arange(first, first + page_tokens))
        if not found or not found[0] or len(found[0]) != len(found[1]):
            raise ValueError("pages must have an address and a size for each part")
        addresses, sizes = found
        return addresses, sizes

    start, sizes = parts_of(0)
    second, last = (parts_of(min(page, num_pages - 1))[0] for page in (1, num_pages - 1))
    memory = _Span(tensors)
    parts = []
    for address, next_address, last_address, nbytes in zip(start, second, last, sizes, strict=True):
        stride = next_address - address if num_pages > 1 else nbytes
        if last_address != address + (num_pages - 1) * stride:
            raise ValueError("pages must be at equal distances")
        if not memory.holds(min(address, last_address), max(address, last_address) + nbytes):
            raise ValueError("pages must be in the tensors of the host memory")
        parts.append((address - memory.address, stride, nbytes))
    return Region.of_parts(np.asarray(memory), parts, num_pages)


class _Span:
    """The address range that spans some tensors, for NumPy to view as bytes.

    Only the bytes of the tensors may be accessed: the process may not own the others.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors  # kept alive with this object's arrays
        self._pieces = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
            for tensor in tensors
        )
        self.address = self._pieces[0][0]
        self.__array_interface__ = {
            "version": 3,
            "data": (self.address, False),
            "shape": (max(stop for _, stop in self._pieces) - self.address,),
            "typestr": "|u1",
        }

    def holds(self, start: int, stop: int) -> bool:
        """Return whether one of the tensors has all bytes between two addresses."""
        return any(first <= start and stop <= last for first, last in self._pieces)
