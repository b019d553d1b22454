"""A table of metrics as a collector of prometheus_client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from kvoffload._extras import require
from kvoffload._metrics import Histogram, Metric, Sample
from kvoffload.errors import describe

require("prometheus_client", "export to Prometheus", "watch")

from prometheus_client.core import (  # noqa: E402
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector  # noqa: E402

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")


class TableCollector(Collector):
    """A collector of the samples of several sources, which share one table of metrics.

    `labels` are the labels of every series; `source_label` distinguishes the sources, None for a
    single source. TypeError or ValueError if `labels` is not a mapping of text to text, or a name
    is not a valid label or already taken.
    """

    def __init__(
        self,
        prefix: str,
        metrics: Sequence[Metric],
        labels: Mapping[str, str] | None,
        source_label: str | None,
    ) -> None:
        self._prefix = prefix
        self._metrics = metrics
        taken = {source_label, "le", *(name for metric in metrics for name in metric.labels)}
        self.labels = _check_labels({} if labels is None else labels, taken)
        self._source_label = source_label

    def _sources(self) -> Iterator[tuple[str, Iterator[Sample]]]:
        """Yield each source's own label and its samples."""
        raise NotImplementedError

    def describe(self) -> list[Family]:
        """Return the metrics without their values."""
        return [self._family(metric) for metric in self._metrics]

    def collect(self) -> Iterator[Family]:
        """Yield every metric that has a value."""
        families: dict[str, Any] = {}
        for source, samples in self._sources():
            own = () if self._source_label is None else (source,)
            for metric, labels, value in samples:
                family = families.get(metric.name)
                if family is None:
                    family = families[metric.name] = self._family(metric)
                texts = [*self.labels.values(), *own, *labels.values()]
                values = [text.encode("utf-8", "backslashreplace").decode() for text in texts]
                if isinstance(value, Histogram):
                    bounds = [*map(str, metric.bounds), "+Inf"]
                    buckets = zip(bounds, accumulate(value.counts), strict=True)
                    family.add_metric(values, list(buckets), value.total)
                else:
                    family.add_metric(values, value)
        for metric in self._metrics:
            if metric.name in families:
                yield families[metric.name]

    def _family(self, metric: Metric) -> Any:
        own = () if self._source_label is None else (self._source_label,)
        names = (*self.labels, *own, *metric.labels)
        return _FAMILIES[metric.kind](self._prefix + metric.name, metric.help, labels=names)


def _check_labels(labels: Any, taken: set[str | None]) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels must be a mapping of names to text, got {describe(labels)}")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(
                f"labels must be a mapping of names to text, got {describe({name: value})}"
            )
        if not _LABEL.fullmatch(name):
            raise ValueError(f"labels must have names of Prometheus, got {describe(name)}")
        if name in taken:
            raise ValueError(f"labels must not have a name that metrics have, got {describe(name)}")
    return dict(labels)
