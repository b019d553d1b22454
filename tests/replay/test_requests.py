"""The blocks of a decoded trace, against a sort of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.replay import DecodedTrace, HintOptions, Selection, requests
from kvoffload.traces import Request

IDS = st.integers(0, 12) | st.sampled_from([2**63, 2**64 - 1])
ROW = st.lists(IDS, max_size=6).map(tuple)
ROWS = st.lists(ROW, max_size=20)


@given(rows=ROWS, batch=st.sampled_from([1, 5, 2**18]))
def test_blocks_are_indices_into_the_distinct_ids_ascending(rows, batch):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests._Numbering, "BATCH", batch)
        trace = DecodedTrace.of(Request(0, len(row), 0, row) for row in rows)
    flat = np.array([hash_id for row in rows for hash_id in row], dtype=np.uint64)
    ids, blocks = np.unique(flat, return_inverse=True)
    assert (trace.ids.dtype, trace.blocks.dtype) == (np.uint64, np.uint32)
    assert trace.ids.tolist() == ids.tolist()
    assert trace.blocks.tolist() == blocks.tolist()
    assert trace.starts.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    assert trace.lengths.tolist() == [len(row) for row in rows]


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 30) | st.just(2**63 - 1), ROWS.map(lambda r: sum(r, ())))
    ),
    size=st.integers(1, 9),
)
def test_full_blocks_are_those_of_a_selection(rows, size):
    given = [
        Request(index, length, 1, ids, "s", ends=True) for index, (length, ids) in enumerate(rows)
    ]
    options = {"hints": HintOptions(told="ends") if given else None, "arrivals": True}
    cut = DecodedTrace.of(given, **options).full_blocks(size)
    chosen = DecodedTrace.of(Selection(given, full_block_tokens=size), **options)
    assert cut.fingerprint() == chosen.fingerprint()
    for name, array in chosen.arrays().items():
        assert getattr(cut, name).dtype == array.dtype
        assert getattr(cut, name).tolist() == array.tolist()
    if given:
        assert cut.hints.ends.tolist() == chosen.hints.ends.tolist()
    assert cut.arrivals.following.tolist() == chosen.arrivals.following.tolist()
