"""Rows of tables, lists and Parquet files: what is wrong with one, and what they may take."""

from __future__ import annotations

import csv
import json

import pytest

from kvoffload.traces import PromptOptions, Trace, TraceError

FIELDS = {"time": "when", "prompt": "text"}


def table_of(path, fields=FIELDS, **options):
    skip_bad = options.pop("skip_bad", False)
    size = options.pop("max_line_bytes", 2**20)
    prompts = PromptOptions(fields=fields, **options)
    return Trace(path, format="csv", prompts=prompts, skip_bad=skip_bad, max_line_bytes=size)


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


MOONCAKE = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [0, 3]}


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
    rows = {"ts": [1] * 5_000, "prompt": ["x" * 10_000] * 5_000}
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
@pytest.mark.parametrize("size", [1, 3, 1200])
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
