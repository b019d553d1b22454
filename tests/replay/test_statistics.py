"""Percentiles from a histogram equal those of a list, up to its step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.replay.durations import DurationHistogram

pytestmark = pytest.mark.fast

durations = st.lists(st.integers(0, 2**50) | st.integers(0, 300), min_size=1)


@given(durations, st.floats(0, 100))
def test_percentiles(values, percent):
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    exact = next(
        value
        for rank, value in enumerate(sorted(values), start=1)
        if rank >= len(values) * percent / 100
    )
    assert exact <= histogram.percentile(percent) <= exact * (1 + 1 / 64)
    assert histogram.percentile(100) == histogram.max == max(values)
    assert histogram.total == sum(values)
    assert histogram.count == len(values)


def test_memory_does_not_grow_with_the_number_of_durations():
    histogram = DurationHistogram()
    for value in range(0, 2**20, 7):
        histogram.add(value)
    assert len(histogram._counts) < 64 * 20


@pytest.mark.parametrize("percent", [0, 50, 100])
def test_of_nothing_is_zero(percent):
    assert DurationHistogram().percentile(percent) == 0
