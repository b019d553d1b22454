"""Events in simulated time, whole nanoseconds, in one fixed order."""

from __future__ import annotations

NANOSECONDS = 10**9
FINISH, PREFILL_END, INDEX_HEARS, ARRIVAL = range(4)
"""Kinds of events, in the order in which simultaneous events are handled."""

Event = tuple[int, int, int, int]
"""An event: its time, its kind, its place, and a row; events are handled in this order.

The place is the engine for an event in an engine, the number of the message for an event at an
index, and 0 for an arrival.
"""


def duration(amount: int, rate: int | None) -> int:
    """Return the time of an amount at a rate per second in whole nanoseconds, rounded up.

    None is an infinite rate: the time is 0.
    """
    return 0 if rate is None else -(-amount * NANOSECONDS // rate)
