"""Documentation, constructors and views of SIEVE and S3-FIFO, for both twins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus

from . import registry
from ._views import BlocksView, GhostsView

# Rings of S3-FIFO, from 0.
SMALL, MAIN, GHOSTS = range(3)


class Sieve:
    """A policy that evicts the oldest block not used since the hand last passed it.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.

    References
    ----------
    Zhang, Yang, Yue, Vigfusson & Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
    Algorithm for Web Caches", NSDI 2024.
    """

    __slots__ = ()

    _open: Callable[..., None]
    _at_hand: Callable[[], BlockHash | None]

    def __init__(self, cache_capacity: int) -> None:
        self._open(cache_capacity)

    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]:
        """Resident blocks and their live statuses, oldest first; read-only."""
        return BlocksView(self, 0)

    @property
    def hand(self) -> BlockHash | None:
        """The next block to examine; None if the queue ends at the hand."""
        return self._at_hand()


class S3FIFO:
    """A policy that evicts new blocks not used soon, then the oldest unused ones.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    small : float
        Share of the capacity for new blocks, ``0.0 ... 1.0``.

    References
    ----------
    Yang, Zhang, Qiu, Yue & Rashmi, "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023.
    """

    __slots__ = ()

    _open: Callable[..., None]
    _require_ready: Callable[[], None]
    _small_size: int

    def __init__(self, cache_capacity: int, *, small: float = 0.1) -> None:
        capacity = check_cache_capacity(cache_capacity)
        share = registry.entry("s3fifo").option("small").check(small)
        self._open(capacity, int(share * capacity))

    @property
    def small(self) -> Mapping[BlockHash, BlockStatus]:
        """New blocks and their live statuses, oldest first; read-only."""
        return BlocksView(self, SMALL)

    @property
    def main(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks that were used again and their live statuses, oldest first; read-only."""
        return BlocksView(self, MAIN)

    @property
    def ghosts(self) -> AbstractSet[BlockHash]:
        """Hashes that left the small queue, oldest first; read-only."""
        return GhostsView(self, GHOSTS)

    @property
    def small_size(self) -> int:
        """Number of blocks that the small queue is meant to hold."""
        self._require_ready()
        return self._small_size
