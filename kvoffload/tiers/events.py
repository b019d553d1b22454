"""Events of a tier: blocks that were stored or removed, counted and kept for `take_events`."""

from __future__ import annotations

from collections.abc import Iterator

from .base import TierEvent
from .metrics import TierMetrics

__all__ = ["Events"]


class Events:
    """The events of a tier.

    Parameters
    ----------
    metrics : TierMetrics
        Where blocks that left are counted.
    are_kept : bool
        Whether `take` has something to give.
    """

    def __init__(self, metrics: TierMetrics, are_kept: bool) -> None:
        self._metrics = metrics
        self._events: list[TierEvent] | None = [] if are_kept else None

    def stored(self, keys: list[bytes]) -> None:
        """Record blocks that can be read from now on."""
        if self._events is not None and keys:
            self._events.append(TierEvent(list(keys), False))

    def removed(self, keys: list[bytes], reason: str) -> None:
        """Record blocks that left; none and ``"forgotten"`` stand for all."""
        self._metrics.evicted[reason] += len(keys)
        if self._events is not None and (keys or reason == "forgotten"):
            self._events.append(TierEvent(list(keys), True, reason))

    def take(self) -> Iterator[TierEvent]:
        """Return the events since the last call, oldest first, and forget them."""
        if not self._events:
            return iter(())
        events, self._events = self._events, []
        return iter(events)
