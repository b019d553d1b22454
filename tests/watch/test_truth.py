"""Points of real traces, with resets or with stores that overlap, beside what managers hit.

``KVOFFLOAD_TRACES`` names the folder of the traces.
"""

from __future__ import annotations

from hashlib import sha512
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload import CPUOffloadingManager
from kvoffload.replay import DecodedTrace
from kvoffload.watch import Watch
from tests.replay.test_golden import trace

from .watched import served

pytestmark = pytest.mark.thorough


def requests_of(name: str) -> list[list[bytes]]:
    decoded = DecodedTrace.of(trace(name))
    keys = decoded.keys()
    return [[keys[index] for index in row] for row in decoded.rows()]


class Covered:
    """Points of samples of their own, beside what a manager of that size hits."""

    def __init__(self, asked: list[list[bytes]], capacity: int, live: str, **course: int) -> None:
        self.asked, self.capacity, self.live, self.course = asked, capacity, live, course
        self.truths: dict[tuple[str, float], float] = {}
        self.errors: list[float] = []
        self.covers: list[bool] = []

    def truth(self, policy: str, memory: float) -> float:
        if (policy, memory) not in self.truths:
            other = CPUOffloadingManager(1, int(self.capacity * memory), policy)
            stats = served(other, self.asked, **self.course).stats()
            self.truths[policy, memory] = stats["hit_blocks"] / stats["lookup_blocks"]
        return self.truths[policy, memory]

    def add(self, index: int, **options: Any) -> None:
        """Watch with one sample, and compare its points without marks, but for the present one."""
        secret = sha512(b"%d" % index).digest()
        watch = Watch(secret=secret, max_rate=1.0, window=1e9, clock=lambda: 0.0, **options)
        manager = CPUOffloadingManager(1, self.capacity, self.live, watch=watch)
        for point in served(manager, self.asked, **self.course).watch.report().points:
            if point.hit_ratio is None or set(point.marks) - {"filling"}:
                continue
            if (point.policy, point.memory) == (self.live, 1.0):
                continue
            if point.policy not in ("lru", self.live):
                continue
            error = point.hit_ratio - self.truth(point.policy, point.memory)
            self.errors.append(error)
            self.covers.append(abs(error) <= point.error)


@pytest.mark.parametrize(("live", "every"), [("lru", 500), ("lru", 2_000), ("slru", 1_500)])
def test_points_of_a_cache_that_is_reset_are_within_their_bars(live, every):
    """With a reset each 500 requests twice the memory was said to hit .22, and hits .13."""
    found = Covered(requests_of("mooncake_conversation"), 9_139, live, reset_every=every)
    for index in range(4):
        found.add(index)
    assert len(found.covers) >= 16
    assert all(found.covers), found.errors


@pytest.mark.parametrize(
    ("live", "under_way"),
    [
        ("slru", 32),
        ("arc", 32),
        pytest.param("slru", 4, marks=pytest.mark.nightly),
        ("slru", 0),
        pytest.param("lru", 32, marks=pytest.mark.nightly),
    ],
)
def test_whatever_is_live_the_points_are_right_where_stores_overlap(live, under_way):
    """Under another policy LRU's were .025 too high, and no error bar covered."""
    found = Covered(requests_of("mooncake_conversation"), 18_279, live, under_way=under_way)
    for index in range(10):
        found.add(index)
    assert len(found.covers) >= 40
    assert sum(found.covers) >= 0.9 * len(found.covers)
    assert abs(fmean(found.errors)) <= 0.005
