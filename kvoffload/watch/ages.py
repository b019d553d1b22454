"""Histograms of ages: eight bins for each doubling of the milliseconds, as the core counts them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from kvoffload._metrics import AGE_BOUNDS, Histogram


def bin_start(index: int) -> int:
    """Return the least age in a bin, ms."""
    if index < 8:
        return index
    return (8 + index % 8) << (index // 8 - 1)


def bin_middle(index: int) -> float:
    """Return the mean of the least and the largest age in a bin, ms."""
    return (bin_start(index) + bin_start(index + 1) - 1) / 2


def median_age(bins: Sequence[int]) -> float | None:
    """Return the median of a histogram, in seconds; None if it is empty."""
    rank = (sum(bins) + 1) // 2
    return bin_middle(bisect_left([*accumulate(bins)], rank)) / 1000 if rank else None


def age_histogram(bins: Sequence[int]) -> Histogram:
    """Return a histogram over `AGE_BOUNDS`; its sum uses the bins' middles."""
    counts, total = [0] * (len(AGE_BOUNDS) + 1), 0.0
    for index, count in enumerate(bins):
        if count:
            counts[bisect_right(AGE_BOUNDS, bin_start(index) / 1000)] += count
            total += count * bin_middle(index) / 1000
    return Histogram(counts, total)
