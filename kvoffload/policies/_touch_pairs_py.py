"""One request, one access: tell the second touch of a request from a new one.

A request touches its blocks before it looks them up and again after its store. A policy that counts
accesses counts the first only.

Rule
    A touch repeats an earlier one if both batches have the same length, first and last hash, and
    the earlier one was not a repeat itself. Hashes are prefix-chained, so that the last one stands
    for the whole batch. An empty touch is none.
    `TouchPairs` compares with the touch just before. `OpenRequests` compares with all requests that
    were touched once, for callers whose requests overlap; that a caller touches twice at all it
    takes from the touches that cannot be anything else.
Limits
    Where requests interleave between the two touches, both count to `TouchPairs`. Where the same
    request comes twice in a row and touches only once, the second does not.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.types import BlockHash

# Requests that are remembered; an engine serves about as many at a time.
_MOST_OPEN = 256

#: Length, first and last hash of a batch.
_Key = tuple[int, BlockHash, BlockHash]


class TouchPairs:
    """Remember the last touch that began a request."""

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: _Key | None = None

    def repeats(self, batch: list[BlockHash]) -> bool:
        """Tell whether `batch` is the second touch of its request."""
        if not batch:
            return False
        key = _key_of(batch)
        repeated = key == self._first
        self._first = None if repeated else key
        return repeated

    def clear(self) -> None:
        """Forget the last touch."""
        self._first = None


class OpenRequests:
    """Remember the last requests that were touched once so far."""

    __slots__ = ("_confirmed", "_next", "_open")

    def __init__(self) -> None:
        self._open: list[_Key | None] = [None] * _MOST_OPEN
        self._next = 0  # the place of the oldest
        self._confirmed = 0  # second touches that were certain, less requests without one

    def repeats(self, batch: list[BlockHash], is_certain: Callable[[], bool]) -> bool:
        """Tell whether `batch`, which is not empty, is the second touch of its request.

        `is_certain` says whether it cannot be the first one of another request for the same. Where
        it could be, it is taken for a second touch if the caller was seen to touch twice.
        """
        key = _key_of(batch)
        if key in self._open:
            place = self._open.index(key)
            self._open[place] = None
            certain = is_certain()
            if certain or self._confirmed:
                self._confirm(certain)
                return True
        if self._open[self._next] is not None:  # it was touched once only, or long ago
            self._confirmed = max(0, self._confirmed - 1)
        self._open[self._next] = key
        self._next = (self._next + 1) % _MOST_OPEN
        return False

    def end(self, batch: list[BlockHash]) -> None:
        """Note a second touch that needs no telling."""
        if batch and (key := _key_of(batch)) in self._open:
            self._open[self._open.index(key)] = None
            self._confirm(True)

    def _confirm(self, certain: bool) -> None:
        self._confirmed = min(self._confirmed + certain, _MOST_OPEN)

    def clear(self) -> None:
        """Forget all requests; this takes no memory."""
        for place in range(_MOST_OPEN):
            self._open[place] = None
        self._next = self._confirmed = 0


def _key_of(batch: list[BlockHash]) -> _Key:
    return len(batch), batch[0], batch[-1]
