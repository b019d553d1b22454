"""Rows of tables, lists and Parquet files: what is wrong with one, and what they may take."""

from __future__ import annotations

import csv
import io
import json

import pytest

from kvoffload.traces import PromptOptions, Trace, TraceError

SECRET = "qZx7secret"
UNIX = 1732550000
FIELDS = {"time": "when", "prompt": "text"}


def table(folder, *rows, name="log.csv"):
    path = folder / name
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows(rows)
    path.write_bytes(stream.getvalue().encode())
    return path


def table_of(path, fields=FIELDS, **options):
    skip_bad = options.pop("skip_bad", False)
    size = options.pop("max_line_bytes", 2**20)
    prompts = PromptOptions(fields=fields, **options)
    return Trace(path, format="csv", prompts=prompts, skip_bad=skip_bad, max_line_bytes=size)


def test_a_row_of_a_table_may_span_lines(tmp_path):
    text = 'Say "hello",\n\n and more\r\n' * 20
    header = ["who", "text", "when", "tokens", "which"]
    rows = [["a", text, "2024-11-25 15:53:20", "7", "m"], ["", text * 2, f"{UNIX}000", "", ""]]
    path = table(tmp_path, header, rows[0], [], rows[1])
    fields = FIELDS | {"output": "tokens", "session": "who", "model": "which"}
    trace = table_of(path, fields, salt="s")
    first, second = trace
    (tmp_path / "log.jsonl").write_text(
        json.dumps({"prompt": text, "time": UNIX, "model": "m", "user": "a"})
        + "\n"
        + json.dumps({"prompt": text * 2, "time": UNIX})
    )
    one, other = Trace(tmp_path / "log.jsonl", prompts=PromptOptions(salt="s"))
    assert (first.hash_ids, first.session, first.output_length) == (one.hash_ids, one.session, 7)
    assert second == other
    assert (trace.format, trace.block_tokens, trace.has_hashes) == ("csv", 16, True)


def test_the_first_line_of_a_table_is_recognised_however_long_it_is(tmp_path):
    header = ["", *(f"a_column_of_a_long_name_{n}" for n in range(9)), "created_at", "prompt"]
    cells = [*map(str, range(10)), str(UNIX), "text"]
    assert len(list(Trace(table(tmp_path, header, cells, name="export.log")))) == 1
    path = table(tmp_path, [*header, "Prompt"], [*cells, ""])
    rule = r"log.csv:1: the first line must name the column 'prompt' once, got it 2 times$"
    with pytest.raises(TraceError, match=rule):
        list(Trace(path))
    with pytest.raises(TraceError, match="must name the column 'x' once, got it 2 times"):
        list(table_of(table(tmp_path, ["x", "x"], ["1", "2"]), {"prompt": "x"}))


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_table_that_is_cut_within_quotes_has_a_bad_row(tmp_path, end):
    path = table(tmp_path, ["when", "text"], [UNIX, "whole\n"], [UNIX, f"{SECRET}\nmore"])
    path.write_bytes(path.read_bytes()[:-4] + end.encode())
    with pytest.raises(TraceError, match=r"log.csv:\d: a row must end in the file, got a quoted"):
        list(table_of(path))
    assert len(list(table_of(path, skip_bad=True))) == 1


def test_bad_rows_of_a_table_are_named_and_skipped(tmp_path):
    rows = [["x", UNIX], [SECRET], ["x", SECRET], ["y", UNIX + 1]]
    path = table(tmp_path, ["text", "when"], *rows)
    trace = table_of(path, skip_bad=True)
    assert [one.timestamp for one in trace] == [1000 * UNIX, 1000 * (UNIX + 1)]
    assert trace.bad_lines == 2
    with pytest.raises(TraceError, match=r"log.csv:3: a row must have 2 fields, got 1$"):
        list(table_of(path))
    with pytest.raises(TraceError, match=r"line must name the column 'none', got 2 others$"):
        list(table_of(path, {"time": "when", "prompt": "none"}))
    more = table(tmp_path, ["text", "when", "n"], ["x", UNIX, SECRET])
    with pytest.raises(TraceError, match=r"n must be an integer >= 0, got a string$"):
        list(table_of(more, FIELDS | {"output": "n"}))


def test_a_row_that_never_ends_is_bounded_and_the_limit_of_others_stays(tmp_path):
    before = csv.field_size_limit()
    path = tmp_path / "log.csv"
    path.write_text("text,when\n" + 'x,"' + "line\n" * 1000)
    with pytest.raises(TraceError, match="a row must be at most 1000 bytes long, got a longer one"):
        list(table_of(path, max_line_bytes=1000))
    path.write_text(f'text,when\n"{"x" * 200_000}",1\n')
    assert len(next(iter(table_of(path))).hash_ids) == 3125
    path.write_bytes(b"text,when\n\xff,1\n")
    with pytest.raises(TraceError, match="must be UTF-8, got other bytes"):
        list(table_of(path))
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("rows", [3, 60])
def test_a_column_of_counts_is_refused(tmp_path, rows):
    path = table(tmp_path, ["text", "when"], *([str(4000 + n), UNIX] for n in range(rows)))
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match="counts of tokens do not show what prompts share"):
            list(table_of(path, skip_bad=skip_bad))
    path = table(tmp_path, ["text", "when"], ["42", UNIX], ["What is 42?", UNIX], ["43", UNIX])
    assert len(list(table_of(path))) == 3


@pytest.mark.parametrize("first", [f"{UNIX},{SECRET}", f"2026-01-01,{SECRET} and more? yes", ",,"])
def test_a_table_without_names_shows_none_of_its_cells(tmp_path, first):
    path = tmp_path / "log.2026.csv"
    path.write_text(f"{first}\n{first}\n")
    with pytest.raises(TraceError, match=r"must have the names of columns, got . cells") as caught:
        list(Trace(path))
    assert SECRET not in str(caught.value)


MOONCAKE = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [0, 3]}


@pytest.mark.parametrize("ids", ["[0, 3]", "0 3"])
def test_a_table_may_have_ids(tmp_path, ids):
    cells = [json.dumps(value) for value in MOONCAKE.values()][:3]
    path = table(tmp_path, [*MOONCAKE], [*cells, ids])
    trace = Trace(path)
    (request,) = trace
    assert (request.hash_ids, request.input_length, trace.format) == ((0, 3), 1000, "mooncake")
    short = Trace(table(tmp_path, [*MOONCAKE], [*cells, "7"], [*cells, ""], [*cells, "[7]"]))
    assert [one.hash_ids for one in short] == [(7,), (), (7,)]
    for bad in ("1" * 5000, "1 x", "1, 2]"):
        with pytest.raises(TraceError, match="hash_ids"):
            list(Trace(table(tmp_path, [*MOONCAKE], [*cells, ids], [*cells, bad])))


@pytest.mark.parametrize(
    "chat", [{}, {"chat_id": 3, "parent_chat_id": -1, "type": "text", "turn": 1}]
)
def test_a_parquet_file_may_have_ids(tmp_path, arrow, parquet, chat):
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([MOONCAKE | chat] * 3), path)
    trace = Trace(path)
    assert [one.hash_ids for one in trace] == [(0, 3)] * 3
    assert trace.format == ("bailian" if chat else "mooncake")


def test_a_small_parquet_file_takes_little(tmp_path, arrow, parquet):
    path = tmp_path / "bomb.parquet"
    rows = {"ts": [1] * 30_000, "prompt": ["x" * 10_000] * 30_000}
    parquet.write_table(arrow.table(rows), path, compression="zstd")
    assert path.stat().st_size < 20_000
    with pytest.raises(TraceError, match="bytes must unpack to at most"):
        list(Trace(path))
    rows = {"ts": [1], "prompt": ["x" * 2**25]}
    parquet.write_table(arrow.table(rows), path, compression="zstd")
    with pytest.raises(TraceError, match="bytes must unpack to at most"):
        list(Trace(path))


@pytest.mark.parametrize("content", [b"PAR1", b"PAR1" + bytes(50) + b"PAR1", b"PAR1\xff" * 40])
def test_what_is_no_parquet_file_is_named(tmp_path, parquet, content):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="must be a readable Parquet file: "):
        list(Trace(path))


CHAT = {"ts": 1, "messages": [{"role": "user", "content": 'a } " ] \\ { [ \n' + "x" * 70}]}


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("size", [1, 3, 3000])
def test_a_list_is_its_objects(tmp_path, indent, size):
    path = tmp_path / "x.json"
    path.write_text("\ufeff" + json.dumps([CHAT] * size, indent=indent))  # some editors begin so
    assert len(list(Trace(path))) == size
    path.write_text("\n".join([json.dumps(CHAT, indent=2)] * size))
    assert len(list(Trace(path))) == size


def test_a_list_is_its_objects_wherever_it_is_divided_for_reading(tmp_path):
    path = tmp_path / "x.json"
    chat = CHAT | {"messages": [{"role": "user", "content": '"}' * 2**17}]}
    path.write_text(json.dumps([chat, CHAT]))  # a piece ends between a backslash and its quote
    assert len(list(Trace(path))) == 2


def test_what_is_wrong_in_a_list_is_named_with_its_line(tmp_path):
    path = tmp_path / "x.json"
    bad = [CHAT, CHAT, {"ts": 1, "messages": [3]}, CHAT]
    path.write_text("[\n" + ",\n".join(map(json.dumps, bad)) + "\n]")
    with pytest.raises(TraceError, match=r"x.json:4: messages\[0\] must be an object"):
        list(Trace(path))
    trace = Trace(path, skip_bad=True)
    assert (len(list(trace)), trace.bad_lines) == (3, 1)
    for text, rule in (
        ("[" + json.dumps(CHAT), "a list of JSON objects, got one that is cut off"),
        ("[" + json.dumps(CHAT) + ", 3]", "a list of JSON objects, got something else in it"),
        ("[" + json.dumps(CHAT)[:-3], "a JSON object, got one that is cut off"),
        ('[{"a": "' + "x" * 3000, "an object must be at most 2000 bytes long"),
    ):
        path.write_text(text)
        with pytest.raises(TraceError, match=rule):
            list(Trace(path, max_line_bytes=2000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes_per_token": 0}, "bytes_per_token must be >= 1, got 0"),
        ({"bytes_per_token": 65}, "bytes_per_token must be <= 64, got 65"),
        ({"block_tokens": 0}, "block_tokens must be >= 1, got 0"),
        ({"fields": {"time": "t"}}, r"must name one for messages or for prompt, got \['time'\]"),
        ({"fields": FIELDS | {"x": "y"}}, "fields must be among messages, .*, got 'x'"),
        ({"fields": FIELDS | {"model": ""}}, "fields must name a field for model, got ''"),
        ({"delimiter": ",,"}, "delimiter must be one character, got ',,'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PromptOptions(**options)
