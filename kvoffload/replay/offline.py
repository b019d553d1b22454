"""Computations on a trace without a manager: an upper bound of every policy, and reuse distances.

The bound is Belady's choice, which knows the future. It counts like a manager behind the
accelerator's cache: from the first block that the accelerator does not have. Stores complete at
once, as in the other ceiling, an unbounded cache.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload._sampling import hash_ids

from ._belady import belady as chosen
from .groups import GroupChunks
from .requests import DecodedTrace

if TYPE_CHECKING:
    from .rows import Rows

    Prompts = DecodedTrace | Rows
    """The blocks of prompts, in the order of the trace or in another."""

__all__ = [
    "BELADY",
    "CEILINGS",
    "INFINITE",
    "belady",
    "belady_of_groups",
    "stack_distances",
]

BELADY = "belady"
INFINITE = "infinite"
CEILINGS = (BELADY, INFINITE)
"""Names of the simulations that know the future or are unbounded."""

MOST_POSITIONS = 1_000_000
"""Most positions to examine for reuse distances; a longer trace is sampled by its blocks."""


def belady(prompts: Prompts, capacity: int, device_hits: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return the hits of a replay that knows the future: an upper bound of every policy's hits.

    Each use of a block is an opportunity to store it, whether the manager is asked for it or the
    accelerator has it. Keeping a block until its next use is worth one hit if the manager is asked
    for it then, even behind a missing block of the prompt, and nothing if the accelerator has it: a
    block that is not worth keeping leaves at once, or is not stored at all. Of the others, the
    block with the latest next use is evicted, or is not stored if it is the new one.

    No choice of blocks to store, keep and evict, made block by block in the order of the trace,
    hits more: this picks as many as possible of the intervals between two uses, at most `capacity`
    at a time. Every manager chooses in this way, because it evicts no block of the prompt that it
    stores, or stores none before the last block that it loads. It also obeys two more rules: a
    prompt hits only leading blocks, and loads before it stores. Without an accelerator in front,
    and with ids that each follow one predecessor, those rules cost nothing: the tail of a chain is
    used last, so the cache holds prefixes. Otherwise no manager may reach the bound.

    Returns blocks hit, and blocks stored. `device_hits` are the leading blocks of each request that
    the accelerator has, for which the manager is not asked.

    Complexity: O(n log capacity).

    References
    ----------
    Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal
    5(2), 1966; with bypass: Mattson et al., IBM Systems Journal 9(2), 1970; as a choice of
    intervals: Carlisle and Lloyd, "On the k-coloring of intervals", Discrete Applied Mathematics
    59(3), 1995.
    """
    next_asked = _next_asked(prompts, device_hits)
    return chosen(prompts.blocks.data, next_asked.data, prompts.unique_blocks, capacity)


def belady_of_groups(
    prompts: Prompts, capacity: int, groups: GroupChunks, device_hits: npt.NDArray[np.int64]
) -> tuple[int, int]:
    """Return an upper bound of every policy's hits: `belady` over one full group.

    Each full group stores every chunk, so one group has the slots divided by the number of full
    groups, or all slots if they have chunks of several sizes, whose shares vary with the trace.
    Returns tokens hit, and slots stored. ValueError if no group is full: the hits are then
    unbounded.
    """
    if not groups.num_full:
        raise ValueError("policy must not be 'belady' where no group is full")
    full = groups.full_chunk_tokens
    chunk = min(full)
    copies = len(full) if max(full) == chunk else 1
    stride = chunk // groups.block_tokens
    if not groups.is_plain:
        bounds = itertools.pairwise(prompts.starts.tolist())
        rows = [
            prompts.blocks[start:end][
                stride - 1 : groups.length_of(length, end - start) // groups.block_tokens : stride
            ]
            for (start, end), length in zip(bounds, prompts.lengths.tolist(), strict=True)
        ]
        prompts = DecodedTrace(
            starts=np.cumsum([0, *map(len, rows)], dtype=np.int64),
            blocks=np.concatenate([np.empty(0, np.uint32), *rows]),
            ids=np.arange(prompts.unique_blocks, dtype=np.uint64),
            lengths=prompts.lengths,
        )
    hits, stored = belady(prompts, capacity // copies, device_hits // stride)
    return hits * chunk, stored * copies


def _next_asked(prompts: Prompts, device_hits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each position that of the block's next use if the manager is asked for it then.

    Otherwise, or without a next use, that is the number of positions.
    """
    end = len(prompts.blocks)
    lengths = np.diff(prompts.starts)
    offsets = np.arange(end) - np.repeat(prompts.starts[:-1], lengths)
    is_asked = offsets >= np.repeat(device_hits, lengths)
    order = np.argsort(prompts.blocks, kind="stable")
    before, after = order[:-1], order[1:]
    is_worth = (prompts.blocks[before] == prompts.blocks[after]) & is_asked[after]
    next_asked = np.full(end, end, dtype=np.int64)
    next_asked[before[is_worth]] = after[is_worth]
    return next_asked


def stack_distances(
    trace: DecodedTrace, most: int = MOST_POSITIONS
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the distinct blocks between each use of a block and the one before.

    An LRU cache hits a block if and only if it holds more blocks than that.

    Parameters
    ----------
    trace : DecodedTrace
        The requests; the blocks of each are used in order.
    most : int
        Most positions to examine. A longer trace is sampled: a share of the blocks with all of
        their uses is examined, and the distances are scaled by that share (Waldspurger et al.,
        "Efficient MRC Construction with SHARDS", FAST 2015).

    Returns
    -------
    (n,) float64
        The distances in blocks, ascending, one per use that is not the first of its block.
    float
        The share of the blocks examined.

    Complexity: O(n log² n) in numpy.

    References
    ----------
    Mattson et al., "Evaluation Techniques for Storage Hierarchies", IBM Systems Journal 9(2), 1970.
    """
    blocks = trace.blocks.astype(np.int64)
    share = 1.0
    if len(blocks) > most:
        share = most / len(blocks)
        hashed = hash_ids(np.arange(trace.unique_blocks, dtype=np.uint64))
        blocks = blocks[(hashed < np.uint64(int(share * 2**64)))[blocks]]
    before = _previous(blocks)
    again = before >= 0
    # Blocks used between p and i, each counted at its first use there: those whose previous use is
    # at p or earlier. Up to p itself that holds of every position.
    counts = _not_greater_before(before)[again] - (before[again] + 1)
    return np.sort(counts / share), share


def _previous(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the position of the previous use of each position's block, or -1."""
    order = np.argsort(blocks, kind="stable")
    before = np.full(len(blocks), -1, dtype=np.int64)
    same = blocks[order][1:] == blocks[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def _not_greater_before(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return, for each position, the number of earlier positions whose value is not greater.

    Merge sort from the bottom up, all pairs of runs of a level at a time.
    """
    size = len(values)
    counts = np.zeros(size, dtype=np.int64)
    positions = np.arange(size)
    width = 1
    while width < size:
        pair, is_right = positions // (2 * width), (positions // width) % 2
        # equal values of the left run come first: the order of positions keeps them so
        order = np.lexsort((positions, values, pair))
        left = is_right[order] == 0
        seen = np.cumsum(left)
        first = np.searchsorted(pair[order], pair[order], side="left")
        before_pair = np.concatenate(([0], seen))[first]
        found = np.zeros(size, dtype=np.int64)
        found[order] = np.where(left, 0, seen - before_pair)
        counts += found
        width *= 2
    return counts
