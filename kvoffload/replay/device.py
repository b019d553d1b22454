"""The prefix cache of the accelerator itself, which answers before the manager is asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from .decoded import DecodedTrace

__all__ = ["DeviceCache", "device_hits"]


class DeviceCache:
    """An LRU cache of blocks that answers for the leading blocks of each request.

    Every request leaves all of its blocks in the cache, whether they were computed or loaded, the
    first the most recent; of a request larger than the cache the first blocks stay.

    Parameters
    ----------
    num_blocks : int
        Its capacity, blocks; 0 for no cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._cached: OrderedDict[Hashable, None] = OrderedDict()

    def ask(self, blocks: Sequence[Hashable]) -> int:
        """Return how many leading blocks of a request the cache has, and insert all of them.

        Complexity: O(len(blocks)).
        """
        if self.num_blocks == 0:
            return 0
        cached = self._cached
        hits = 0
        for block in blocks:
            if block not in cached:
                break
            hits += 1
        for block in reversed(blocks):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > self.num_blocks:
            cached.popitem(last=False)
        return hits


def device_hits(trace: DecodedTrace, num_blocks: int) -> npt.NDArray[np.int64]:
    """Return how many leading blocks of each request a `DeviceCache` of `num_blocks` blocks has.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    num_blocks : int
        Blocks of the accelerator's cache; 0 for none.

    Returns
    -------
    (requests,) int64
    """
    if num_blocks == 0:
        return np.zeros(trace.num_requests, dtype=np.int64)
    cache = DeviceCache(num_blocks)
    return np.fromiter(map(cache.ask, trace.rows()), dtype=np.int64, count=trace.num_requests)
