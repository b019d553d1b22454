"""The metrics of tiers and watches, from which exporters, reference and dashboard are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

__all__ = [
    "AGE_BOUNDS",
    "SECONDS_BOUNDS",
    "TIER_METRICS",
    "TIER_PREFIX",
    "WATCH_METRICS",
    "WATCH_PREFIX",
    "Histogram",
    "Metric",
    "Sample",
]

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

TIER_METRICS = (
    Metric("hits", "counter", (), "keys that were looked up and are there"),
    Metric("misses", "counter", (), "keys that were looked up and are not there"),
    Metric("unknown", "counter", (), "keys that were looked up and have to be asked for"),
    Metric(
        "blocks",
        "counter",
        ("op", "status"),
        "blocks of jobs that ended, by outcome; op store: of puts, when it is known",
    ),
    Metric("bytes", "counter", ("op",), "bytes that were moved"),
    Metric("evicted", "counter", ("reason",), "blocks that left"),
    Metric("declined", "counter", (), "blocks that the policy did not admit"),
    Metric(
        "seconds",
        "histogram",
        ("op",),
        "seconds from submission to end of a job",
        SECONDS_BOUNDS,
    ),
    Metric("capacity_bytes", "gauge", (), "bytes of blocks that are kept at most"),
    Metric(
        "capacity_tokens",
        "gauge",
        (),
        "tokens of blocks that are kept at most; absent where a block has no one number of them",
    ),
    Metric("used_bytes", "gauge", (), "bytes of blocks that are kept"),
    Metric("queued_bytes", "gauge", (), "bytes of blocks of jobs that have not ended"),
    Metric("staging_bytes", "gauge", (), "bytes of the tier's own buffers in use"),
    Metric("late_jobs", "gauge", (), "jobs past their deadline whose call has not returned"),
    Metric("breaker", "gauge", ("op",), "0: calls go through; 1: they are answered at once"),
)

WATCH_METRICS = (
    Metric("asked_blocks", "counter", (), "blocks that lookups asked for"),
    Metric("missed_blocks", "counter", (), "blocks of those that were no hit"),
    Metric("stored_blocks", "counter", (), "blocks that were given a slot"),
    Metric("evicted_blocks", "counter", (), "blocks that were evicted"),
    Metric("declined_blocks", "counter", (), "blocks that the policy did not admit"),
    Metric("refused_stores", "counter", (), "stores that were refused for want of room"),
    Metric("failed_blocks", "counter", (), "blocks whose store failed"),
    Metric("resets", "counter", (), "resets of the cache, which empty the shadows, too"),
    Metric(
        "tail_missed_tokens",
        "counter",
        (),
        "tokens that the full KV groups had and a window or a state kept from being loaded",
    ),
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
        "misses with the present policy and memory, in the sample of shadow_missed_blocks",
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
        AGE_BOUNDS,
    ),
    Metric(
        "hints",
        "counter",
        ("source", "kind"),
        "requests whose client said that its session ends (kind ends) or when it returns (kind "
        "expects); source: 16 are told apart, the rest is others",
    ),
    Metric(
        "hint_returns",
        "gauge",
        ("source",),
        "requests that came back to blocks of which the source had said when, since the last "
        "reset; absent, as hint_factor, where the source is silent for the watch's window",
    ),
    Metric(
        "hint_factor",
        "gauge",
        ("source",),
        "greatest factor by which what the source says multiplies the chance that a block is used; "
        "between 1 and 2 if its hints mean nothing; absent without evidence",
    ),
    Metric(
        "hint_hit_ratio",
        "gauge",
        ("trial",),
        "hit ratio of a small cache on a sample of the blocks, of late; trial: hints, which heeds "
        "when sessions return, or plain, which does not; absent where there is not enough data",
    ),
    Metric(
        "hint_error",
        "gauge",
        (),
        "half-width of the 95 % interval of the difference between the two of hint_hit_ratio",
    ),
    Metric(
        "hints_followed",
        "gauge",
        (),
        "1 where the manager evicts by the rule with hints, 0 where that of another trial brings "
        "more; absent where hint_hit_ratio is",
    ),
    Metric("capacity_blocks", "gauge", (), "blocks that the manager has room for"),
    Metric("watch_info", "gauge", ("policy", "version"), "1; what is watched"),
)
