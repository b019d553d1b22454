"""Upper bounds of every policy: Belady's choice, which knows the future, and an unbounded cache.

Both count as a manager behind the accelerator's cache does: from the first block that the
accelerator does not have. Stores complete at once.
"""

from __future__ import annotations

import heapq
from array import array

import numpy as np
import numpy.typing as npt

from .decoded import DecodedTrace

BELADY = "belady"
INFINITE = "infinite"
CEILINGS = (BELADY, INFINITE)
"""Names of the simulations that know the future, or have no bound."""


def infinite_hits(trace: DecodedTrace, device_hits: npt.NDArray[np.int64]) -> int:
    """Return the hits of a cache that keeps everything.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    device_hits : (requests,) int64
        Leading blocks of each request that the manager is not asked for.

    Returns
    -------
    int
        Over all requests, the leading blocks that an earlier request had, less `device_hits`.

    Complexity: O(n log n) in numpy.
    """
    return int(infinite_hits_of_each(trace, device_hits).sum())


def infinite_hits_of_each(
    trace: DecodedTrace, device_hits: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the hits of each request, where `infinite_hits` returns their sum."""
    lengths = np.diff(trace.starts)
    starts = trace.starts[:-1]
    _, first = np.unique(trace.blocks, return_index=True)
    is_new = np.zeros(trace.num_blocks + 1, dtype=np.bool_)
    is_new[first] = True
    new_places = np.append(np.flatnonzero(is_new), trace.num_blocks)
    first_new = new_places[np.searchsorted(new_places, starts)]
    hits: npt.NDArray[np.int64] = (np.minimum(first_new - starts, lengths) - device_hits).clip(
        min=0
    )
    return hits


def belady(
    trace: DecodedTrace, capacity: int, device_hits: npt.NDArray[np.int64]
) -> tuple[int, int]:
    """Replay with knowledge of the future: an upper bound of every policy's hits.

    A block that is not in the cache is stored if it is asked for again sooner than some block of
    the cache: the one asked for last is evicted. Otherwise it bypasses the cache. A block that is
    not asked for again leaves at once. A chain's blocks are asked for in order, so its tail leaves
    first, and the cache holds prefixes.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    capacity : int
        Number of blocks, >= 0.
    device_hits : (requests,) int64
        Leading blocks of each request that the manager is not asked for.

    Returns
    -------
    (int, int)
        Blocks hit, and blocks stored.

    Complexity: O(n log capacity).

    References
    ----------
    Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal
    5(2), 1966; with bypass: Mattson et al., IBM Systems Journal 9(2), 1970.
    """
    is_asked, next_asked = _demands(trace, device_hits)
    end = trace.num_blocks
    blocks = array("I", trace.blocks.tobytes())
    in_cache = bytearray(trace.unique_blocks)
    size = hits = stored = 0
    # Negated places of the next demand of what is in the cache, the last demand on top. An entry
    # whose place has passed was followed by a newer one; such entries never come to the top.
    demands: list[int] = []
    most_entries = 2 * capacity + 1024
    demanded, followed_by = is_asked.tobytes(), array("q", next_asked.tobytes())
    for place, (block, asked, following) in enumerate(
        zip(blocks, demanded, followed_by, strict=True)
    ):
        if in_cache[block]:
            if not asked:
                continue
            hits += 1
            if following == end:
                in_cache[block] = 0
                size -= 1
                continue
            heapq.heappush(demands, -following)
            if len(demands) > most_entries:
                demands = [entry for entry in demands if -entry > place]
                heapq.heapify(demands)
        elif following < end:
            if size < capacity:
                size += 1
                heapq.heappush(demands, -following)
            elif capacity and -demands[0] > following:
                in_cache[blocks[-demands[0]]] = 0
                heapq.heapreplace(demands, -following)
            else:
                continue
            in_cache[block] = 1
            stored += 1
    return hits, stored


def _demands(
    trace: DecodedTrace, device_hits: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return for each place whether the manager is asked for it, and the place of the next demand.

    Without a next demand, that is the number of places.
    """
    end = trace.num_blocks
    starts = trace.starts[:-1]
    offsets = np.arange(end) - np.repeat(starts, np.diff(trace.starts))
    is_asked = offsets >= np.repeat(device_hits, np.diff(trace.starts))
    order = np.argsort(trace.blocks, kind="stable")
    # Among the places of one block, in order: the nearest later one that is asked for.
    ranks = np.where(is_asked[order], np.arange(end), end)
    later = np.append(np.minimum.accumulate(ranks[::-1])[::-1][1:], end)
    found = np.append(order, end)[later]
    same = np.append(trace.blocks, 0)[found] == trace.blocks[order]
    next_asked = np.empty(end, dtype=np.int64)
    next_asked[order] = np.where(same & (found < end), found, end)
    return is_asked, next_asked
