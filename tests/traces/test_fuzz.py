"""For any bytes the reader yields valid requests or raises TraceError."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.traces import Request, Trace, TraceError
from kvoffload.traces.lines import zstd_module

values = st.one_of(
    st.integers(-2, 2), st.integers(0, 2**70), st.floats(), st.just("7"), st.none(), st.booleans()
)
near_rows = st.fixed_dictionaries(
    {},
    optional={
        "timestamp": values,
        "input_length": values,
        "output_length": values,
        "hash_ids": st.one_of(st.lists(st.integers(0, 9), max_size=4), values),
        "session": st.one_of(values, st.text(max_size=9)),
    },
)
good_rows = st.fixed_dictionaries(
    {
        "timestamp": st.integers(0, 10**12),
        "input_length": st.integers(0, 2**63 - 1),
        "output_length": st.integers(0, 2**63 - 1),
        "hash_ids": st.lists(st.integers(0, 2**64 - 1)),
    }
)
lines = st.one_of(
    st.one_of(near_rows, good_rows).map(lambda r: json.dumps(r).encode()), st.binary()
)
files = st.lists(lines, max_size=5).map(b"\n".join)
compressed = files.map(lambda data: gzip.compress(data, mtime=0))


@st.composite
def broken(draw):
    """A file, compressed or not, truncated or with one byte changed."""
    data = draw(st.one_of(files, compressed, compressed.map(lambda data: data + data)))
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    if data and draw(st.booleans()):
        position = draw(st.integers(0, len(data) - 1))
        data = data[:position] + bytes([draw(st.integers(0, 255))]) + data[position + 1 :]
    return data


def check_reading(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        path.write_bytes(data)
        for skip_bad in (False, True):
            trace = Trace(path, skip_bad=skip_bad, max_line_bytes=200)
            try:
                for request in trace:
                    check_valid(request)
            except TraceError as error:
                assert str(error).isprintable()  # noqa: PT017
                assert len(error.rule) < 300  # noqa: PT017


def check_valid(request: Request) -> None:
    assert type(request.timestamp) in (int, float)
    assert 0 <= request.timestamp < float("inf")
    for tokens in (request.input_length, request.output_length):
        assert type(tokens) is int
        assert 0 <= tokens < 2**63
    assert type(request.hash_ids) is tuple
    assert all(type(i) is int and 0 <= i < 2**64 for i in request.hash_ids)
    assert request.session is None or type(request.session) is str


@given(broken())
def test_reader_on_any_bytes(data):
    check_reading(data)


@given(st.binary())
def test_reader_on_any_bytes_after_a_zstandard_start(data):
    zstd = pytest.importorskip(zstd_module())
    check_reading(b"\x28\xb5\x2f\xfd" + data)
    check_reading(zstd.compress(data)[:-1])


@given(st.lists(good_rows, min_size=1))
def test_good_rows_come_out_as_they_went_in(rows):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        path.write_bytes(b"\n".join(json.dumps(row).encode() for row in rows))
        assert list(Trace(path)) == [
            Request(**row | {"hash_ids": tuple(row["hash_ids"])}) for row in rows
        ]
