"""The blocks of a decoded trace, against a sort of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.replay import DecodedTrace, requests
from kvoffload.traces import Request

IDS = st.integers(0, 12) | st.sampled_from([2**63, 2**64 - 1])
ROWS = st.lists(st.lists(IDS, max_size=6).map(tuple), max_size=20)


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
