"""A watch as a collector of prometheus_client; needs the extra ``watch``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from kvoffload.errors import describe

from ._watch import Watch
from .metrics import AGE_BOUNDS, METRICS, PREFIX, Histogram, samples

__all__ = ["WatchCollector"]

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class WatchCollector(Collector):
    """Export what a watch sees, when it is scraped.

    Parameters
    ----------
    watch : Watch
        One that looks at a manager by the time of the first scrape.
    labels : mapping of str to str, optional
        Labels that every series gets, to tell several managers of a process apart.

    Raises
    ------
    TypeError
        If `watch` is no ``Watch``.

    Examples
    --------
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> from kvoffload import CPUOffloadingManager
    >>> from kvoffload.watch import Watch
    >>> from kvoffload.watch.prometheus import WatchCollector
    >>> manager = CPUOffloadingManager(16, 100_000, watch=Watch())
    >>> registry = CollectorRegistry()
    >>> registry.register(WatchCollector(manager.watch))
    >>> b"kvoffload_asked_blocks_total 0.0" in generate_latest(registry)
    True
    """

    def __init__(self, watch: Watch, labels: Mapping[str, str] | None = None) -> None:
        if not isinstance(watch, Watch):
            raise TypeError(f"watch must be a Watch, got {describe(watch)}")
        self.watch = watch
        self.labels = dict(labels or {})

    def describe(self) -> list[Family]:
        """Name the metrics without looking at the watch."""
        return [_family(name, kind, help_, labels) for name, kind, labels, help_ in METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield every metric that has a value."""
        for metric, values in groupby(samples(self.watch), key=lambda sample: sample.metric):
            names = (*self.labels, *metric.labels)
            family = _family(metric.name, metric.kind, metric.help, names)
            for sample in values:
                labels = [*self.labels.values(), *sample.labels]
                if isinstance(sample.value, Histogram):
                    bounds = [*map(str, AGE_BOUNDS), "+Inf"]
                    buckets = zip(bounds, accumulate(sample.value.counts), strict=True)
                    family.add_metric(labels, list(buckets), sample.value.total)
                else:
                    family.add_metric(labels, sample.value)
            yield family


def _family(name: str, kind: str, help_: str, labels: tuple[str, ...]) -> Any:
    families: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    family: Any = families[kind](PREFIX + name, help_, labels=labels)
    return family
