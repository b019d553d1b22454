"""The prefix cache of the accelerator itself, which answers before the manager is asked."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from .decoded import DecodedTrace


def device_hits(trace: DecodedTrace, num_blocks: int) -> npt.NDArray[np.int64]:
    """Return how many leading blocks of each request an LRU cache of `num_blocks` blocks has.

    Every request leaves all of its blocks in the cache, whether they were computed or loaded, the
    first the most recent; of a request larger than the cache the first blocks stay.

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
    found = np.zeros(trace.num_requests, dtype=np.int64)
    if num_blocks == 0:
        return found
    cached: OrderedDict[int, None] = OrderedDict()
    for number, row in enumerate(trace.rows()):
        hits = 0
        for block in row:
            if block not in cached:
                break
            hits += 1
        found[number] = hits
        for block in reversed(row):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    return found
