"""Events in simulated time, whole nanoseconds, in one fixed order."""

from __future__ import annotations

from heapq import heappop, heappush

__all__ = ["ARRIVAL", "FINISH", "INDEX_HEARS", "NANOSECONDS", "PREFILL_END", "Events", "duration"]

NANOSECONDS = 10**9
FINISH, PREFILL_END, INDEX_HEARS, ARRIVAL = range(4)
"""Kinds of events, in the order in which simultaneous events are handled."""


class Events:
    """Events to come, the next one first: by time, then kind, then place, then row.

    The place is the engine for an event in an engine, the number of the message for an event at an
    index, and 0 for an arrival.

    Complexity: O(log n) per event, for n events to come.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int]] = []

    def __bool__(self) -> bool:
        """Return whether any event is to come."""
        return bool(self._heap)

    def push(self, time: int, kind: int, place: int, row: int) -> None:
        """Add an event of a row at a time, nanoseconds."""
        heappush(self._heap, (time, kind, place, row))

    def pop(self) -> tuple[int, int, int, int]:
        """Remove and return the next event: its time, kind, place and row."""
        return heappop(self._heap)


def duration(amount: int, rate: int | None) -> int:
    """Return the time of an amount at a rate per second in whole nanoseconds, rounded up.

    None is an infinite rate: the time is 0.
    """
    return 0 if rate is None else -(-amount * NANOSECONDS // rate)
