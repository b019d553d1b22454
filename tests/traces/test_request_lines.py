"""The lines of a recording: the same from both twins, with ids that reveal nothing."""

import json
import os
import sys
import time
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.traces import _request_lines_py as python_lines
from kvoffload.traces.request_log import MAX_EXPECT_MS

MOST_SAID = 2 * MAX_EXPECT_MS + 1


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
    st.lists(st.just(0) | st.integers(0, MOST_SAID), min_size=3, max_size=3),
)
def test_the_twins_write_the_same_lines(batches, low, high, block_tokens, more, said):
    compiled_lines = pytest.importorskip("kvoffload.traces._request_lines_c")
    assert compiled_lines.ID_BYTES == python_lines.ID_BYTES
    assert compiled_lines.LINE_BYTES == python_lines.LINE_BYTES
    start = time.monotonic_ns()
    said = said[: len(batches)]
    requests = [python_lines.packed(*each) for each in zip(batches, repeat(more), said)]
    for request, hashes, word in zip(requests, batches, said, strict=True):
        again = compiled_lines.packed(hashes, more, word)
        assert len(again) == 8 * (1 + bool(word) + len(hashes))
        assert again[8:] == request[8:]
        assert again[0 if sys.byteorder == "little" else 7] & 3 == more + 2 * bool(word)
        assert start <= int.from_bytes(request[:8], sys.byteorder)
        assert int.from_bytes(again[:8], sys.byteorder) <= time.monotonic_ns() + 3
    text = python_lines.request_lines(requests, low, high, start, block_tokens)
    assert compiled_lines.request_lines(requests, low, high, start, block_tokens) == text
    lines = text.splitlines(keepends=True)
    assert len(lines) == len(batches)
    ids = {}
    for line, hashes, word in zip(lines, batches, said, strict=True):
        assert len(line) <= python_lines.LINE_BYTES + python_lines.ID_BYTES * len(hashes)
        row = json.loads(line)
        assert row.get("expect", 0) == word >> 1
        assert ("expect" in row) is (word > 1)
        assert row.get("ends", False) is bool(word & 1)
        assert ("ends" in row) is bool(word & 1)
        assert row["input_length"] == len(hashes) * block_tokens + more
        assert all(len(str(hash_id)) == 16 for hash_id in row["hash_ids"])
        ids |= zip(hashes, row["hash_ids"], strict=True)
    assert len(set(ids.values())) == len(set(chain(*batches)))


def test_the_longest_line_holds_the_largest_numbers():
    compiled_lines = pytest.importorskip("kvoffload.traces._request_lines_c")
    without = (2**63 - 4).to_bytes(8, sys.byteorder) + bytes(8)
    hinted = b"".join(word.to_bytes(8, sys.byteorder) for word in (2**63 - 2, 2**63 - 1, 0))
    start = b'{"timestamp":9223372036854,"input_length":9223372036854775807,'
    for lines in (python_lines, compiled_lines):
        for request, end in ((without, b"]}\n"), (hinted, b',"ends":true}\n')):
            line = lines.request_lines([request], 0, 0, 0, 2**63 - 1)
            assert line.startswith(start)
            assert line.endswith(end)
            assert len(line) <= lines.LINE_BYTES + lines.ID_BYTES


@pytest.mark.parametrize("name", ["_request_lines_py", "_request_lines_c"])
def test_a_line_without_hints_is_what_it_was(name):
    """And one with hints is the same with the fields behind the ids."""
    lines = pytest.importorskip(f"kvoffload.traces.{name}")

    def line(*said):
        request = lines.packed([], 0, *said)
        moment = int.from_bytes(request[:8], sys.byteorder) // 10**6
        text = lines.request_lines([request], 1, 2, 0, 16)
        return text.replace(b"%d" % moment, b"T")

    row = b'{"timestamp":T,"input_length":0,"output_length":0,"hash_ids":[]'
    assert line() == line(0) == row + b"}\n"
    assert line(1) == row + b',"ends":true}\n'
    assert line(2 * 2500) == row + b',"expect":2500}\n'
    assert line(2 * 2500 + 1) == row + b',"expect":2500,"ends":true}\n'


@pytest.mark.parametrize("name", ["_request_lines_py", "_request_lines_c"])
def test_ids_of_many_hashes_are_distinct(name):
    lines = pytest.importorskip(f"kvoffload.traces.{name}")
    row = json.loads(lines.request_lines([bytes(8) + os.urandom(8 * 200_000)], 1, 2, 0, 1))
    assert len(set(row["hash_ids"])) == 200_000
