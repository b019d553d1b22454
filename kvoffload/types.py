"""The types that policies, managers, backends and the engine exchange.

These types have no twins: both implementations use the same classes.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NewType, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import describe

__all__ = [
    "BlockHash",
    "BlockIDsLoadStoreSpec",
    "BlockStatus",
    "CPULoadStoreSpec",
    "GPULoadStoreSpec",
    "HintGain",
    "HintSource",
    "Hints",
    "LoadStoreSpec",
    "OffloadingEvent",
    "PrepareStoreOutput",
]

MOST_SOURCES = 16
"""Number of distinct sources of hints; one more stands for all others."""

BlockHash = NewType("BlockHash", bytes)
BlockHash.__doc__ = """Name a block by its content and its whole prefix: ``bytes``, not empty.

In practice a 32-byte digest, or 36 bytes with a group suffix. Equal hashes mean equal content *and*
equal prefix.
"""


class BlockStatus(ctypes.Structure):
    """The state of one resident block: 16 bytes, ``ref_cnt`` at offset 0, ``block_id`` at 8.

    A new status is *pending*: a store is writing the block and it cannot be read yet.

    Parameters
    ----------
    block_id : int
        Slot of the block in the offload medium, int64.

    Attributes
    ----------
    ref_cnt : int
        int32: -1 pending, 0 idle (readable and evictable), n > 0 pinned by n loads.
    block_id : int
        int64: the slot index.
    """

    _fields_ = (("ref_cnt", ctypes.c_int32), ("block_id", ctypes.c_int64))

    ref_cnt: int
    block_id: int

    def __init__(self, block_id: int) -> None:
        super().__init__(-1, block_id)

    @property
    def is_ready(self) -> bool:
        """Return whether the block can be read: idle or pinned, not pending."""
        return self.ref_cnt >= 0

    def __repr__(self) -> str:
        return f"BlockStatus(ref_cnt={self.ref_cnt}, block_id={self.block_id})"


#: A row of ``block_table``: the fields of `BlockStatus`, at its offsets.
BLOCK_DTYPE = np.dtype(BlockStatus)


class LoadStoreSpec(ABC):
    """The location of the blocks of one transfer, in the terms of their medium."""

    __slots__ = ()

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium, such as ``"CPU"``."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """The location of blocks as slot indices.

    Parameters
    ----------
    block_ids : sequence of int or numpy.ndarray
        ``(n,)`` slot indices, possibly empty; copied.

    Attributes
    ----------
    block_ids : numpy.ndarray
        ``(n,)`` int64, slot indices in the order of the blocks.

    Raises
    ------
    TypeError
        If an element is not an integer.
    ValueError
        If `block_ids` does not have one dimension.
    """

    __slots__ = ("block_ids",)

    block_ids: npt.NDArray[np.int64]

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        array = np.array(block_ids)
        if array.ndim != 1:
            raise ValueError(f"block_ids must have one dimension, got {array.ndim}")
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"block_ids must hold integers, got {array.dtype}")
        if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
            raise ValueError(f"block_ids must be < 2**63, got {array.max()}")
        self.block_ids = array.astype(np.int64, copy=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block_ids={self.block_ids.tolist()})"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """The location of blocks in host memory."""

    __slots__ = ()

    @staticmethod
    def medium() -> str:
        """Return ``"CPU"``."""
        return "CPU"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """The location of blocks in accelerator memory."""

    __slots__ = ()

    @staticmethod
    def medium() -> str:
        """Return ``"GPU"``."""
        return "GPU"


#: The type of the specs of a backend and of a manager over it. It has a default for type checkers,
#: so that the bare names of generic classes are complete; ``typing`` has defaults from Python 3.13
#: on.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Spec_co = TypeVarWithDefault(
        "Spec_co", bound=LoadStoreSpec, covariant=True, default=LoadStoreSpec
    )
else:
    Spec_co = TypeVar("Spec_co", bound=LoadStoreSpec, covariant=True)


@dataclass(slots=True)
class PrepareStoreOutput(Generic[Spec_co]):
    """The blocks of a store, their slots, and the blocks evicted for them.

    For type checkers, the `store_spec` of ``PrepareStoreOutput[CPULoadStoreSpec]`` is a
    ``CPULoadStoreSpec``.

    Attributes
    ----------
    block_hashes_to_store : list of BlockHash
        The blocks to write, in batch order.
    store_spec : LoadStoreSpec
        The slots to write to, in the same order.
    block_hashes_evicted : list of BlockHash
        The evicted blocks, in eviction order. A compiled manager builds this list at the first
        read.
    """

    block_hashes_to_store: list[BlockHash]
    store_spec: Spec_co
    block_hashes_evicted: list[BlockHash]


@dataclass(slots=True)
class OffloadingEvent:
    """A report of blocks that became readable in the medium or left it.

    Attributes
    ----------
    block_hashes : list of BlockHash
        The blocks: in batch order when stored, in eviction order when removed. A compiled manager
        builds a list of removed blocks at the first read.
    block_size : int
        Tokens per block.
    medium : str
        Name of the medium.
    removed : bool
        True: evicted. False: stored.
    """

    block_hashes: list[BlockHash]
    block_size: int
    medium: str
    removed: bool


MOST_SOURCE_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """A client's statement about its session, given with a request.

    A hint is evidence, not an order: a policy weighs it against what it has learned, and may
    ignore it.

    Attributes
    ----------
    ends : bool
        Whether the session ends, so that those blocks of the request that no other session shares
        are not expected to be used again.
    expect_s : float or None
        Seconds until the next request that begins with these blocks, finite and > 0; None if
        unknown.
    source : str
        The application or tenant that gives the hints, at most 64 characters. A gateway sets it;
        clients must not choose it freely.

    Raises
    ------
    TypeError, ValueError
        If a value breaks its rule; the message names argument, rule and value.
    """

    ends: bool = False
    expect_s: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.ends, bool):
            raise TypeError(f"ends must be True or False, got {describe(self.ends)}")
        expected = self.expect_s
        if expected is not None:
            if isinstance(expected, bool) or not isinstance(expected, int | float):
                raise TypeError(f"expect_s must be a number or None, got {describe(expected)}")
            if not 0 < expected <= sys.float_info.max:
                raise ValueError(f"expect_s must be finite and > 0, got {describe(expected)}")
        if not isinstance(self.source, str):
            raise TypeError(f"source must be a string, got {type(self.source).__name__}")
        if len(self.source) > MOST_SOURCE_CHARACTERS:
            raise ValueError(
                f"source must have at most {MOST_SOURCE_CHARACTERS} characters, "
                f"got {len(self.source)}"
            )


@dataclass(frozen=True, slots=True)
class HintSource:
    """The statistics of one source that says when sessions return.

    Attributes
    ----------
    name : str or None
        The source; None for all sources beyond the distinct ones.
    hints : int
        Requests with a return time from this source; the same hint again at the finish counts once.
    returns : int
        Requests that came back to the blocks of such a request. Several may come back to one.
    factors : tuple of (float, float)
        What was learned of the stated times: pairs of a number of requests per stated second and
        the factor by which a hint multiplies the chance of a return then. All factors are near 1 if
        the hints mean nothing. Only pairs with evidence, in rising order.
    """

    name: str | None
    hints: int
    returns: int
    factors: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class HintGain:
    """The gain by hints of returns: a small cache that heeds them compared with one that does not.

    Both serve the same sample of the blocks of recent requests; a request's weight halves within
    600 requests. Both heed the ends of sessions. The comparison begins when it is first
    read after a hint.

    Attributes
    ----------
    hit_ratio, plain : float
        Share of the sampled blocks of all requests that were hits, with hints and without.
    error : float
        Half-width of the 95 % interval of `gain`.
    followed : bool
        Whether the manager evicts by density now; by recency it does not have this gain.
    """

    hit_ratio: float
    plain: float
    error: float
    followed: bool

    @property
    def gain(self) -> float:
        """Share of the blocks that are hits only thanks to hints; negative if hints harm."""
        return self.hit_ratio - self.plain
