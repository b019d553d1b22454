"""Belady's choice with bypass, against trying everything."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.advise.ceiling import belady_hits
from kvoffload.traces import Survey

CHAINS = [(0,), (0, 1), (0, 1, 2), (0, 3), (4,), (4, 5), (6,)]  # prefix-chained ids


def hits(rows, capacity):
    ids = np.array(list(itertools.chain(*rows)), dtype=np.uint64)
    return belady_hits(ids, np.array([len(row) for row in rows], dtype=np.int64), capacity)


def most_hits(rows, capacity):
    """Try every set of blocks that could be kept after each request."""
    reached = {frozenset(): 0}
    for row in rows:
        following = {}
        for kept, so_far in reached.items():
            found = next((n for n, block in enumerate(row) if block not in kept), len(row))
            have = sorted(kept | set(row))
            for size in range(min(capacity, len(have)) + 1):
                for choice in map(frozenset, itertools.combinations(have, size)):
                    following[choice] = max(following.get(choice, 0), so_far + found)
        reached = following
    return max(reached.values())


@given(st.lists(st.sampled_from(CHAINS), max_size=6), st.integers(0, 3))
def test_no_choice_whatever_hits_more(rows, capacity):
    assert hits(rows, capacity) == most_hits(rows, capacity)


@given(st.lists(st.sampled_from(CHAINS), max_size=30))
def test_with_room_for_all_it_hits_what_a_cache_without_bounds_does(rows):
    from kvoffload.traces import Request

    survey = Survey.of(Request(0, 0, 0, row) for row in rows)
    assert hits(rows, 7) == survey.ideal_hits


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_an_empty_trace_has_no_hits(capacity):
    assert hits([], capacity) == 0
