"""One access per request: recognition of a request's second touch.

A request touches its blocks before it looks them up and again after its store. A policy that counts
accesses counts the first only.

Rule
    `TouchPairs` compares with the touch just before: a touch repeats it if both batches have the
    same length, first and last hash, and the earlier one was not a repeat itself. Hashes are
    prefix-chained, so that the last one stands for the whole batch. An empty touch is none.
    `OpenRequests` goes by what lies between: a request is touched, its blocks are offered to store,
    and it is touched again, before its store is completed. So it tells an identical request right
    after the second touch of another from that touch, and requests that overlap.
Limits
    Where requests interleave between the two touches, both count to `TouchPairs`. Where the same
    request comes twice in a row and touches only once, the second does not; to `OpenRequests` it
    does if a store was completed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvoffload.types import BlockHash

# Requests that are remembered; an engine serves about as many at a time.
_MOST_OPEN = 256

#: Length, first and last hash of a batch.
_Key = tuple[int, BlockHash, BlockHash]


class TouchPairs:
    """The last touch that began a request."""

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: _Key | None = None

    def repeats(self, batch: list[BlockHash]) -> bool:
        """Return whether `batch` is the second touch of its request."""
        if not batch:
            return False
        key = _key_of(batch)
        repeated = key == self._first
        self._first = None if repeated else key
        return repeated

    def clear(self) -> None:
        """Forget the last touch."""
        self._first = None


class _Open:
    """A request that was touched once so far."""

    __slots__ = ("is_offered", "key")

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.is_offered = False


class OpenRequests:
    """The last requests that were touched once so far, and which of them were offered since."""

    __slots__ = ("_confirmed", "_next", "_offered", "_open", "is_loading")

    def __init__(self) -> None:
        self._open: list[_Open | None] = [None] * _MOST_OPEN
        self._next = 0  # the place of the oldest
        self._confirmed = 0  # second touches that were certain, less requests without one
        self._offered: BlockHash | None = None  # the last of what was offered since the last touch
        self.is_loading = False  # blocks of the request that began last

    def begin(self, batch: list[BlockHash]) -> None:
        """Note the first touch of a request, in the place of the oldest."""
        if self._open[self._next] is not None:  # it was touched once only, or long ago
            self._confirmed = max(0, self._confirmed - 1)
        self._open[self._next] = _Open(_key_of(batch))
        self._next = (self._next + 1) % _MOST_OPEN
        self.is_loading = False

    def follows_offer(self, last: BlockHash) -> bool:
        """Return whether a touch with that last hash follows the offer of the same; forget that."""
        follows = self._offered == last
        self._offered = None
        return follows

    def offer(self, last: BlockHash | None) -> None:
        """Note that blocks of the newest such request with that last hash are offered to store."""
        self._offered = last
        for place in self._newest_first():
            request = self._open[place]
            if request is not None and request.key[2] == last and not request.is_offered:
                request.is_offered = True
                return

    def complete(self, last: BlockHash) -> None:
        """Note that the store of a request has ended: it was touched once only."""
        if self._offered == last:
            self._offered = None
        for place in self._newest_first():
            request = self._open[place]
            if request is not None and request.key[2] == last and request.is_offered:
                self._open[place] = None
                return

    def ends(self, batch: list[BlockHash], is_certain: Callable[[], bool]) -> bool:
        """Return whether `batch`, not empty, is the second touch of a request, and end that.

        It can be if the request was offered since the first one, and is if `is_certain` says so.
        Where it could be the first touch of another for the same, it is taken for a second one if
        the caller was seen to touch twice.
        """
        key = _key_of(batch)
        for place in self._newest_first():
            request = self._open[place]
            if request is not None and request.key == key and request.is_offered:
                self._open[place] = None
                certain = is_certain()
                if not certain and not self._confirmed:
                    return False
                self._confirmed = min(self._confirmed + certain, _MOST_OPEN)
                return True
        return False

    @property
    def is_newest_open(self) -> bool:
        """Whether the request that began last was touched once so far."""
        return self._open[self._next - 1] is not None

    def _newest_first(self) -> Iterator[int]:
        return ((self._next - back) % _MOST_OPEN for back in range(1, _MOST_OPEN + 1))

    def clear(self) -> None:
        """Forget all requests."""
        for place in range(_MOST_OPEN):
            self._open[place] = None
        self._next = self._confirmed = 0
        self._offered = None
        self.is_loading = False


def _key_of(batch: list[BlockHash]) -> _Key:
    return len(batch), batch[0], batch[-1]
