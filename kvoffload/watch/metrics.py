"""The samples of a watch, in the order of the table of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvoffload import __version__
from kvoffload._metrics import AGE_BOUNDS, WATCH_METRICS, Histogram, Sample
from kvoffload._printable import printable
from kvoffload.managers._watching import CAUSES, KINDS, OTHERS

from ._watch import Watch, bin_start

__all__ = [
    "HEEDING",
    "PLAIN",
    "UNMARKED",
    "age_histogram",
    "marks_label",
    "memory_label",
    "samples",
    "source_label",
]

UNMARKED = "none"
"""Label ``marks`` of a point without marks; Prometheus treats an empty label as missing."""

HEEDING, PLAIN = "hints", "plain"
"""Labels ``trial`` of the caches with and without hints of returns."""

_EXACT = {
    "asked_blocks": "asked",
    "missed_blocks": "missed",
    "stored_blocks": "stored",
    "evicted_blocks": "evicted",
    "declined_blocks": "declined",
    "refused_stores": "refused",
    "failed_blocks": "failed",
    "resets": "resets",
    "tail_missed_tokens": "tail_missed_tokens",
}


def memory_label(memory: float) -> str:
    """Return a size as a label ``memory``: ``0.25``, ``1``, ``8``."""
    return f"{memory:g}"


def marks_label(marks: Sequence[str]) -> str:
    """Return the marks of a point as a label ``marks``: ``none``, or ``filling,in_flight``."""
    return ",".join(marks) or UNMARKED


def source_label(source: str | None) -> str:
    """Return a source of hints as a label ``source``: printable and distinct."""
    return OTHERS if source is None else printable(source.replace("\\", "\\\\"))


def samples(watch: Watch) -> Iterator[Sample]:
    """Yield all samples of a watch in the order of `METRICS`; gauges only with enough data."""
    counters, report = watch.counters(), watch.report()
    values: dict[str, list[tuple[tuple[str, ...], float | Histogram]]] = {
        name: [((), counters[key])] for name, key in _EXACT.items()
    }
    shadows: Mapping[tuple[str, float], tuple[int, int]] = counters["shadows"]
    by_shadow = {key: (key[0], memory_label(key[1])) for key in shadows}
    open_since = watch.open_seconds()
    gain = report.hint_gain
    learned = {(source_label(each.source),): each for each in report.hints}
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
        "shadow_missed_blocks": [(by_shadow[key], pair[0]) for key, pair in shadows.items()],
        "shadow_stored_blocks": [(by_shadow[key], pair[1]) for key, pair in shadows.items()],
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
        "hints": [
            ((source_label(source), kind), count)
            for (source, kind), count in counters["hints"].items()
        ],
        "hint_returns": [
            (label, each.returns) for label, each in learned.items() if each.returns is not None
        ],
        "hint_factor": [
            (label, each.factor) for label, each in learned.items() if each.factor is not None
        ],
        "hint_hit_ratio": [
            ((trial,), ratio)
            for trial, ratio in (
                [] if gain is None else [(HEEDING, gain.hit_ratio), (PLAIN, gain.plain)]
            )
        ],
        "hint_error": [] if gain is None else [((), gain.error)],
        "hints_followed": [] if gain is None else [((), int(gain.followed))],
        "capacity_blocks": [((), report.capacity)],
        "watch_info": [((report.policy or "own", __version__), 1)],
    }
    for metric in WATCH_METRICS:
        for labels, value in values[metric.name]:
            yield Sample(metric, dict(zip(metric.labels, labels, strict=True)), value)


def age_histogram(bins: Sequence[int]) -> Histogram:
    """Return bins of ages as a histogram over `AGE_BOUNDS`; its sum uses the bins' middles."""
    counts = [0] * (len(AGE_BOUNDS) + 1)
    total = 0.0
    for index, count in enumerate(bins):
        if count:
            start = bin_start(index) / 1000
            bucket = sum(bound <= start for bound in AGE_BOUNDS)
            counts[bucket] += count
            total += count * (bin_start(index) + bin_start(index + 1) - 1) / 2000
    return Histogram(counts, total)
