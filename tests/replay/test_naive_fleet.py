"""The naive fleet that others are compared with gives what was computed by hand."""

import hashlib

import pytest

from .naive_fleet import MILLISECOND, NaiveFleet, run

pytestmark = pytest.mark.fast

# 1 ms per token, 10 ms per block from host memory, 100 ms per block from the tier
SETTINGS = {
    "rate": 1000,
    "link": 10_000,
    "tier_link": 1_000,
    "block_bytes": 100,
    "block_tokens": 10,
}


def test_two_engines() -> None:
    rows = [
        (0, 25, 2, [1, 2, 3], None, None, None),  # 25 ms
        (0, 25, 1, [1, 2, 3], None, None, None),  # 25 ms on the other engine
        (1, 40, 0, [1, 2, 4, 5], None, None, None),  # waits to 25; two hits, 20 + 20 ms
        (100, 25, 0, [1, 2, 3], None, None, None),  # three hits, 0 + 30 ms
    ]
    result = run(rows, NaiveFleet(engines=2, host=10, **SETTINGS))
    assert result.engines == [0, 1, 0, 1]
    placed = b"\0\0\1\0\0\0\1\0"
    assert result.placement == hashlib.sha256(placed).hexdigest()[:12]
    assert (result.host_hits, result.stored) == (5, 8)
    assert (result.hit_tokens, result.missed_tokens, result.tokens) == (45, 70, 115)
    assert result.ttft == [ms * MILLISECOND for ms in (25, 25, 64, 30)]
    assert result.latencies == [ms * MILLISECOND for ms in (65, 45, 64, 30)]
    assert (result.prefill_ns, result.span) == (120 * MILLISECOND, 130 * MILLISECOND)
    assert result.saved == 1 - 120 / 115
    assert result.imbalance == 45 * 2 / 70


def test_a_tier() -> None:
    rows = [
        (0, 20, 0, [1, 2], "a", None, None),  # 20 ms
        (10, 20, 0, [3, 4], "a", 5, None),  # comes at 25; 20 ms, 1 and 2 leave host memory
        (30, 25, 0, [1, 2, 5], "a", None, None),  # comes at 65; 5 + 200 ms, 5 finds no room
    ]
    settings = NaiveFleet(
        host=2, tier="private", tier_slots=10, loop="closed", policy="hit-density", **SETTINGS
    )
    result = run(rows, settings)
    assert (result.host_hits, result.tier_hits) == (0, 2)
    assert (result.stored, result.tier_stored) == (6, 4)
    assert result.ttft == [ms * MILLISECOND for ms in (20, 20, 205)]
    assert result.span == 270 * MILLISECOND


def test_ties_go_to_the_engine_with_fewest_rows() -> None:
    rows = [(time, 10, 0, [time], None, None, None) for time in (0, 100, 200, 300)]
    result = run(rows, NaiveFleet(engines=3, router="least-loaded", host=1, **SETTINGS))
    assert result.engines == [0, 1, 2, 0]
