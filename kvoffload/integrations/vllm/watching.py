"""A watch under vLLM, which the key ``kvoffload_watch`` turns on, and its export to ``/metrics``.

In each frontend vLLM asks the spec for the metrics' definitions, and at every step of the scheduler
it asks the manager for their changes; it adds the labels of the engine. So the names depend only on
the configuration. The changes also appear in vLLM's log line every ten seconds, so they are sent in
parts that are short enough for a line.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload._checks import check_number
from kvoffload._metrics import WATCH_METRICS, WATCH_PREFIX, Histogram, Metric
from kvoffload.errors import describe
from kvoffload.watch import Watch
from kvoffload.watch.ages import bin_middle
from kvoffload.watch.metrics import samples

from . import _upstream as vllm

#: Key of ``kv_connector_extra_config``.
WATCH = "kvoffload_watch"

#: Prefix of every name: vLLM removes metrics with it when a second logger declares them again.
ENGINE_PREFIX = "vllm:"

#: Seconds from one export to the next.
INTERVAL = 30.0
LONGEST = 1e9

#: Options of a watch that a configuration may have, besides ``interval``.
OPTIONS = ("memory", "policies", "slots", "policy_slots", "max_rate", "window", "deadline")

#: Most characters of the series that are sent at once in vLLM's log line of metrics, which should
#: stay below 2,000.
MOST_CHARACTERS = 1200
#: Most ages that are sent at once; of more, an even selection.
MOST_AGES = 256


@dataclass(frozen=True)
class Watching:
    """The configuration of a watch."""

    options: dict[str, Any] = field(default_factory=dict)  # arguments of `Watch`
    interval: float = INTERVAL  # seconds from one export to the next

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Watching | None:
        """Read the key; None if watching is off.

        Raise TypeError or ValueError if the value is not true, false or a mapping of known options
        with legal values.
        """
        value = options.get(WATCH, False)
        if value is False:
            return None
        if value is True:
            return cls()
        if not isinstance(value, Mapping):
            raise TypeError(f"{WATCH} must be true, false or a mapping, got {describe(value)}")
        known = (*OPTIONS, "interval")
        unknown = sorted(str(name) for name in value if name not in known)
        if unknown:
            raise ValueError(
                f"{WATCH} has unknown keys: {', '.join(unknown)} (known: {', '.join(known)})"
            )
        arguments = dict(value)
        interval = arguments.pop("interval", INTERVAL)
        watching = cls(arguments, check_number(f"{WATCH}: interval", interval, LONGEST))
        watching.new_watch()
        return watching

    def new_watch(self) -> Watch:
        """Return a configured watch; TypeError, ValueError if an option's value is not legal."""
        try:
            return Watch(**self.options)
        except (TypeError, ValueError) as cause:
            raise type(cause)(f"{WATCH}: {cause}") from None


def metric_definitions(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions of the metrics for vLLM, by name; empty if watching is off."""
    if options.get(WATCH, False) is False:
        return {}
    return {exported_name(metric): definition(metric) for metric in WATCH_METRICS}


def exported_name(metric: Metric) -> str:
    """Return the name of a metric in vLLM; for a counter without ``_total``, which vLLM adds."""
    return f"{ENGINE_PREFIX}{WATCH_PREFIX}{metric.name}"


def definition(metric: Metric) -> Any:
    """Return the definition of a metric for vLLM."""
    if metric.kind == "counter":
        return vllm.OffloadingCounterMetadata(metric.help, metric.labels)
    if metric.kind == "gauge":
        return vllm.OffloadingGaugeMetadata(metric.help, metric.labels)
    return vllm.OffloadingHistogramMetadata(metric.help, metric.labels, buckets=metric.bounds)


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of one series; for a histogram a list of values."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | list[float]

    def characters(self) -> int:
        """Return the number of characters in vLLM's log line."""
        name = exported_name(self.metric)
        if self.labels:
            name = f"{name}:{self.labels}"
        if isinstance(self.value, list):
            texts = [f"{name}_count={len(self.value)}, ", f"{name}_sum={sum(self.value)}, "]
        else:
            texts = [f"{name}={self.value}, "]
        return sum(map(len, texts))

    def add_to(self, stats: Any) -> None:
        """Add it to the statistics that vLLM collects."""
        name = exported_name(self.metric)
        if isinstance(self.value, list):
            for value in self.value:
                stats.observe_histogram(name, value, self.labels)
        elif self.metric.kind == "counter":
            stats.increase_counter(name, self.value, self.labels)
        else:
            stats.set_gauge(name, self.value, self.labels)


class WatchExport:
    """An exporter that sends the changes of a watch with a manager's statistics, in parts.

    Every `interval` seconds it collects the changes since the last time: differences of counters,
    gauges with a new value, and NaN for those that no longer have one. Changes that do not fit into
    one part are sent later, before the interval ends. O(1) while nothing is due.
    """

    def __init__(
        self, watch: Watch, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.watch = watch
        self.interval = interval
        self._clock = clock
        self._due = clock()
        self._pause = interval
        self._parts: deque[list[_Change]] = deque()
        self._sent: dict[tuple[str, tuple[str, ...]], float] = {}
        self._ages: list[int] = []

    def add_to(self, stats: Any) -> None:
        """Add the changes that are due to the statistics that vLLM collects in one step.

        Raises nothing: if the watch fails, it is no longer exported, with one log line.
        """
        now = self._clock()
        if now < self._due:
            return
        if not self._parts:
            try:
                self._parts.extend(in_parts(self._changes()))
            except Exception as error:  # noqa: BLE001 (no error may reach the engine)
                self._due = math.inf
                vllm.logger.warning("kvoffload: the watch is no longer exported: %s", error)
                return
            self._pause = self.interval / max(1, len(self._parts))
        self._due = now + self._pause
        if self._parts:
            for change in self._parts.popleft():
                change.add_to(stats)

    def _changes(self) -> Iterator[_Change]:
        """Yield the changes, first of vanished gauges, such as a point that is marked now."""
        found = [
            (metric, tuple(labels.values()), value) for metric, labels, value in samples(self.watch)
        ]
        present = {(metric.name, labels) for metric, labels, _ in found}
        gauges = {metric.name: metric for metric in WATCH_METRICS if metric.kind == "gauge"}
        for key, sent in self._sent.items():
            if key[0] in gauges and key not in present and not math.isnan(sent):
                self._sent[key] = math.nan
                yield _Change(gauges[key[0]], key[1], math.nan)
        for metric, labels, value in found:
            key = (metric.name, labels)
            if isinstance(value, Histogram):
                ages = self._new_ages()
                if ages:
                    yield _Change(metric, labels, ages)
                continue
            before = self._sent.get(key, 0)
            if value == before:
                continue
            self._sent[key] = value
            yield _Change(metric, labels, value - before if metric.kind == "counter" else value)

    def _new_ages(self) -> list[float]:
        """Return the ages at eviction since the last time, at most `MOST_AGES` of them."""
        bins = self.watch.counters()["unused_ages"]
        before = self._ages or [0] * len(bins)
        self._ages = bins
        fresh = [new - old for new, old in zip(bins, before, strict=True)]
        total = sum(fresh)
        step = max(1.0, total / MOST_AGES)
        ages: list[float] = []
        passed = 0
        for bin_index, count in enumerate(fresh):
            passed += count
            while len(ages) * step + step / 2 < passed:
                ages.append(bin_middle(bin_index) / 1000)
        return ages


def in_parts(changes: Iterator[_Change]) -> list[list[_Change]]:
    """Divide changes into parts of at most `MOST_CHARACTERS`."""
    parts: list[list[_Change]] = []
    characters = 0
    for change in changes:
        size = change.characters()
        if not parts or characters + size > MOST_CHARACTERS:
            parts.append([])
            characters = 0
        parts[-1].append(change)
        characters += size
    return parts
