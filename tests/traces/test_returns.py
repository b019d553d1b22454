"""When sessions and blocks return, against the same counted naively."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.traces import Request
from kvoffload.traces.returns import KeptCounter, Returns

PROMPTS = st.lists(st.integers(0, 6), max_size=5, unique=True).map(tuple)
ROWS = st.lists(st.tuples(st.integers(0, 40), PROMPTS), max_size=30)


def kept_hits(rows, seconds):
    """Return the hits of a cache that keeps blocks so long, counted by its definition."""
    used, hits = {}, 0
    for now, ids in rows:
        for hash_id in ids:
            if now - used.get(hash_id, -math.inf) > seconds:
                break
            hits += 1
        used.update(dict.fromkeys(ids, now))
    return hits


@given(rows=ROWS, batch=st.sampled_from([1, 30, 1000]))
def test_kept_blocks_hit_as_counted_naively(rows, batch):
    rows = sorted(rows, key=lambda row: row[0])
    returns = Returns(blocks=KeptCounter((1, 5, 20)), batch=batch)
    for now, ids in rows:
        returns.add(Request(1000 * now, 0, 0, ids))
    returns.finish()
    counter = returns.blocks
    assert counter.hits == [kept_hits(rows, seconds) for seconds in counter.seconds]
    assert counter.blocks == sum(len(ids) for _, ids in rows)


def test_a_trace_without_requests_has_no_hits():
    returns = Returns()
    returns.finish()
    assert returns.blocks.ratios == [0.0] * 7
