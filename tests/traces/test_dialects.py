"""Rows of Mooncake's form as AIPerf and Dynamo write them."""

from __future__ import annotations

import json

import pytest

from kvoffload.traces import MergedTrace, Trace, TraceError


def row(**fields):
    return {"input_length": 32, "output_length": 10, "hash_ids": [1, 2], **fields}


def read(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    trace = Trace(path)
    return list(trace), trace


def test_session_id_is_the_session_and_delay_the_wait(tmp_path):
    (first, second), trace = read(
        tmp_path,
        row(timestamp=0, session_id="a"),
        row(timestamp=9, session_id=7, session="own", delay=250, tool_wait_ms=50),
    )
    assert (first.session, first.think) == ("a", None)
    assert (second.session, second.think) == ("own", 300)
    assert trace.remarks == []


OTHERS = {"created_time": 5, "input_tokens": 48, "output_tokens": 3, "hash_ids": [1, 2, 3]}


def test_other_names_of_lengths_and_timestamp_count_where_the_own_ones_are_missing(tmp_path):
    (first, second), _ = read(tmp_path, OTHERS, {**row(timestamp=9), **OTHERS})
    assert (first.timestamp, first.input_length, first.output_length) == (5, 48, 3)
    assert (second.timestamp, second.input_length, second.output_length) == (9, 32, 10)


def test_a_request_without_timestamp_follows_the_one_before_in_its_session(tmp_path):
    rows, trace = read(
        tmp_path,
        row(timestamp=1000, session_id="a", service=500),
        row(timestamp=1200, session_id="b"),
        row(session_id="a", delay=30),
        row(session_id="b", delay_ms=5),
        row(session_id="new", delay=7),
    )
    assert [one.timestamp for one in rows] == [1000, 1200, 1530, 1405, 7]
    (remark,) = trace.remarks
    assert remark.startswith("3 requests have no timestamp: it is counted from the end of those b")
    assert remark.endswith(", of 1 after an end estimated at 20 ms a token")


def test_a_request_waits_for_the_last_of_those_that_it_names(tmp_path):
    rows, trace = read(
        tmp_path,
        row(timestamp=0, request_id="x", service=100),
        row(timestamp=0, request_id="y", service=400),
        row(request_id="z", wait_for=["x", "y"], tool_wait_ms=50, delay=1),
        row(wait_for="z"),
        row(wait_for="unknown", delay=3),
    )
    assert [one.timestamp for one in rows] == [0, 0, 451, 651, 3]
    assert trace.remarks[1] == "1 requests wait for requests that did not come before"


def test_what_is_not_read_is_named_once_with_its_count(tmp_path):
    _, trace = read(
        tmp_path,
        row(timestamp=0, branches=["b"], tool_events=[]),
        row(timestamp=1, branches=["c"]),
        row(timestamp=2, prefix_reset=None),
    )
    assert trace.remarks == [
        "branches of 2 requests is not read",
        "tool_events of 1 requests is not read",
    ]
    path = str(trace.path)
    merged = MergedTrace([path, path])
    list(merged)
    assert merged.remarks[0] == f"{path}: branches of 2 requests is not read"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, "must have the field timestamp"),
        ({"session_id": "a"}, "must have the field timestamp"),
        ({"timestamp": 0, "delay": -1}, "delay must be a number >= 0, got -1"),
        ({"timestamp": 0, "delay_ms": 2**54}, "delay_ms must be a number <= 9007199254740992"),
        ({"timestamp": 0, "session_id": 1.5}, "session_id must be a string or an integer, got 1.5"),
        ({"timestamp": 0, "request_id": []}, "request_id must be a string or an integer, got []"),
        ({"timestamp": 0, "wait_for": [[]]}, "wait_for must be a string, an integer or a list"),
        ({"timestamp": 0, "think": "1"}, "think must be a number >= 0, got '1'"),
        ({"timestamp": 0, "ends": 1}, "ends must be true or false, got 1"),
        ({"timestamp": 0, "stop": 1}, "stop must be a string, got 1"),
        (OTHERS | {"created_time": -1}, "created_time must be a number >= 0, got -1"),
        (OTHERS | {"input_tokens": "9"}, "input_tokens must be an integer >= 0, got '9'"),
        (OTHERS | {"output_tokens": None}, "output_tokens must be an integer >= 0, got None"),
    ],
)
def test_a_broken_rule_is_named(tmp_path, fields, rule):
    with pytest.raises(TraceError) as raised:
        read(tmp_path, fields if "hash_ids" in fields else row(**fields))
    assert rule in str(raised.value)


def test_an_end_beyond_all_times_is_cut(tmp_path):
    rows, _ = read(
        tmp_path,
        row(timestamp=2**62, session_id="a", service=2**53),
        row(session_id="a", delay=2**53),
        row(session_id="a", delay=2**53, output_length=2**62),
        row(session_id="a", delay=2**53),
    )
    assert all(0 <= one.timestamp <= 2**63 for one in rows)
