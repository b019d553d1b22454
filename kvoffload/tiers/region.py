"""Regions: host memory in equal blocks, which tiers move.

A block is one piece of memory, or several *parts* a stride apart, such as one per layer of a model:
block ``i`` of ``Region.of_parts(buffer, [(offset, stride, nbytes), ...])`` is the bytes
``offset + i * stride ... + nbytes`` of every part, in the order of the parts. Memory whose
allocator returns pieces of several sizes has a region of overlapping *windows* per size: block
``i`` of ``Region.windows(buffer, block_bytes, step)`` starts at ``i * step``.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload._checks import check_int
from kvoffload.errors import describe

ALIGNMENT = 4096
"""Addresses and sizes that are multiples of this can be read and written without a copy."""

MAX_BLOCK_BYTES = 2**32 - 1
"""Limit of a block's size, which is stored in 32 bits."""

LEAST_BUFFERS = 2

Part = tuple[int, int, int]


def round_up(nbytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`, bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Region:
    """Host memory of n equal blocks.

    Parameters
    ----------
    buffer : buffer
        Writable, C-contiguous memory: a ``memoryview``, an array, an ``mmap``. It is kept alive and
        its size must not change. A remainder smaller than a block is not used.
    block_bytes : int
        Bytes per block, ``1 ... 2**32 - 1``.

    Attributes
    ----------
    block_bytes : int
        Bytes per block, of all parts.
    num_blocks : int
        Number of blocks.
    parts : tuple of (int, int, int)
        Offset of block 0, stride from block to block, and size of each part, in bytes.
    address : int
        Address of the buffer.
    nbytes : int
        Bytes of the buffer.

    Raises
    ------
    TypeError, ValueError
        If the buffer is not writable, C-contiguous memory, or a size is out of bounds.
    """

    __slots__ = ("_array", "_buffer", "address", "block_bytes", "nbytes", "num_blocks", "parts")

    def __init__(self, buffer: Any, block_bytes: int) -> None:
        block_bytes = check_int("block_bytes", block_bytes, 1, MAX_BLOCK_BYTES)
        self._set(buffer, ((0, block_bytes, block_bytes),))

    @classmethod
    def allocate(cls, num_blocks: int, block_bytes: int) -> Region:
        """Make a region of new, zeroed memory with adjacent blocks.

        The memory is aligned to a page, and so are blocks if `block_bytes` is a multiple of 4096.

        Raises
        ------
        MemoryError
            If there is not enough.
        """
        num_blocks = check_int("num_blocks", num_blocks, 1)
        block_bytes = check_int("block_bytes", block_bytes, 1, MAX_BLOCK_BYTES)
        return cls(allocate(num_blocks * block_bytes), block_bytes)

    @classmethod
    def of_parts(cls, buffer: Any, parts: Iterable[Part], num_blocks: int | None = None) -> Region:
        """Make a region whose blocks have several parts.

        Parameters
        ----------
        buffer : buffer
            As for `Region`.
        parts : iterable of (int, int, int)
            ``(offset, stride, nbytes)`` of each part: block ``i`` has the `nbytes` bytes from
            ``offset + i * stride`` on.
        num_blocks : int, optional
            Number of blocks; by default as many as the buffer holds.

        Raises
        ------
        TypeError, ValueError
            If a part does not fit, or blocks overlap.
        """
        region = cls.__new__(cls)
        checked = []
        for index, part in enumerate(_elements("parts", parts)):
            name = f"parts[{index}]"
            offset, stride, nbytes = _elements(name, part, 3)
            checked.append(
                (
                    check_int(f"{name} offset", offset, 0),
                    check_int(f"{name} stride", stride, 1),
                    check_int(f"{name} nbytes", nbytes, 1, MAX_BLOCK_BYTES),
                )
            )
        if num_blocks is not None:
            num_blocks = check_int("num_blocks", num_blocks, 1)
        region._set(buffer, tuple(checked), num_blocks)
        return region

    @classmethod
    def windows(cls, buffer: Any, block_bytes: int, step: int) -> Region:
        """Make a region whose blocks start at every multiple of a step, and may overlap.

        The caller must not submit a block while a job owns one that overlaps it, unless both jobs
        only read the blocks.

        Parameters
        ----------
        buffer : buffer
            As for `Region`.
        block_bytes : int
            Bytes per block, ``1 ... 2**32 - 1``.
        step : int
            Bytes from the start of a block to the start of the next, >= 1: block ``i`` has the
            `block_bytes` bytes from ``i * step`` on. The buffer is filled with blocks.

        Raises
        ------
        TypeError, ValueError
            If the buffer is not writable, C-contiguous memory, or a size is out of bounds.
        """
        block_bytes = check_int("block_bytes", block_bytes, 1, MAX_BLOCK_BYTES)
        step = check_int("step", step, 1)
        region = cls.__new__(cls)
        region._set(buffer, ((0, step, block_bytes),), may_overlap=True)
        return region

    def _set(
        self,
        buffer: Any,
        parts: tuple[Part, ...],
        num_blocks: int | None = None,
        *,
        may_overlap: bool = False,
    ) -> None:
        view = _view("buffer", buffer)
        if view.readonly:
            raise ValueError("buffer must be writable")
        if not view.c_contiguous:
            raise ValueError("buffer must be C-contiguous")
        if not parts:
            raise ValueError("parts must not be empty")
        self.nbytes = view.nbytes
        fitting = min(
            (self.nbytes - offset - nbytes) // stride + 1 if self.nbytes >= offset + nbytes else 0
            for offset, stride, nbytes in parts
        )
        if fitting < 1 or (num_blocks is not None and num_blocks > fitting):
            raise ValueError(
                f"buffer must hold {num_blocks or 1} or more blocks, "
                f"got {self.nbytes} bytes, {max(fitting, 0)} blocks"
            )
        self.num_blocks = fitting if num_blocks is None else num_blocks
        self.block_bytes = sum(nbytes for _, _, nbytes in parts)
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise ValueError(
                f"a block must have at most {MAX_BLOCK_BYTES} bytes, got {self.block_bytes}"
            )
        self.parts = parts
        if not may_overlap:
            self._refuse_overlaps()
        self._buffer = view.cast("B") if view.nbytes else view
        self._array = np.frombuffer(self._buffer, np.uint8)
        self.address = int(self._array.ctypes.data)

    def _refuse_overlaps(self) -> None:
        if self.num_blocks > 1:
            for index, (_, stride, nbytes) in enumerate(self.parts):
                if stride < nbytes:
                    raise ValueError(f"parts[{index}] stride must be >= {nbytes}, got {stride}")
        for (index, part), (other_index, other) in combinations(enumerate(self.parts), 2):
            if _overlap(part, other, self.num_blocks):
                raise ValueError(f"parts[{index}] and parts[{other_index}] must not overlap")

    @property
    def aligned(self) -> bool:
        """Whether every part of every block can be read and written without a copy."""
        return self.address % ALIGNMENT == 0 and all(
            value % ALIGNMENT == 0
            for offset, stride, nbytes in self.parts
            for value in (offset, stride if self.num_blocks > 1 else 0, nbytes)
        )

    def views(self, block_id: int) -> list[memoryview]:
        """Return the memory of a block, one view per part.

        Raises
        ------
        TypeError, ValueError
            If there is no such block.
        """
        block_id = check_int("block_id", block_id, 0, self.num_blocks - 1)
        return self.views_unchecked(block_id)

    def views_unchecked(self, block_id: int) -> list[memoryview]:
        """Return the memory of a block that exists, one view per part."""
        buffer = self._buffer
        return [
            buffer[offset + block_id * stride : offset + block_id * stride + nbytes]
            for offset, stride, nbytes in self.parts
        ]

    def read(self, block_id: int) -> bytes:
        """Return a copy of a block's bytes."""
        return b"".join(self.views(block_id))

    def write(self, block_id: int, data: bytes | memoryview) -> None:
        """Set a block's bytes.

        Raises
        ------
        TypeError, ValueError
            If there is no such block, or `data` does not have its size.
        """
        views = self.views(block_id)
        source = _view("data", data).cast("B")
        if len(source) != self.block_bytes:
            raise ValueError(f"data must have {self.block_bytes} bytes, got {len(source)}")
        start = 0
        for view in views:
            view[:] = source[start : start + len(view)]
            start += len(view)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The buffer's bytes, ``(nbytes,)`` uint8, not a copy."""
        return self._array

    def __repr__(self) -> str:
        return f"Region({self.num_blocks} blocks of {self.block_bytes} bytes)"


def _view(name: str, value: Any) -> memoryview:
    """Return the memory of an object; TypeError if it has none."""
    try:
        return memoryview(value)
    except TypeError:
        raise TypeError(f"{name} must be memory, such as bytes, got {describe(value)}") from None


def _elements(name: str, value: Any, count: int | None = None) -> list[Any]:
    """Return the elements of an iterable; TypeError, ValueError if it or its length is wrong."""
    try:
        elements = list(value)
    except TypeError:
        raise TypeError(f"{name} must be iterable, got {describe(value)}") from None
    if count is not None and len(elements) != count:
        raise ValueError(f"{name} must have {count} numbers, got {describe(value)}")
    return elements


def _overlap(part: Part, other: Part, num_blocks: int) -> bool:
    """Return whether any block's piece of one part overlaps any block's piece of another."""
    (offset, stride, nbytes), (other_offset, other_stride, other_nbytes) = part, other
    last = num_blocks - 1
    if (
        offset + last * stride + nbytes <= other_offset
        or other_offset + last * other_stride + other_nbytes <= offset
    ):
        return False  # one is entirely after the other
    starts = offset + stride * np.arange(num_blocks)
    other_starts = other_offset + other_stride * np.arange(num_blocks)
    following = np.searchsorted(other_starts, starts)
    before, after = following > 0, following < num_blocks
    reach = other_starts[following[before] - 1] + other_nbytes > starts[before]
    reached = starts[after] + nbytes > other_starts[following[after]]
    return bool(reach.any() or reached.any())


def allocate(nbytes: int) -> memoryview:
    """Return new, zeroed memory, aligned to a page, with huge pages if possible."""
    try:
        if hasattr(mmap, "MAP_ANONYMOUS"):
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(-1, nbytes)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for {nbytes} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def num_buffers(staging_bytes: int, nbytes: int) -> int:
    """Return the number of buffers of `nbytes`, at least 2: to write from, and to read into."""
    return max(LEAST_BUFFERS, staging_bytes // round_up(nbytes))


def staging_buffers(staging_bytes: int, nbytes: int) -> Region:
    """Return new buffers of `nbytes` each, rounded up to a page, as a region.

    They are the tier's own, so that a call that does not return holds none of the caller's memory.
    """
    return Region.allocate(num_buffers(staging_bytes, nbytes), round_up(nbytes))
