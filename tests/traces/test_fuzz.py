"""For odd values anywhere in a row the reader yields valid requests or raises TraceError."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.traces import Trace, TraceError
from tests.fuzz.reading import check_request
from tests.traces.samples import (
    AGENT,
    BAILIAN,
    DELTAS,
    DYNAMO,
    LITELLM_BLOCKS,
    LMCACHE,
    LOGS,
    MOONCAKE,
    WEKA,
)

MOST_LINE = 2**20
MOST_RULE = 600  # characters


def check_reading(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        path.write_bytes(data)
        for skip_bad in (False, True):
            trace = Trace(path, skip_bad=skip_bad, max_line_bytes=MOST_LINE)
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
ROWS = {f"{name} {form}": rows[:3] for (name, form), rows in LOGS.items()}
ROWS |= {
    "litellm-blocks": [LITELLM_BLOCKS] * 3,
    "mooncake": [MOONCAKE | {"request_id": "r", "wait_for": ["r"], "delay": 5, "stop": "s"}] * 3,
    "mooncake-delta": [MOONCAKE | more for more in (*DELTAS, DELTAS[1])],
    "bailian": [BAILIAN] * 3,
    "lmcache": [LMCACHE] * 3,
    "weka": [WEKA | {"requests": [*WEKA["requests"], AGENT]}] * 3,
    "dynamo": [DYNAMO] * 3,
}


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
def test_odd_values_are_requests_or_bad_rows(name, data):
    rows = [*ROWS[name]]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, 2))
        path = data.draw(st.sampled_from([*places(rows[place])]))
        rows[place] = put(rows[place], path, data.draw(st.sampled_from(ODD)))
    check_reading("".join(json.dumps(row) + "\n" for row in rows).encode())
