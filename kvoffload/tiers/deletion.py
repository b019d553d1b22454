"""The deletion of what tiers keep on a medium, for privacy or for space; no tier is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from .generation import NUMBER_BYTES, Generation
from .namespace import is_hex
from .options import BUILT_IN, split_url, unknown_kind

KEEPING = tuple(kind for kind in BUILT_IN if kind != "memory")
"""The kinds of tiers whose blocks outlast the process."""


class Deleted(NamedTuple):
    """What was deleted: blocks, and their bytes on the medium."""

    blocks: int
    nbytes: int


def read_address(url: str, kinds: Sequence[str] = KEEPING) -> tuple[str, str, dict[str, str]]:
    """Split the address of a tier of one of some kinds into its kind, place and options.

    Raises TypeError or ValueError like `open_tier`, also without a place.
    """
    kind, place, options = split_url(url)
    if kind not in kinds:
        raise unknown_kind(url, kinds)
    if not place:  # such as that of an unset variable, which would be the present folder
        raise ValueError(f"url must name a place, as slab:/nvme/kv, got '{kind}:'")
    return kind, place, options


def delete_blocks(url: str, generation: str | None = None) -> Deleted:
    """Delete the blocks at an address, those of all namespaces.

    Parameters
    ----------
    url : str
        As for `open_tier`; of its options, only those that lead to the medium count.
    generation : str, optional
        Only blocks of this generation; by default all. In a directory also the number that
        `find_blocks` has for it.

    Returns
    -------
    Deleted

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or tiers of this kind keep nothing.
    TierError, OSError
        If something cannot be deleted; other blocks may be gone.

    Notes
    -----
    Complexity: O(blocks). Engines may use a shared medium meanwhile; a slab must not be in use.
    """
    kind, place, options = read_address(url)
    numbers = [None if generation is None else Generation.of(generation).number]
    if generation is not None and kind == "dir" and is_hex(generation, NUMBER_BYTES):
        numbers.append(int(generation, 16))  # it may be a name, too
    delete: Callable[..., Iterator[Deleted]] = import_module(BUILT_IN[kind].module).delete_blocks
    parts = [part for number in numbers for part in delete(f"{kind}:{place}", options, number)]
    return Deleted(sum(part.blocks for part in parts), sum(part.nbytes for part in parts))
