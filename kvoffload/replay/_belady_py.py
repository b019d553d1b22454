"""Belady's choice of the blocks to keep; `kvoffload.replay.offline.belady` has the argument."""

from __future__ import annotations

import heapq
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt


def belady(
    blocks: npt.NDArray[np.uint32],
    next_asked: npt.NDArray[Any],
    unique_blocks: int,
    capacity: int,
) -> tuple[int, int]:
    """Return the hits, and the blocks stored.

    `next_asked` has for each position of `blocks` that of the block's next use if the manager is
    asked for it then, else the number of positions.
    """
    end = len(blocks)
    of_each = array("I", blocks.tobytes())
    in_cache = bytearray(unique_blocks)
    size = hits = stored = 0
    # Negated positions of the next uses of cached blocks, the latest on top. An entry whose
    # position has passed was followed by a newer one; such entries never come to the top.
    uses: list[int] = []
    most_entries = 2 * capacity + 1024
    followed_by = array("q", next_asked.tobytes())
    for position, (block, following) in enumerate(zip(of_each, followed_by, strict=True)):
        if in_cache[block]:  # until a use that the manager is asked for: this one
            hits += 1
            if following == end:
                in_cache[block] = 0
                size -= 1
                continue
            heapq.heappush(uses, -following)
            if len(uses) > most_entries:
                uses = [entry for entry in uses if -entry > position]
                heapq.heapify(uses)
        elif following < end:
            if size < capacity:
                size += 1
                heapq.heappush(uses, -following)
            elif capacity and -uses[0] > following:
                in_cache[of_each[-uses[0]]] = 0
                heapq.heapreplace(uses, -following)
            else:
                continue
            in_cache[block] = 1
            stored += 1
    return hits, stored
