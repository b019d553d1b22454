"""The lines of a recording: the same from both twins, with ids that reveal nothing."""

import json
import os
import sys
import time
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.traces import _request_lines_py as python_lines


def test_siphash_by_its_published_test_vector():
    """Key 00 … 0f and message 00 … 07, from the reference implementation's list."""
    import numpy as np

    message = np.array([0x0706050403020100], dtype=np.uint64)
    low, high = 0x0706050403020100, 0x0F0E0D0C0B0A0908
    assert int(python_lines._siphash(message, low, high)[0]) == 0x93F5F5799A932462


@given(
    st.lists(st.lists(st.binary(min_size=1, max_size=40), max_size=600), max_size=3),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**31 - 1),
    st.integers(0, 1),
)
def test_the_twins_write_the_same_lines(batches, low, high, block_tokens, more):
    compiled_lines = pytest.importorskip("kvoffload.traces._request_lines_c")
    assert compiled_lines.ID_BYTES == python_lines.ID_BYTES
    assert compiled_lines.LINE_BYTES == python_lines.LINE_BYTES
    start = time.monotonic_ns()
    requests = [python_lines.packed(hashes, more) for hashes in batches]
    for request, hashes in zip(requests, batches, strict=True):
        again = compiled_lines.packed(hashes, more)
        assert again[8:] == request[8:]
        assert start <= int.from_bytes(request[:8], sys.byteorder)
        assert int.from_bytes(again[:8], sys.byteorder) <= time.monotonic_ns() + 2
    text = python_lines.request_lines(requests, low, high, start, block_tokens)
    assert compiled_lines.request_lines(requests, low, high, start, block_tokens) == text
    lines = text.splitlines(keepends=True)
    assert len(lines) == len(batches)
    ids = {}
    for line, hashes in zip(lines, batches, strict=True):
        assert len(line) <= python_lines.LINE_BYTES + python_lines.ID_BYTES * len(hashes)
        row = json.loads(line)
        assert row["input_length"] == len(hashes) * block_tokens + more
        assert all(len(str(hash_id)) == 16 for hash_id in row["hash_ids"])
        ids |= zip(hashes, row["hash_ids"], strict=True)
    assert len(set(ids.values())) == len(set(chain(*batches)))


def test_the_longest_line_holds_the_largest_numbers():
    compiled_lines = pytest.importorskip("kvoffload.traces._request_lines_c")
    request = (2**63 - 2).to_bytes(8, sys.byteorder) + bytes(8)
    for lines in (python_lines, compiled_lines):
        line = lines.request_lines([request], 0, 0, 0, 2**63 - 1)
        assert line.startswith(b'{"timestamp":9223372036854,"input_length":9223372036854775807,')
        assert len(line) <= lines.LINE_BYTES + lines.ID_BYTES


@pytest.mark.parametrize("name", ["_request_lines_py", "_request_lines_c"])
def test_ids_of_many_hashes_are_distinct(name):
    lines = pytest.importorskip(f"kvoffload.traces.{name}")
    row = json.loads(lines.request_lines([os.urandom(8 * 200_001)], 1, 2, 0, 1))
    assert len(set(row["hash_ids"])) == 200_000
