"""The survey of a trace, and when blocks return, against the same counted naively."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.traces import Request, Survey, Workload
from kvoffload.traces.returns import KeptCounter, Returns
from kvoffload.traces.survey import BlockLengths

pytestmark = pytest.mark.fast

rows = st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 20), max_size=12), max_size=30)


@given(rows, st.integers(1, 150))
def test_unique_blocks_and_ideal_hits(rows, batch):
    seen: set[int] = set()
    hits = 0
    for row in rows:
        for hash_id in row:
            if hash_id not in seen:
                break
            hits += 1
        seen.update(row)
    returns = Returns(blocks=KeptCounter(()), batch=batch)
    survey = Survey.of([Request(0, 0, 0, tuple(row)) for row in rows], returns=returns)
    assert (survey.unique_blocks, survey.ideal_hits) == (len(seen), hits)


def partial(tokens: int, size: int) -> int:
    return -(-tokens // size)


def full(tokens: int, size: int) -> int:
    return tokens // size


@pytest.mark.parametrize("blocks", [partial, full])
@given(
    block_tokens=st.integers(1, 3000),
    lengths=st.lists(st.integers(0, 20_000), min_size=1, max_size=20),
)
def test_the_block_sizes_that_fit_are_exactly_these(blocks, block_tokens, lengths):
    sizes = BlockLengths()
    for tokens in lengths:
        sizes.add(tokens, blocks(tokens, block_tokens))

    def fits(size: int, way: Callable[[int, int], int] = blocks) -> bool:
        return all(way(tokens, size) == blocks(tokens, block_tokens) for tokens in lengths)

    found = sizes.with_partial if blocks is partial else sizes.full_only
    assert fits(block_tokens)
    assert found.holds(block_tokens)
    assert fits(found.smallest)
    assert found.smallest == 1 or not fits(found.smallest - 1)
    if found.largest is None:
        assert fits(10**9)
    else:
        assert fits(found.largest)
        assert not fits(found.largest + 1)
    best = sizes.best()
    with_blocks = any(blocks(tokens, block_tokens) for tokens in lengths)
    assert (best is None) == (not with_blocks)
    assert sizes.fits(block_tokens) == with_blocks
    assert best is None or fits(best, partial) or fits(best, full)


@pytest.mark.parametrize(
    ("rows", "best", "fitting"),
    [
        ([(1000, 2)], 512, "500 to 999 or 334 to 500"),  # the power of two
        ([(1803, 3)], 512, "601 to 901 or 451 to 601"),  # only without a partial block
        ([(1803, 3), (100, 1)], 608, "601 to 901"),  # the multiple of 16
        ([(700, 2), (400, 1), (200, 0)], 256, "234 to 350"),
        ([(1203, 2), (1809, 4)], 602, "602 or 402 to 452"),
        ([(300, 1)], 512, "300 or more or 151 to 300"),
        ([(1000, 2), (1000, 1)], None, ""),
        ([(5, 0)], None, ""),
        ([(0, 1)], None, ""),
        ([(0, 0)], None, ""),  # every size fits
        ([], None, ""),
    ],
)
def test_the_block_size_that_is_chosen(rows, best, fitting):
    sizes = BlockLengths()
    for tokens, blocks in rows:
        sizes.add(tokens, blocks)
    assert (sizes.best(), str(sizes)) == (best, fitting)


def test_without_unique_blocks_they_are_none():
    survey = Survey.of(Workload(20), unique=False)
    assert survey.blocks > 0
    assert survey.unique_blocks is None
    assert survey.ideal_hit_ratio is None


def test_types_are_counted_and_the_largest_turn():
    requests = [Request(0, 0, 0, (), type="text" if n % 3 else "tool", turn=n) for n in range(9)]
    survey = Survey.of(requests)
    assert (survey.types, survey.most_turns) == ({"text": 6, "tool": 3}, 8)


def test_progress_is_reported_now_and_then():
    reported: list[int] = []
    Survey.of(Workload(600), progress=reported.append)
    assert reported == [256, 512]


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
