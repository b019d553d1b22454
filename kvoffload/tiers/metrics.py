"""The reports of a tier: counters, their samples for exporters, events and log lines."""

from __future__ import annotations

import contextlib
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvoffload._metrics import SECONDS_BOUNDS, TIER_METRICS, Histogram, Sample

from .base import State, Status, TierEvent

log = logging.getLogger("kvoffload.tiers")

LOG_S = 60.0
"""Minimum seconds between log lines of one kind."""
_LOOKUPS = {"hits": State.HIT, "misses": State.MISS, "unknown": State.UNKNOWN}


class TierMetrics:
    """The counters of one tier."""

    def __init__(self) -> None:
        self.lookups = [0] * (max(State) + 1)  # keys, by known `State`
        # By operation and `Status`: "put" as reported to callers, "store" as written.
        self.blocks: Counter[tuple[str, int]] = Counter()
        self.nbytes: Counter[str] = Counter()  # moved, by operation
        self.evicted: Counter[str] = Counter()  # blocks that left, by reason
        self._buckets = {op: [0] * (len(SECONDS_BOUNDS) + 1) for op in ("query", "put", "get")}
        self._seconds: Counter[str] = Counter()

    def observe(self, op: str, seconds: float) -> None:
        """Count the time of a job."""
        self._buckets[op][bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self._seconds[op] += seconds  # type: ignore[assignment] # a float

    def count(self, op: str, counts: Sequence[int]) -> None:
        """Count the blocks of a job; `counts` has the number of each `Status`."""
        for status, count in enumerate(counts):
            if count:
                self.blocks[op, status] += count

    def stats(self) -> dict[str, int]:
        """Return the counters as one flat dict, such as ``put_ok`` and ``removed_corrupt``."""
        found = {name: self.lookups[state] for name, state in _LOOKUPS.items()}
        for op in ("query", "put", "get", "store"):
            for status in Status:
                found[f"{op}_{status.name.lower()}"] = self.blocks[op, status]
        for op in ("put", "get"):
            found[f"{op}_bytes"] = self.nbytes[op]
        for reason in ("evicted", "discarded", "corrupt", "failed", "forgotten"):
            found[f"removed_{reason}"] = self.evicted[reason]
        return found

    def samples(self, gauges: Mapping[str, int], breakers: Mapping[str, int]) -> Iterator[Sample]:
        """Yield the samples of all metrics, in the order of their table.

        Parameters
        ----------
        gauges : mapping of str to int
            Present sizes by name; missing ones are omitted.
        breakers : mapping of str to int
            ``{"get": 0, "put": 1}``: whether the breaker refuses calls.
        """
        values: dict[str, Iterable[tuple[dict[str, str], float | Histogram]]] = {
            **{name: [({}, self.lookups[state])] for name, state in _LOOKUPS.items()},
            "declined": [({}, self.blocks["put", Status.DECLINED])],
            "blocks": (
                ({"op": op, "status": Status(status).name.lower()}, count)
                for (op, status), count in sorted(self.blocks.copy().items())
            ),
            "bytes": (({"op": op}, count) for op, count in sorted(self.nbytes.copy().items())),
            "evicted": (
                ({"reason": name}, count) for name, count in sorted(self.evicted.copy().items())
            ),
            "seconds": (
                ({"op": op}, Histogram(list(counts), self._seconds[op]))
                for op, counts in self._buckets.items()
            ),
            "breaker": (({"op": op}, value) for op, value in breakers.items()),
        }
        for name, size in gauges.items():
            values.setdefault(name, [({}, size)])  # `blocks`, a size, is a counter's name
        for metric in TIER_METRICS:
            for labels, value in values.get(metric.name, ()):
                yield Sample(metric, labels, value)


class Events:
    """The events of a tier, which are counted and, with `are_kept`, kept for `take`."""

    def __init__(self, metrics: TierMetrics, *, are_kept: bool) -> None:
        self._metrics = metrics
        self._events: list[TierEvent] | None = [] if are_kept else None

    def stored(self, keys: list[bytes]) -> None:
        """Record blocks that have become readable."""
        if self._events is not None and keys:
            self._events.append(TierEvent(list(keys), removed=False))

    def removed(self, keys: list[bytes], reason: str) -> None:
        """Record blocks that left; no keys with ``"forgotten"`` mean all blocks."""
        self._metrics.evicted[reason] += len(keys)
        if self._events is not None and (keys or reason == "forgotten"):
            self._events.append(TierEvent(list(keys), reason, removed=True))

    def take(self) -> Iterator[TierEvent]:
        """Return the events since the last call, oldest first, and forget them."""
        if not self._events:
            return iter(())
        events, self._events = self._events, []
        return iter(events)


def write_line(level: int, message: str, *arguments: object) -> None:
    """Log a line like `logging.Logger.log`, and drop exceptions of the application's handlers.

    Tiers log in threads that have jobs, and between two steps of a call: an exception would end the
    thread or prevent the second step.
    """
    with contextlib.suppress(Exception):
        log.log(level, message, *arguments, stacklevel=2)


def write_seldom(
    logged: dict[str, float], kind: str, level: int, message: str, *arguments: object
) -> None:
    """Log a line, like `write_line`, unless `logged` has one of its kind of the last minute."""
    now = time.monotonic()
    if now - logged.get(kind, -LOG_S) >= LOG_S:
        logged[kind] = now
        write_line(level, message, *arguments)
