"""The samples of a watch, in the order of the table of metrics."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload import __version__
from kvoffload._metrics import WATCH_METRICS, Histogram, Sample
from kvoffload._printable import printable
from kvoffload.managers._watching import CAUSES, KINDS, OTHERS

from ._watch import Watch
from .ages import age_histogram

UNMARKED = "none"
"""Label ``marks`` of a point without marks; Prometheus treats an empty label as missing."""

HEEDING, PLAIN = "hints", "plain"
"""Labels ``trial`` of the caches with and without hints of returns."""

BLOCKS = ("asked", "missed", "stored", "evicted", "declined", "failed")
EXACT = {
    **{f"{name}_blocks": name for name in BLOCKS},
    "refused_stores": "refused",
    "resets": "resets",
    "tail_missed_tokens": "tail_missed_tokens",
}
"""The names of exact counters by metric."""


def memory_label(memory: float) -> str:
    """Return a size as a label ``memory``: ``0.25``, ``1``, ``8``."""
    return f"{memory:g}"


def source_label(source: str | None) -> str:
    """Return a source of hints as a label ``source``: printable and distinct."""
    return OTHERS if source is None else printable(source.replace("\\", "\\\\"))


def samples(watch: Watch) -> Iterator[Sample]:
    """Yield all samples of a watch in the order of `METRICS`; gauges only with enough data."""
    rows = {metric.name: row for row, metric in enumerate(WATCH_METRICS)}
    for name, labels, value in sorted(_values(watch), key=lambda each: rows[each[0]]):
        metric = WATCH_METRICS[rows[name]]
        yield Sample(metric, dict(zip(metric.labels, labels, strict=True)), value)


def _values(watch: Watch) -> Iterator[tuple[str, tuple[str, ...], float | Histogram]]:
    """Yield the values of the metrics, each with the metric's name and its labels."""
    counters, report, open_since = watch.counters(), watch.report(), watch.open_seconds()
    for name, key in EXACT.items():
        yield name, (), counters[key]
    for cause, count in zip(CAUSES, counters["causes"], strict=True):
        yield "sampled_missed_blocks", (cause,), count
    for used, count in zip(("false", "true"), counters["evicted_used"], strict=True):
        yield "sampled_evicted_blocks", (used,), count
    for (policy, memory), (missed, stored) in counters["shadows"].items():
        if (policy, memory) == (report.policy, 1.0):
            yield "base_missed_blocks", (), missed
        yield "shadow_missed_blocks", (policy, memory_label(memory)), missed
        yield "shadow_stored_blocks", (policy, memory_label(memory)), stored
    for point in report.points:
        shadow = point.policy, memory_label(point.memory)
        if point.hit_ratio is None or point.error is None:
            yield "shadow_withheld", (*shadow, str(point.reason)), 1
        else:
            yield "shadow_hit_ratio", (*shadow, ",".join(point.marks) or UNMARKED), point.hit_ratio
            yield "shadow_error", shadow, point.error
    yield "window_asked_blocks", (), report.asked
    for kind in KINDS:
        overdue = (len(each.block_ids) for each in report.overdue if each.kind == kind)
        yield "overdue_blocks", (kind,), sum(overdue)
        yield "oldest_open_seconds", (kind,), open_since[kind]
    yield "eviction_age_seconds", (), age_histogram(counters["unused_ages"])
    for (source, kind), count in counters["hints"].items():
        yield "hints", (source_label(source), kind), count
    for each in report.hints:
        if each.returns is not None:
            yield "hint_returns", (source_label(each.source),), each.returns
        if each.factor is not None:
            yield "hint_factor", (source_label(each.source),), each.factor
    if report.hint_gain is not None:
        yield "hint_hit_ratio", (HEEDING,), report.hint_gain.hit_ratio
        yield "hint_hit_ratio", (PLAIN,), report.hint_gain.plain
        yield "hint_error", (), report.hint_gain.error
        yield "hints_followed", (), int(report.hint_gain.followed)
    yield "capacity_blocks", (), report.capacity
    yield "watch_info", (report.policy or "own", __version__), 1
