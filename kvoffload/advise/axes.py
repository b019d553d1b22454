"""Scales and labels of the pictures: the chart of a report, the picture of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["apart", "ratio_text", "ratio_ticks"]


def ratio_ticks(highest: float, most: int = 5) -> list[float]:
    """Return 0 and about `most` round ratios above it, the last of them not below `highest`."""
    steps = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
    step = next((step for step in steps if highest / step <= most), 0.2)
    count = max(1, math.ceil(highest / step - 1e-9))
    return [index * step for index in range(count + 1)]


def ratio_text(ratio: float) -> str:
    """Return the text of a tick, as in ``2.5 %``."""
    return f"{ratio * 100:.4g} %"


def apart(
    positions: Sequence[float], distance: float, least: float = -math.inf, most: float = math.inf
) -> list[float]:
    """Move rising positions as little as possible until all are `distance` apart.

    Labels that would touch form a group, centred on the mean of its members' positions.
    No position is above `most`, and none below `least` if there is space for all.
    """
    groups: list[tuple[float, int]] = []  # centre and number of members
    for position in positions:
        centre, size = position, 1
        while groups:
            before, members = groups[-1]
            if centre - before >= distance * (size + members) / 2:
                break
            groups.pop()
            centre = (centre * size + before * members) / (size + members)
            size += members
        groups.append((centre, size))
    moved = [
        centre + distance * (index - (size - 1) / 2)
        for centre, size in groups
        for index in range(size)
    ]
    for index, position in enumerate(moved):
        moved[index] = max(position, least)
        least = moved[index] + distance
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], most)
        most = moved[index] - distance
    return moved
