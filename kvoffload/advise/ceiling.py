"""The most that any policy can hit: Belady's choice with bypass, which knows the future.

After each request the cache keeps, of what it held and what it was offered, the blocks that are
asked for again soonest (Belady, "A study of replacement algorithms", 1966; with bypass: a block
need not be stored at all). Of blocks asked for by the same request the earlier in the prompt stays,
so that what is kept is always a prefix.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

__all__ = ["belady_hits"]

_NEVER = 2**62  # a request later than any
_DEPTH = 2**32  # deeper than any block
_BLOCK = 2**40


def belady_hits(ids: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], capacity: int) -> int:
    """Count the blocks that a cache of `capacity` blocks hits if it knows the future.

    Parameters
    ----------
    ids : (n,) uint64, block ids
        Those of all requests, one after the other.
    lengths : (m,) int64, blocks
        How many of them belong to each request.
    capacity : int
        Blocks that fit.

    Notes
    -----
    Complexity: O(n log n). Memory: about 150 bytes a block asked for again.
    """
    blocks, next_request = _next_requests(ids, lengths)
    heap: list[int] = []  # latest next use first; entries whose block has moved on are passed over
    kept: dict[int, int] = {}
    hits = start = 0
    for length in lengths.tolist():
        row = blocks[start : start + length].tolist()
        following = next_request[start : start + length].tolist()
        start += length
        leading = True
        for depth, (block, request) in enumerate(zip(row, following, strict=True)):
            leading = leading and block in kept
            hits += leading
            if request == _NEVER:
                kept.pop(block, None)
            else:
                entry = (request * _DEPTH + depth) * _BLOCK + block
                kept[block] = entry
                heapq.heappush(heap, -entry)
        while len(kept) > capacity:
            entry = -heapq.heappop(heap)
            block = entry % _BLOCK
            if kept.get(block) == entry:
                del kept[block]
    return hits


def _next_requests(
    ids: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return dense block numbers, and the number of the request that asks for each next."""
    blocks = np.unique(ids, return_inverse=True)[1].astype(np.int64).reshape(-1)
    requests = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(ids), _NEVER, dtype=np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = requests[order[1:][same]]
    return blocks, following
