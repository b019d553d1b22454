"""Traces of single objects as text: in arrays, the same as row by row."""

from __future__ import annotations

import gzip
import random

import numpy as np
import pytest

from kvoffload.replay import DecodedTrace
from kvoffload.traces import MergedTrace, Survey, Trace
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.formats import recognise
from kvoffload.traces.returns import Returns

HEADERS = (
    "",
    "time,object,size\n",
    "timestamp, obj_id, size\r\n",
    "\ufeff",
    "\ufefftime,key,size\n",
)


def rows(count, seed=0, name=str):
    rng = random.Random(seed)
    return "".join(
        f"{100 + number // 3},{name(int(rng.paretovariate(0.8)))},{rng.randint(1, 99)}\n"
        for number in range(count)
    )


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_rows_are_requests_of_one_block(tmp_path, header, pack):
    path = tmp_path / "w.csv"
    text = f"{header}7,5,100\n9, 6 ,1\n9,5,1"
    path.write_bytes(pack(text.encode()))
    trace = Trace(path)
    found = list(trace)
    assert [(one.timestamp, one.hash_ids) for one in found] == [
        (0, (5,)),
        (2000, (6,)),
        (2000, (5,)),
    ]
    assert (trace.format, trace.has_hashes, trace.block_tokens) == ("objects", True, None)
    assert list(Trace(path, format="objects")) == found
    survey = Survey.of(trace)
    assert (survey.backwards, survey.farthest_back, survey.seconds) == (0, 0, 2)


def test_arrays_and_requests_are_surveyed_and_decoded_alike(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text(rows(300_000))
    merged = MergedTrace([str(path)])
    apart = list(Trace(path))
    surveys, traces, returns = [], [], []
    for requests in (merged, apart):
        counts = Returns()
        surveys.append(Survey.of(requests, returns=counts))
        returns.append((counts.blocks.ratios, counts.has_times))
        counted = Survey.of((), unique=False)
        traces.append(DecodedTrace.of(counted.counting(requests)))
        assert counted.blocks == 300_000
    one, other = surveys
    for name in ("requests", "blocks", "unique_blocks", "ideal_hits", "longest", "seconds"):
        assert getattr(one, name) == getattr(other, name)
    assert (one.backwards, one.block_tokens) == (other.backwards, other.block_tokens)
    assert one.chaining.unchained_ids == other.chaining.unchained_ids == 0
    assert returns[0] == returns[1]
    for name, array in traces[0].arrays().items():
        assert np.array_equal(array, traces[1].arrays()[name]), name


def test_objects_on_standard_input_are_named():
    with pytest.raises(BadLineError, match="--format objects reads time,object,size from stand"):
        recognise(b"1,5,100")
