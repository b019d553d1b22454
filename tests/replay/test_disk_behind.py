"""Host memory with a disk behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.replay import (
    DecodedTrace,
    HintOptions,
    Selection,
    TierCounts,
    TraceHints,
    device_hits,
    simulate,
)
from kvoffload.replay.tiers import simulate_tiers
from kvoffload.traces import Request, Trace
from tests.policies.test_golden import FOLDER, decoded

READ_COST = 0.2
"""A block that is read from the disk, in blocks that are computed."""

# trace, percent of its blocks in host memory, times as many on the disk, stores in flight: by the
# policy of both tiers, blocks recomputed per request
SAVED = {
    ("mooncake_conversation", 2.0, 10, 0): {"hit-density": 15.8, "lru": 16.0},
    ("mooncake_conversation", 2.0, 10, 16): {"hit-density": 15.8, "lru": 16.0},
}


def tiers(
    trace: DecodedTrace, policy: str, capacity: int, disk_capacity: int, **options: int
) -> TierCounts:
    return simulate_tiers(
        trace,
        trace.keys(),
        device_hits=device_hits(trace, 0),
        policy=policy,
        capacity=capacity,
        disk_policy=policy,
        disk_capacity=disk_capacity,
        **options,
    )


@pytest.mark.parametrize("policy", ["lru", "arc", "arc-classic"])
def test_host_memory_hits_as_without_a_disk(policy: str) -> None:
    trace = decoded("lmcache_agents_64c")
    alone = simulate(trace, trace.keys(), policy, 482, device_hits=device_hits(trace, 0))
    # A disk that holds nothing: what follows a miss in host memory is not looked up.
    both = tiers(trace, policy, 482, 0)
    assert (both.host_hits, both.host_stored) == (alone.hit_blocks, alone.stored_slots)
    assert both.disk_hits == both.disk_stored == 0


def test_host_memory_above_a_disk_declines_nothing() -> None:
    trace = decoded("lmcache_agents_64c")
    by_density, by_lru = (tiers(trace, policy, 482, 4_820) for policy in ("hit-density", "lru"))
    assert by_density.hit_ratio > 1.1 * by_lru.hit_ratio


def test_a_read_from_the_disk_takes_a_slot() -> None:
    """A chain of 8 comes twice, with 20 blocks between: memory for 4 reads 4 of them."""
    rows = [range(8), range(100, 120), range(8), range(8)]
    trace = DecodedTrace.of([Request(0, 0, 0, tuple(row)) for row in rows])
    counts = tiers(trace, "hit-density", 4, 100)
    assert counts.disk_stored == 8
    assert (counts.host_hits, counts.disk_hits) == (4, 4)


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_what_a_disk_saves(case: tuple[str, float, int, int]) -> None:
    name, percent, times, pending = case
    path = FOLDER / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path.name} in KVOFFLOAD_TRACES")
    trace = DecodedTrace.of(Selection(Trace(path), full_block_tokens=512))
    capacity = int(trace.unique_blocks * percent / 100)
    for policy, expected in SAVED[case].items():
        counts = tiers(trace, policy, capacity, times * capacity, pending=pending, step_blocks=16)
        missed = counts.asked - counts.host_hits - counts.disk_hits
        recomputed = (missed + READ_COST * counts.disk_hits) / trace.num_requests
        assert recomputed == pytest.approx(expected, rel=0.02)


def test_the_disk_hears_that_a_session_ends() -> None:
    """Its blocks leave first: the disk keeps the chain that came before it."""
    rows = [range(4), range(10, 14), range(20, 24), range(4)]
    ends = [False, True, False, False]
    requests = [
        Request(1000 * number, 0, 0, tuple(row), f"session {number}", ends=ending, expect=1)
        for number, (row, ending) in enumerate(zip(rows, ends, strict=True))
    ]
    trace = DecodedTrace.of(requests)
    said = replace(trace, hints=TraceHints.of(requests, HintOptions(told="ends")))
    assert tiers(trace, "lru", 4, 8).disk_hits == 0
    assert tiers(said, "lru", 4, 8).disk_hits == 4
