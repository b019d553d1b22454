"""The contract of backends, which allocate slots for blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic

from kvoffload._checks import check_block_size, check_instance
from kvoffload.errors import not_initialised
from kvoffload.types import BlockStatus, Spec_co


class Backend(ABC, Generic[Spec_co]):
    """The owner of an offload medium, which allocates and frees its slots.

    To write a backend, subclass this class: implement the three abstract methods, and
    `get_load_store_spec` for the new medium. A manager keeps the status objects that
    `allocate_blocks` returned and passes the same objects to `free` and `get_load_store_spec`. For
    type checkers, the specs of ``Backend[MySpec]``, and of a manager over it, have the type
    ``MySpec``.

    Parameters
    ----------
    block_size : int
        Tokens per block, >= 1.
    medium : str
        Name of the medium, as given in events.

    Attributes
    ----------
    block_size : int
        Tokens per block.
    medium : str
        Name of the medium.

    Raises
    ------
    TypeError, ValueError
        If `block_size` is not an integer >= 1, or `medium` not a string.

    Notes
    -----
    Thread-safety: callers serialise.
    """

    block_size: int
    medium: str

    def __init__(self, block_size: int, medium: str) -> None:
        checked = check_block_size(block_size)
        self.medium = check_instance("medium", medium, str, "a string")
        self.block_size = checked

    def __getattr__(self, name: str) -> Any:
        # Reached only for a missing attribute: before __init__ has run, or an unknown name.
        if name in {"block_size", "medium"}:
            raise not_initialised("backend")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that `allocate_blocks` can allocate now."""

    @abstractmethod
    def allocate_blocks(self, hashes: Sequence[bytes]) -> list[BlockStatus]:
        """Give each hash a slot.

        Parameters
        ----------
        hashes : sequence of BlockHash
            Blocks to store, at most `get_num_free_blocks` of them.

        Returns
        -------
        list of BlockStatus
            One new pending status per hash, in the same order, no object twice.
        """

    @abstractmethod
    def free(self, block: BlockStatus) -> None:
        """Free the slot of a block that `allocate_blocks` returned."""

    def get_load_store_spec(
        self, hashes: Iterable[bytes], blocks: Iterable[BlockStatus]
    ) -> Spec_co:
        """Return the location of `blocks`, in their order. Not implemented by default."""
        raise NotImplementedError(f"{type(self).__name__} has no get_load_store_spec()")
