"""Reuse distances: the distinct blocks between one use of a block and the next.

An LRU cache hits a block if and only if it holds more blocks than that (Mattson et al., "Evaluation
Techniques for Storage Hierarchies", IBM Systems Journal 9(2), 1970).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .decoded import DecodedTrace

__all__ = ["stack_distances"]

MOST_PLACES = 1_000_000
"""Most places to examine; a longer trace is sampled by its blocks."""

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: scatters close numbers


def stack_distances(
    trace: DecodedTrace, most: int = MOST_PLACES
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the distinct blocks between each use of a block and the one before.

    Parameters
    ----------
    trace : DecodedTrace
        The requests; the blocks of each are used in order.
    most : int
        Most places to examine. Of a longer trace a share of the blocks is taken, with all of their
        uses, and the distances are scaled by that share (Waldspurger et al., "Efficient MRC
        Construction with SHARDS", FAST 2015).

    Returns
    -------
    (n,) float64
        The distances, ascending, one for each use that is not the first of its block; blocks.
    float
        The share of the blocks that was taken.

    Complexity: O(n log² n) in numpy.
    """
    blocks = trace.blocks.astype(np.int64)
    share = 1.0
    if len(blocks) > most:
        share = most / len(blocks)
        mixed = (np.arange(trace.unique_blocks, dtype=np.uint64) + np.uint64(1)) * _ODD
        blocks = blocks[(mixed < np.uint64(int(share * 2**64)))[blocks]]
    before = _previous(blocks)
    again = before >= 0
    # Blocks used between p and i, each counted at its first use there: those whose use before is
    # at p or earlier. Up to p itself that holds of every place.
    counts = _not_greater_before(before)[again] - (before[again] + 1)
    return np.sort(counts / share), share


def _previous(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the place of the use before of each place's block, -1 where there is none."""
    order = np.argsort(blocks, kind="stable")
    before = np.full(len(blocks), -1, dtype=np.int64)
    same = blocks[order][1:] == blocks[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def _not_greater_before(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each place how many places before it hold a value that is not greater.

    Merge sort from the bottom up, all pairs of runs of a level at a time.
    """
    size = len(values)
    counts = np.zeros(size, dtype=np.int64)
    places = np.arange(size)
    width = 1
    while width < size:
        pair, is_right = places // (2 * width), (places // width) % 2
        # equal values of the left run come first: the order of places keeps them so
        order = np.lexsort((places, values, pair))
        left = is_right[order] == 0
        seen = np.cumsum(left)
        first = np.searchsorted(pair[order], pair[order], side="left")
        before_pair = np.concatenate(([0], seen))[first]
        found = np.zeros(size, dtype=np.int64)
        found[order] = np.where(left, 0, seen - before_pair)
        counts += found
        width *= 2
    return counts
