"""What a tier counts, and the names under which it is exported.

Each metric has the label ``tier`` and those of its row in `METRICS`, from which exporters, the
documentation and dashboards are made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from .base import Status

__all__ = ["METRICS", "SECONDS_BUCKETS", "Metric", "Sample", "TierMetrics"]

PREFIX = "kvoffload:tier_"


class Metric(NamedTuple):
    """A row of `METRICS`.

    Attributes
    ----------
    name : str
        Name without the prefix ``kvoffload:tier_``.
    kind : str
        ``"counter"``, ``"gauge"`` or ``"histogram"``.
    labels : tuple of str
        Labels besides ``tier``.
    help : str
        What it counts, with its unit.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


METRICS = (
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
        "dropped", "counter", (), "blocks not stored: everything was forgotten after they were put"
    ),
    Metric("seconds", "histogram", ("op",), "seconds from submission to end of a job"),
    Metric("capacity_bytes", "gauge", (), "bytes of blocks that are kept at most"),
    Metric("used_bytes", "gauge", (), "bytes of blocks that are kept"),
    Metric("queued_bytes", "gauge", (), "bytes of blocks of jobs that have not ended"),
    Metric("staging_bytes", "gauge", (), "bytes of the tier's own buffers in use"),
    Metric("late_jobs", "gauge", (), "jobs past their deadline whose call has not returned"),
    Metric("breaker", "gauge", ("op",), "0: calls go through; 1: they are answered at once"),
)

SECONDS_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of the histogram's buckets, seconds; there is one more without a bound."""


class Sample(NamedTuple):
    """A value of a metric; a histogram's is the list of counts of its buckets, and their sum."""

    metric: Metric
    labels: Mapping[str, str]
    value: float | tuple[list[int], float]


class TierMetrics:
    """The counters of one tier.

    Attributes
    ----------
    hits, misses, unknown : int
        Keys that were looked up.
    blocks : Counter of (str, int)
        Blocks by operation and `Status`. ``"put"`` is what callers were told, ``"store"`` what
        became of the blocks that were to be written.
    nbytes : Counter of str
        Bytes moved, by operation.
    evicted : Counter of str
        Blocks that left, by reason.
    dropped : int
        Blocks of puts that were not stored, since everything was forgotten after they were put.
    """

    __slots__ = (
        "_buckets",
        "_seconds",
        "blocks",
        "dropped",
        "evicted",
        "hits",
        "misses",
        "nbytes",
        "unknown",
    )

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.unknown = 0
        self.dropped = 0
        self.blocks: Counter[tuple[str, int]] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()
        self._buckets = {op: [0] * (len(SECONDS_BUCKETS) + 1) for op in ("query", "put", "get")}
        self._seconds: Counter[str] = Counter()

    def observe(self, op: str, seconds: float) -> None:
        """Count the time of a job."""
        self._buckets[op][bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self._seconds[op] += seconds  # type: ignore[assignment] # a float

    def count(self, op: str, counts: Sequence[int]) -> None:
        """Count the blocks of a job, of which so many have each `Status`."""
        for status, count in enumerate(counts):
            if count:
                self.blocks[op, status] += count

    def stats(self) -> dict[str, int]:
        """Return the counters as one flat dict, such as ``put_ok`` and ``evicted_corrupt``."""
        found = {"hits": self.hits, "misses": self.misses, "unknown": self.unknown}
        for op in ("query", "put", "get", "store"):
            for status in Status:
                found[f"{op}_{status.name.lower()}"] = self.blocks[op, status]
        for op in ("put", "get"):
            found[f"{op}_bytes"] = self.nbytes[op]
        for reason in ("evicted", "discarded", "corrupt", "failed", "forgotten"):
            found[f"removed_{reason}"] = self.evicted[reason]
        found["dropped"] = self.dropped
        return found

    def samples(self, gauges: Mapping[str, int], breakers: Mapping[str, int]) -> Iterator[Sample]:
        """Give all metrics.

        Parameters
        ----------
        gauges : mapping of str to int
            Present sizes by name; one that is missing is left out.
        breakers : mapping of str to int
            ``{"get": 0, "put": 1}``: whether calls are answered at once.
        """
        values: dict[str, Iterator[tuple[dict[str, str], float | tuple[list[int], float]]]] = {
            "hits": iter([({}, self.hits)]),
            "misses": iter([({}, self.misses)]),
            "unknown": iter([({}, self.unknown)]),
            "declined": iter([({}, self.blocks["put", Status.DECLINED])]),
            "dropped": iter([({}, self.dropped)]),
            "blocks": (
                ({"op": op, "status": Status(status).name.lower()}, count)
                for (op, status), count in sorted(self.blocks.items())
            ),
            "bytes": (({"op": op}, count) for op, count in sorted(self.nbytes.items())),
            "evicted": (({"reason": name}, count) for name, count in sorted(self.evicted.items())),
            "seconds": (
                ({"op": op}, (list(counts), self._seconds[op]))
                for op, counts in self._buckets.items()
            ),
            "breaker": (({"op": op}, value) for op, value in breakers.items()),
        }
        for name, size in gauges.items():
            values.setdefault(name, iter([({}, size)]))  # `blocks`, a size, is a counter's name
        for metric in METRICS:
            for labels, value in values.get(metric.name, ()):
                yield Sample(metric, labels, value)
