"""For any bytes the reader yields valid requests or raises TraceError."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.traces import Request, Trace, TraceError
from kvoffload.traces.lines import zstd_module
from tests.fuzz.reading import check_request
from tests.traces.samples import LITELLM_BLOCKS, LOGS, chats

MOST_LINE = 2**20
MOST_RULE = 600  # characters

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


def check_reading(data: bytes, max_line_bytes: int = 200) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        path.write_bytes(data)
        for skip_bad in (False, True):
            trace = Trace(path, skip_bad=skip_bad, max_line_bytes=max_line_bytes)
            try:
                for request in trace:
                    check_request(request)
            except TraceError as error:
                assert str(error).isprintable()  # noqa: PT017
                assert len(error.rule) < MOST_RULE  # noqa: PT017


ODD = (
    *(None, True, -1, 1.5, 1e300, 10**30, "", "x", "--5", "1" * 5000, "²", "1e999", "nan", [], {}),
    *("9999-99-99T00:00:00Z", "2025-01-01T00:00:00+99:99", ["x"], [5], [[]], [None], {"a": 1}),
    *({"type": 5}, [{"type": []}], {"text": {}}, {"name": 5, "arguments": "{"}, {"function": "x"}),
    [{"role": ["x"], "content": "y"}],
    [{"role": "user", "content": "hi", "tool_calls": ["x", 7, None, {}]}],
    [{"type": "tool_result", "content": {"a": []}}],
    *({"stringValue": 5}, {"intValue": "--5"}, {"kvlistValue": {"values": [{"key": []}]}}),
)
ROWS = {
    f"{name} {number}": [make(chat) for chat in chats(4)[:3]]
    for name, makers in LOGS.items()
    for number, make in enumerate(makers)
} | {"litellm-blocks": [LITELLM_BLOCKS] * 3}


def places(value, path=()):
    """Yield the place of each value within a row, also in text that holds JSON."""
    yield path
    if isinstance(value, str) and value[:2] in ("[{", '{"'):
        yield from places(json.loads(value), (*path, "json"))
    elif isinstance(value, list | dict):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*path, key))


def put(row, path, value):
    """Return a row with another value at a place."""
    if not path:
        return value
    key, *rest = path
    if isinstance(row, str):
        return json.dumps(put(json.loads(row), rest, value))
    row = row.copy()
    row[key] = put(row[key], rest, value)
    return row


@pytest.mark.parametrize("name", ROWS)
@given(data=st.data())
def test_odd_values_in_a_log_are_requests_or_bad_rows(name, data):
    rows = [*ROWS[name]]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, 2))
        path = data.draw(st.sampled_from([*places(rows[place])]))
        rows[place] = put(rows[place], path, data.draw(st.sampled_from(ODD)))
    check_reading("".join(json.dumps(row) + "\n" for row in rows).encode(), MOST_LINE)


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
