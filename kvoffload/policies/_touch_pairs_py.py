"""One request, one access: tell the second touch of a request from a new one.

A request touches its blocks before it looks them up and again after its store. A policy that counts
accesses counts the first only.

Rule
    A touch repeats the one before it if both batches have the same length, first and last hash, and
    the one before was not a repeat itself. Hashes are prefix-chained, so that the last one stands
    for the whole batch. An empty touch is none.
Limits
    Where requests interleave between the two touches, both count. Where the same request comes
    twice in a row and touches only once, the second does not.
"""

from __future__ import annotations

from kvoffload.types import BlockHash


class TouchPairs:
    """Remember the last touch that began a request."""

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: tuple[int, BlockHash, BlockHash] | None = None

    def repeats(self, batch: list[BlockHash]) -> bool:
        """Tell whether `batch` is the second touch of its request."""
        if not batch:
            return False
        key = (len(batch), batch[0], batch[-1])
        repeated = key == self._first
        self._first = None if repeated else key
        return repeated

    def clear(self) -> None:
        """Forget the last touch."""
        self._first = None
