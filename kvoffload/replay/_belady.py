# cython: annotation_typing=False, boundscheck=True
"""Belady's choice of the blocks to keep; `kvoffload.replay.offline.belady` has the argument.

This is the source of both implementations: plain Python, and compiled with ``_belady.pxd``.

Structure
    A heap holds the positions of the next uses of cached blocks, the latest on top. A position that
    has passed was followed by a newer one; such positions never come to the top.
"""

from __future__ import annotations

from array import array

__all__ = ["belady"]


def belady(
    blocks: memoryview, next_asked: memoryview, unique_blocks: int, capacity: int
) -> tuple[int, int]:
    """Return the hits, and the blocks stored.

    `next_asked` (int64) has for each position of `blocks` (uint32) that of the block's next use if
    the manager is asked for it then, else the number of positions.
    """
    end = len(blocks)
    in_cache = bytearray(max(1, unique_blocks))
    room = min(2 * capacity + 1024, end + 1)
    uses = array("q", bytes(8 * room))
    num_uses = num_cached = hits = stored = 0
    for position in range(end):
        block, following = blocks[position], next_asked[position]
        if in_cache[block]:  # until a use that the manager is asked for: this one
            hits += 1
            if following == end:
                in_cache[block] = 0
                num_cached -= 1
                continue
        elif following == end:
            continue
        elif num_cached < capacity:
            num_cached += 1
            stored += 1
            in_cache[block] = 1
        elif capacity and uses[0] > following:
            in_cache[blocks[uses[0]]] = 0
            in_cache[block] = 1
            stored += 1
            _sink(uses, num_uses, 0, following)
            continue
        else:
            continue
        if num_uses == room:
            num_uses = _drop_passed(uses, num_uses, position)
        _put(uses, num_uses, following)
        num_uses += 1
    return hits, stored


def _put(uses: array[int], gap: int, use: int) -> None:
    """Put a use into a gap of the heap, or above it."""
    while gap:
        parent = (gap - 1) // 2
        if uses[parent] >= use:
            break
        uses[gap] = uses[parent]
        gap = parent
    uses[gap] = use


def _sink(uses: array[int], size: int, gap: int, use: int) -> None:
    """Put a use into a gap of the heap, or below it."""
    child = 2 * gap + 1
    while child < size:
        if child + 1 < size and uses[child + 1] > uses[child]:
            child += 1
        if uses[child] <= use:
            break
        uses[gap] = uses[child]
        gap = child
        child = 2 * gap + 1
    uses[gap] = use


def _drop_passed(uses: array[int], size: int, position: int) -> int:
    """Keep the uses that are to come; return their number."""
    kept = 0
    for index in range(size):
        if uses[index] > position:
            uses[kept] = uses[index]
            kept += 1
    for index in range(kept // 2 - 1, -1, -1):
        _sink(uses, kept, index, uses[index])
    return kept
