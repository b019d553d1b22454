"""Events in simulated time, whole nanoseconds, in one fixed order."""

from __future__ import annotations

from heapq import heappop, heappush

__all__ = ["ARRIVAL", "FINISH", "INDEX_HEARS", "NANOSECONDS", "PREFILL_END", "Events", "duration"]

NANOSECONDS = 10**9
FINISH, PREFILL_END, INDEX_HEARS, ARRIVAL = range(4)
"""Kinds of events, in the order in which those of one moment are handled."""


class Events:
    """Events to come, the next one first: by time, then kind, then place, then row.

    The place is the engine for what happens in one, the number of the message for what an index
    hears, and 0 for an arrival.

    Complexity: O(log n) in the events to come for each.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int]] = []

    def __bool__(self) -> bool:
        """Return whether anything is to come."""
        return bool(self._heap)

    def push(self, time: int, kind: int, place: int, row: int) -> None:
        """Add what happens to a row at a time, nanoseconds."""
        heappush(self._heap, (time, kind, place, row))

    def pop(self) -> tuple[int, int, int, int]:
        """Take the next event: its time, its kind, its place and its row."""
        return heappop(self._heap)


def duration(amount: int, rate: int | None) -> int:
    """Return how long an amount takes at a rate per second, whole nanoseconds, rounded up.

    None is a rate without bounds, at which nothing takes any time.
    """
    return 0 if rate is None else -(-amount * NANOSECONDS // rate)
