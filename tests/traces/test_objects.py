"""Traces of single objects as text: in arrays, the same as row by row."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.replay import DecodedTrace
from kvoffload.traces import MergedTrace, Survey, Trace
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.formats import recognise
from kvoffload.traces.returns import Returns


def rows(count):
    rng = random.Random(0)
    return "".join(
        f"{100 + number // 3},{int(rng.paretovariate(0.8))},{rng.randint(1, 99)}\n"
        for number in range(count)
    )


def test_arrays_and_requests_are_surveyed_and_decoded_alike(tmp_path, monkeypatch):
    monkeypatch.setattr("kvoffload.traces.objects._PIECE", 2**14)
    monkeypatch.setattr("kvoffload.replay.requests._Numbering.BATCH", 2**12)
    path = tmp_path / "w.csv"
    path.write_text(rows(30_000))
    merged = MergedTrace([str(path)])
    assert merged.id_spaces == 1
    assert MergedTrace([str(path), str(path)]).batches() is None
    apart = list(Trace(path))
    surveys, traces, returns = [], [], []
    for requests in (merged, apart):
        counts = Returns(batch=2**12)
        surveys.append(Survey.of(requests, returns=counts))
        returns.append((counts.blocks.ratios, counts.has_times))
        counted = Survey.of((), unique=False)
        traces.append(DecodedTrace.of(counted.counting(requests)))
        assert counted.blocks == 30_000
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
