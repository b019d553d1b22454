"""One workload as each gateway logs it: the same blocks, sessions, times and answers."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from kvoffload.traces import PromptOptions, Trace, TraceError
from kvoffload.traces.formats import LOG_FORMATS
from kvoffload.traces.rows import ParquetRows
from kvoffload.traces.sorting import counted_from_first, sorted_by_time

from .samples import LOGS, UNIX

FORMS = [pytest.param(name, rows, id=form) for (name, form), rows in LOGS.items()]
OPENAI = LOGS["openai", "openai"]


def write(folder, text, name="log.jsonl"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def structure(requests):
    """Return what is the same in all formats: ids are numbered by their first occurrence."""
    numbers = {}
    return [
        (
            one.timestamp,
            one.input_length,
            one.output_length,
            one.session,
            [numbers.setdefault(block, len(numbers)) for block in one.hash_ids],
        )
        for one in counted_from_first(sorted_by_time(requests))
    ]


def read(path, **options):
    format = options.pop("format", None)
    trace = Trace(path, format=format, prompts=PromptOptions(salt="s", **options))
    return structure(trace), trace


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return what the plainest log shows."""
    return read(write(tmp_path_factory.mktemp("plain"), lines(OPENAI)))[0]


def test_every_log_has_samples_and_a_row_of_the_guide():
    assert {name for name, _ in LOGS} | {"litellm-blocks"} == {*LOG_FORMATS}
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "traces.md"
    if not guide.is_file():
        pytest.skip("the source tree is not beside the tests")
    rows = re.findall(r"(?m)^\| (`.*?`) \|", guide.read_text("utf-8").split("## Logs of")[1])
    assert not {*LOG_FORMATS} - {*re.findall("`(.*?)`", " ".join(rows))}


@pytest.mark.parametrize("format", ["openai", None])
@pytest.mark.parametrize(("name", "rows"), FORMS)
def test_the_order_and_what_is_around_does_not_matter(expected, tmp_path, name, rows, format):
    """A list over several lines, shuffled, with rows that are no chats in between."""
    rows = random.Random(1).sample(rows, len(rows))
    other = {"url": "/v1/embeddings", "body": {"model": "bge", "input": "x" * 300}}
    text = json.dumps([*rows[:3], other, *rows[3:]], indent=1)
    found, trace = read(write(tmp_path, text, "log.json"), format=format)
    assert sorted(found) == sorted(expected)
    assert "1 row left out: of calls that are no chats" in trace.remarks
    assert trace.format == name


@pytest.mark.parametrize(("name", "rows"), FORMS)
def test_a_request_that_has_two_rows_counts_once_if_its_log_has_ids(tmp_path, name, rows):
    row, other, *_ = rows
    count = 1 if LOG_FORMATS[name].ids else 2
    found, trace = read(write(tmp_path, lines([row, row, other])))
    assert len(found) == count + 1
    left_out = "1 row left out: of requests that an earlier row has"
    assert (left_out in trace.remarks) == (count == 1)


@pytest.mark.parametrize(("name", "rows"), FORMS)
def test_every_log_shows_the_same_and_dirty_lines_are_skipped(expected, tmp_path, name, rows):
    rows = lines(rows).splitlines()
    rows[5:5] = [
        *("not json", '{"messages": null, "timestamp": 1}', "[1, 2"),
        '{"a": "' + "x" * 300 + '"}',
    ]
    path = write(tmp_path, "\n".join([*rows, rows[-1][:200]]))
    trace = Trace(path, skip_bad=True, prompts=PromptOptions(salt="s"))
    assert structure(trace) == expected
    assert (trace.format, trace.block_tokens, trace.has_hashes) == (name, 16, True)
    assert trace.bad_lines >= 3
    assert not [text for text in trace.remarks if "not read" in text]
    assert trace.remarks[0].startswith(f"read as {name}: ")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_shows_the_same(expected, tmp_path, delimiter):
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, delimiter=delimiter)
    writer.writerow(["Created At", "Session ID", "Model", "Messages", "Tools", "Completion Tokens"])
    for one in OPENAI:
        cells = [one["timestamp"], one["session_id"], one["request"]["model"]]
        cells += [json.dumps(one["request"][name]) for name in ("messages", "tools")]
        tokens = one["response"]["usage"]["completion_tokens"]
        writer.writerow([*cells, f"{tokens}.0"])  # as pandas writes a column with gaps
    path = tmp_path / "export.csv"
    path.write_bytes(b"\xef\xbb\xbf" + stream.getvalue().encode())
    assert read(path)[0] == expected
    fields = {"messages": "Messages", "tools": "Tools", "time": "Created At", "model": "Model"}
    fields |= {"session": "Session ID", "output": "Completion Tokens"}
    for options in ({}, {"format": "csv"}, {"delimiter": delimiter}):
        assert read(path, fields=fields, **options)[0] == expected


@pytest.mark.parametrize("nested", [False, True])
def test_a_parquet_file_shows_the_same(expected, tmp_path, monkeypatch, arrow, parquet, nested):
    rows = []
    for one in OPENAI:
        request = one["request"]
        texts = {name: json.dumps(request[name]) for name in ("messages", "tools")}
        request = request | texts if nested else json.dumps(request)
        rows.append({"timestamp": one["timestamp"], "session_id": one["session_id"]})
        rows[-1] |= {"request": request, **one["response"]["usage"]}
    path = tmp_path / "log.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=7)
    monkeypatch.setattr("kvoffload.traces.rows.FREE_BYTES", 0)  # its own size allows it all
    found, trace = read(path)
    assert found == expected
    assert trace.format == "openai"
    times = arrow.array([1, 2000, 3 * 10**9 + 1], arrow.timestamp("ns", "UTC"))
    parquet.write_table(arrow.table({"prompt": ["x"] * 3, "created": times}), path)
    assert [one.timestamp for one in Trace(path)] == [0, 0, 3000]
    monkeypatch.setattr(ParquetRows, "_decoded", lambda *_: iter([{"created": Fraction(3, 2)}]))
    assert next(ParquetRows(str(path), 2**20)) == b'{"created":"3/2"}'


def test_fields_name_what_is_not_recognised(expected, tmp_path):
    rows = [
        {"event": {"at": one["timestamp"], "who": one["session_id"]}}
        | {"ask": one["request"]["messages"], "uses": one["request"]["tools"]}
        | {"llm": one["request"]["model"], "n": one["response"]["usage"]["completion_tokens"]}
        for one in OPENAI
    ]
    path = write(tmp_path, lines(rows))
    with pytest.raises(TraceError) as caught:
        read(path)
    assert caught.value.rule == (
        "must have messages, a prompt or the ids of blocks, got an object with the fields "
        "event.at, event.who, ask, uses, llm, n; --fields messages=ask,time=event.at names where "
        "they are"
    )
    fields = {"messages": "ask", "time": "event.at", "session": "event.who", "tools": "uses"}
    found, trace = read(path, fields=fields | {"model": "llm", "output": "n"})
    assert found == expected
    assert trace.format == "fields"


CALL = {"type": "function_call", "name": "f", "arguments": "x" * 5000}


@pytest.mark.thorough
@pytest.mark.parametrize("given", ["x" * 5000, [CALL]])
def test_chains_of_a_small_log_are_bounded(tmp_path, given):
    row = {"created_at": UNIX, "input": given, "conversation": "c"}
    path = write(tmp_path, lines([row] * 400))
    with pytest.raises(TraceError, match="must have at most"):
        list(Trace(path))
