"""The metrics of tiers and watches, from which exporters, reference and dashboard are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

TIER_PREFIX = "kvoffload:tier_"
"""Prefix of the names of tiers' metrics, which have the additional label ``tier``."""

WATCH_PREFIX = "kvoffload_"
"""Prefix of the names of watches' metrics; an engine may add its own before it."""


class Metric(NamedTuple):
    """A row of a table."""

    name: str  # without the prefix, and without the ``_total`` that Prometheus adds to a counter
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str  # meaning and unit
    bounds: tuple[float, ...] = ()  # of a histogram's buckets; there is one more without a bound


class Histogram(NamedTuple):
    """The value of a histogram: the count of each bucket, the last without a bound; the sum."""

    counts: Sequence[int]
    total: float


class Sample(NamedTuple):
    """A value of a metric; `labels` are in the order of the metric's labels."""

    metric: Metric
    labels: Mapping[str, str]
    value: float | Histogram


SECONDS_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
AGE_BOUNDS = tuple(2**exponent / 1000 for exponent in range(8, 29))


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", labels, text)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "gauge", labels, text)


TIER_METRICS = (
    _counter("hits", "keys that were looked up and are there"),
    _counter("misses", "keys that were looked up and are not there"),
    _counter("unknown", "keys that were looked up and have to be asked for"),
    _counter(
        "blocks",
        "blocks of jobs that ended, by outcome; op store: of puts, when it is known",
        ("op", "status"),
    ),
    _counter("bytes", "bytes that were moved", ("op",)),
    _counter("evicted", "blocks that left", ("reason",)),
    _counter("declined", "blocks that the policy did not admit"),
    Metric(
        "seconds", "histogram", ("op",), "seconds from submission to end of a job", SECONDS_BOUNDS
    ),
    _gauge("capacity_bytes", "bytes of blocks that are kept at most"),
    _gauge(
        "capacity_tokens",
        "tokens of blocks that are kept at most; absent where a block has no one number of them",
    ),
    _gauge("used_bytes", "bytes of blocks that are kept"),
    _gauge("queued_bytes", "bytes of blocks of jobs that have not ended"),
    _gauge("staging_bytes", "bytes of the tier's own buffers in use"),
    _gauge("late_jobs", "jobs past their deadline whose call has not returned"),
    _gauge("breaker", "0: calls go through; 1: they are answered at once", ("op",)),
)

WATCH_METRICS = (
    _counter("asked_blocks", "blocks that lookups asked for"),
    _counter("missed_blocks", "blocks of those that were no hit"),
    _counter("stored_blocks", "blocks that were given a slot"),
    _counter("evicted_blocks", "blocks that were evicted"),
    _counter("declined_blocks", "blocks that the policy did not admit"),
    _counter("refused_stores", "stores that were refused for want of room"),
    _counter("failed_blocks", "blocks whose store failed"),
    _counter("resets", "resets of the cache, which empty the shadows, too"),
    _counter(
        "tail_missed_tokens",
        "tokens that the full KV groups had and a window or a state kept from being loaded",
    ),
    _counter("sampled_missed_blocks", "sampled blocks that missed, by cause", ("cause",)),
    _counter(
        "sampled_evicted_blocks",
        "sampled blocks that were evicted; used: whether they were hit since they were stored",
        ("used",),
    ),
    _counter(
        "base_missed_blocks",
        "misses with the present policy and memory, in the sample of shadow_missed_blocks",
    ),
    _counter(
        "shadow_missed_blocks",
        "misses of the shadow of a policy at so many times the memory",
        ("policy", "memory"),
    ),
    _counter(
        "shadow_stored_blocks",
        "blocks that the shadow of a policy at so many times the memory stored",
        ("policy", "memory"),
    ),
    _gauge(
        "shadow_hit_ratio",
        "hit ratio that a policy would have at so many times the memory, in the watch's window; "
        "absent where there is not enough data; marks: none, or what may shift it, with commas",
        ("policy", "memory", "marks"),
    ),
    _gauge(
        "shadow_error", "half-width of the 95 % interval of shadow_hit_ratio", ("policy", "memory")
    ),
    _gauge(
        "shadow_withheld",
        "1 where shadow_hit_ratio is absent; reason: what there is not enough of",
        ("policy", "memory", "reason"),
    ),
    _gauge("window_asked_blocks", "blocks that lookups asked for in the window"),
    _gauge("overdue_blocks", "blocks of transfers past their deadline", ("kind",)),
    _gauge("oldest_open_seconds", "age of the oldest open transfer", ("kind",)),
    Metric(
        "eviction_age_seconds",
        "histogram",
        (),
        "seconds from the last use of a sampled block to its eviction",
        AGE_BOUNDS,
    ),
    _counter(
        "hints",
        "requests whose client said that its session ends (kind ends) or when it returns (kind "
        "expects); source: 16 are told apart, the rest is others",
        ("source", "kind"),
    ),
    _gauge(
        "hint_returns",
        "requests that came back to blocks of which the source had said when, since the last "
        "reset; absent, as hint_factor, where the source is silent for the watch's window",
        ("source",),
    ),
    _gauge(
        "hint_factor",
        "greatest factor by which what the source says multiplies the chance that a block is used; "
        "between 1 and 2 if its hints mean nothing; absent without evidence",
        ("source",),
    ),
    _gauge(
        "hint_hit_ratio",
        "hit ratio of a small cache on a sample of the blocks, of late; trial: hints, which heeds "
        "when sessions return, or plain, which does not; absent where there is not enough data",
        ("trial",),
    ),
    _gauge(
        "hint_error",
        "half-width of the 95 % interval of the difference between the two of hint_hit_ratio",
    ),
    _gauge(
        "hints_followed",
        "1 where the manager evicts by the rule with hints, 0 where that of another trial brings "
        "more; absent where hint_hit_ratio is",
    ),
    _gauge("capacity_blocks", "blocks that the manager has room for"),
    _gauge("watch_info", "1; what is watched", ("policy", "version")),
)
