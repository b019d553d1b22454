"""Events in simulated time, whole nanoseconds, in one fixed order."""

from __future__ import annotations

from heapq import heappop, heappush

__all__ = ["ARRIVAL", "FINISH", "NANOSECONDS", "PREFILL_END", "Events", "duration"]

NANOSECONDS = 10**9
FINISH, PREFILL_END, ARRIVAL = 0, 1, 3
"""Kinds of events, in the order in which those of one moment are handled."""


class Events:
    """Events to come, the next one first: by time, then kind, then row.

    Complexity: O(log n) in the events to come for each.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []

    def __bool__(self) -> bool:
        """Return whether anything is to come."""
        return bool(self._heap)

    def push(self, time: int, kind: int, row: int) -> None:
        """Add what happens to a row at a time, nanoseconds."""
        heappush(self._heap, (time, kind, row))

    def pop(self) -> tuple[int, int, int]:
        """Take the next event: its time, its kind and its row."""
        return heappop(self._heap)


def duration(amount: int, rate: int | None) -> int:
    """Return how long an amount takes at a rate per second, whole nanoseconds, rounded up.

    None is a rate without bounds, at which nothing takes any time.
    """
    return 0 if rate is None else -(-amount * NANOSECONDS // rate)
