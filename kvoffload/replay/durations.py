"""A histogram of durations, in constant memory."""

from __future__ import annotations

__all__ = ["DurationHistogram"]

_STEP_BITS = 6


class DurationHistogram:
    """A histogram of durations in steps of at most 1/64 of the duration.

    Percentiles need no list of the durations.

    Below 64 ns each nanosecond has its own step; above, each power of two is divided into 64 steps.
    `max` and `total` are exact.

    Attributes
    ----------
    count : int
        Durations so far.
    total : int
        Their sum, nanoseconds.
    max : int
        The longest, nanoseconds.

    Notes
    -----
    After HdrHistogram (Gil Tene).
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.max = 0
        self._counts: dict[int, int] = {}

    def add(self, nanoseconds: int) -> None:
        """Add one duration, nanoseconds. Complexity: O(1)."""
        shift = max(0, nanoseconds.bit_length() - _STEP_BITS - 1)
        step = (shift << _STEP_BITS) + (nanoseconds >> shift)
        self._counts[step] = self._counts.get(step, 0) + 1
        self.count += 1
        self.total += nanoseconds
        self.max = max(self.max, nanoseconds)

    def percentile(self, percent: float) -> int:
        """Return the duration in nanoseconds that `percent` of all durations do not exceed.

        It is the upper end of the step: at most 1/64 more than the exact one and never more than
        `max`. 0 without durations.
        """
        wanted = self.count * percent / 100
        seen = 0
        for step in sorted(self._counts):
            seen += self._counts[step]
            if seen >= wanted:
                shift = max(0, (step >> _STEP_BITS) - 1)
                upper_end = ((step - (shift << _STEP_BITS) + 1) << shift) - 1
                return min(self.max, upper_end)
        return self.max
