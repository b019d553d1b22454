"""What a watch exports: one table, from which exporter, documentation, dashboard and rules come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from kvoffload import __version__
from kvoffload.managers._watching import CAUSES, KINDS

from ._watch import Watch, bin_start

__all__ = [
    "AGE_BOUNDS",
    "METRICS",
    "PREFIX",
    "UNMARKED",
    "Histogram",
    "Metric",
    "Sample",
    "marks_label",
    "memory_label",
    "samples",
]

PREFIX = "kvoffload_"
"""What every name begins with; in front of it an engine may put its own prefix."""

UNMARKED = "none"
"""The label ``marks`` of a point without marks: not empty, which Prometheus takes for no label."""

AGE_BOUNDS = tuple(2**exponent / 1000 for exponent in range(8, 29))
"""Upper bounds in seconds of the histogram of ages; there is one more without a bound."""


class Metric(NamedTuple):
    """A row of `METRICS`.

    Attributes
    ----------
    name : str
        Name without the prefix, and without the ``_total`` that Prometheus puts after a counter.
    kind : str
        ``"counter"``, ``"gauge"`` or ``"histogram"``.
    labels : tuple of str
        Its labels.
    help : str
        What it counts, with its unit.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric("asked_blocks", "counter", (), "blocks that lookups asked for"),
    Metric("missed_blocks", "counter", (), "blocks of those that were no hit"),
    Metric("stored_blocks", "counter", (), "blocks that were given a slot"),
    Metric("evicted_blocks", "counter", (), "blocks that were evicted"),
    Metric("declined_blocks", "counter", (), "blocks that the policy did not admit"),
    Metric("refused_stores", "counter", (), "stores that were refused for want of room"),
    Metric("failed_blocks", "counter", (), "blocks whose store failed"),
    Metric("sampled_missed_blocks", "counter", ("cause",), "sampled blocks that missed, by cause"),
    Metric(
        "sampled_evicted_blocks",
        "counter",
        ("used",),
        "sampled blocks that were evicted; used: whether they were hit since they were stored",
    ),
    Metric(
        "base_missed_blocks",
        "counter",
        (),
        "misses of the shadow of what there is, in the sample of shadow_missed_blocks",
    ),
    Metric(
        "shadow_missed_blocks",
        "counter",
        ("policy", "memory"),
        "misses of the shadow of a policy at so many times the memory",
    ),
    Metric(
        "shadow_stored_blocks",
        "counter",
        ("policy", "memory"),
        "blocks that the shadow of a policy at so many times the memory stored",
    ),
    Metric(
        "shadow_hit_ratio",
        "gauge",
        ("policy", "memory", "marks"),
        "hit ratio that a policy would have at so many times the memory, in the watch's window; "
        "absent where there is not enough data; marks: none, or what may shift it, with commas",
    ),
    Metric(
        "shadow_error",
        "gauge",
        ("policy", "memory"),
        "half-width of the 95 % interval of shadow_hit_ratio",
    ),
    Metric(
        "shadow_withheld",
        "gauge",
        ("policy", "memory", "reason"),
        "1 where shadow_hit_ratio is absent; reason: what there is not enough of",
    ),
    Metric("window_asked_blocks", "gauge", (), "blocks that lookups asked for in the window"),
    Metric("overdue_blocks", "gauge", ("kind",), "blocks of transfers past their deadline"),
    Metric("oldest_open_seconds", "gauge", ("kind",), "age of the oldest open transfer"),
    Metric(
        "eviction_age_seconds",
        "histogram",
        (),
        "seconds from the last use of a sampled block to its eviction",
    ),
    Metric("capacity_blocks", "gauge", (), "blocks that the manager has room for"),
    Metric("watch_info", "gauge", ("policy", "version"), "1; what is watched"),
)


class Histogram(NamedTuple):
    """The value of a histogram: what lies in each bucket, the last without a bound; the sum."""

    counts: tuple[int, ...]
    total: float


class Sample(NamedTuple):
    """A value of a metric; `labels` are values in the order of the metric's labels."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Histogram


_EXACT = {
    "asked_blocks": "asked",
    "missed_blocks": "missed",
    "stored_blocks": "stored",
    "evicted_blocks": "evicted",
    "declined_blocks": "declined",
    "refused_stores": "refused",
    "failed_blocks": "failed",
}


def memory_label(memory: float) -> str:
    """Return a size as the label ``memory`` has it: ``0.25``, ``1``, ``8``."""
    return f"{memory:g}"


def marks_label(marks: Sequence[str]) -> str:
    """Return the marks of a point as a label: ``none``, or ``filling,in_flight``."""
    return ",".join(marks) or UNMARKED


def samples(watch: Watch) -> Iterator[Sample]:
    """Yield all values of a watch, in the order of `METRICS`.

    Parameters
    ----------
    watch : Watch
        One that looks at a manager.

    Yields
    ------
    Sample
        Gauges that there is not enough data for are left out.
    """
    counters, report = watch.counters(), watch.report()
    values: dict[str, list[tuple[tuple[str, ...], float | Histogram]]] = {
        name: [((), counters[key])] for name, key in _EXACT.items()
    }
    shadows: Mapping[tuple[str, float], tuple[int, int]] = counters["shadows"]
    places = {key: (key[0], memory_label(key[1])) for key in shadows}
    open_since = watch.open_seconds()
    values |= {
        "sampled_missed_blocks": [
            ((cause,), count) for cause, count in zip(CAUSES, counters["causes"], strict=True)
        ],
        "sampled_evicted_blocks": [
            ((used,), count)
            for used, count in zip(("false", "true"), counters["evicted_used"], strict=True)
        ],
        "base_missed_blocks": [
            ((), shadows[key][0]) for key in [(report.policy or "", 1.0)] if key in shadows
        ],
        "shadow_missed_blocks": [(places[key], pair[0]) for key, pair in shadows.items()],
        "shadow_stored_blocks": [(places[key], pair[1]) for key, pair in shadows.items()],
        "shadow_hit_ratio": [
            ((point.policy, memory_label(point.memory), marks_label(point.marks)), point.hit_ratio)
            for point in report.points
            if point.hit_ratio is not None
        ],
        "shadow_error": [
            ((point.policy, memory_label(point.memory)), point.error)
            for point in report.points
            if point.error is not None
        ],
        "shadow_withheld": [
            ((point.policy, memory_label(point.memory), point.reason), 1)
            for point in report.points
            if point.reason is not None
        ],
        "window_asked_blocks": [((), report.asked)],
        "overdue_blocks": [
            ((kind,), sum(len(each.block_ids) for each in report.overdue if each.kind == kind))
            for kind in KINDS
        ],
        "oldest_open_seconds": [((kind,), open_since[kind]) for kind in KINDS],
        "eviction_age_seconds": [((), age_histogram(counters["unused_ages"]))],
        "capacity_blocks": [((), report.capacity)],
        "watch_info": [((report.policy or "own", __version__), 1)],
    }
    for metric in METRICS:
        for labels, value in values[metric.name]:
            yield Sample(metric, labels, value)


def age_histogram(bins: Sequence[int]) -> Histogram:
    """Return the bins of ages with the bounds `AGE_BOUNDS`; the sum is that of their middles."""
    counts = [0] * (len(AGE_BOUNDS) + 1)
    total = 0.0
    for number, count in enumerate(bins):
        if count:
            start = bin_start(number) / 1000
            bucket = sum(bound <= start for bound in AGE_BOUNDS)
            counts[bucket] += count
            total += count * (bin_start(number) + bin_start(number + 1) - 1) / 2000
    return Histogram(tuple(counts), total)
