"""Formats of traces: recognised, read by their rules, refused with the same messages."""

import json
from hashlib import blake2b

import pytest

from kvoffload.traces import MergedTrace, Request, Trace, TraceError
from kvoffload.traces.formats import FORMATS, recognise
from kvoffload.traces.formats.bailian import BailianParser
from kvoffload.traces.formats.base import hexadecimal_id

MOONCAKE = {"timestamp": 1, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 20,
    "output_length": 3,
    "type": "text",
    "turn": 1,
    "hash_ids": [1089, 1090],
}
LMCACHE = {
    "timestamp": 1711929600.123,
    "request_id": "req-001",
    "model_name": "a-model",
    "chunk_size": 256,
    "seq_len": 600,
    "dtypes": ["bfloat16"],
    "shapes": [[2, 32, 256, 1024]],
    "chunk_hashes": ["0xab12", "0xCD34"],
}
HEX = "0xdeadbeef00 AABBCCDD,11223344"
DYNAMO = {
    "schema": "dynamo.request.trace.v1",
    "event_type": "request_end",
    "event_time_unix_ms": 1700000009000,
    "agent_context": {"session_id": "s", "parent_session_id": "p", "session_final": True},
    "request": {
        "request_id": "r",
        "output_tokens": 8,
        "request_received_ms": 1700000000000,
        "total_time_ms": 9000.5,
        "replay": {
            "trace_block_size": 64,
            "input_length": 128,
            "input_sequence_hashes": [2**64 - 1, 7],
        },
    },
}


def replayed(**fields):
    """Return a record of Dynamo with other fields of its prompt."""
    request = DYNAMO["request"]
    return DYNAMO | {"request": request | {"replay": request["replay"] | fields}}


def row(**fields):
    return {"input_length": 32, "output_length": 10, "hash_ids": [1, 2], **fields}


OTHERS = {"created_time": 5, "input_tokens": 48, "output_tokens": 3, "hash_ids": [1, 2, 3]}
WEKA_REQUEST = {"t": 0.5, "model": "m", "in": 128, "out": 3, "hash_ids": [1, 2], "api_time": 1.5}
WEKA = {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": [WEKA_REQUEST]}
DELTAS = [
    {"session_id": "s", "input_length": 20, "hash_ids": [1, 2]},
    {"session_id": "s", "input_length": 16, "hash_ids": [3]},
]
LINES = {
    "mooncake": json.dumps(MOONCAKE),
    "bailian": json.dumps(BAILIAN),
    "lmcache": json.dumps(LMCACHE),
    "weka": json.dumps(WEKA),
    "hex": HEX,
    "dynamo": json.dumps(DYNAMO),
    "mooncake-delta": "\n".join(json.dumps(MOONCAKE | more) for more in DELTAS),
}


def read(tmp_path, *rows, **options):
    path = tmp_path / "trace"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    trace = Trace(path, **options)
    return list(trace), trace


def rule(tmp_path, *rows, **options):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, *rows, **options)
    return caught.value.rule


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_recognised_and_can_be_named(tmp_path, format):
    recognised, trace = read(tmp_path, LINES[format])
    assert trace.format == format
    named, trace = read(tmp_path, LINES[format], format=format)
    assert trace.format == format
    assert recognised == named
    assert len(named) == len(LINES[format].splitlines())


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="format must be one of mooncake, lmcache, "):
        Trace("x", format="arrow")


def test_a_named_format_holds_whatever_the_line_looks_like(tmp_path):
    assert rule(tmp_path, MOONCAKE, format="lmcache").startswith("must have the field chunk_size")
    requests, _ = read(tmp_path, BAILIAN, format="mooncake")
    assert requests == [Request(61.114, 20, 3, (1089, 1090), type="text", turn=1)]


def test_the_format_of_the_first_good_line_holds_for_all(tmp_path):
    assert rule(tmp_path, LMCACHE, MOONCAKE).startswith("must have the field chunk_size")
    requests, trace = read(tmp_path, "not json", '{"chunk_hashes":1}', LMCACHE, skip_bad=True)
    assert (trace.format, trace.bad_lines, len(requests)) == ("lmcache", 2, 1)


@pytest.mark.parametrize("line", ["not json", "bad", "add face", '{"', '"x"', "-5"])
def test_what_is_in_no_format_is_reported_by_the_rules_of_the_first(tmp_path, line):
    assert recognise(line.encode()).name == "mooncake"
    assert rule(tmp_path, line).startswith("must be a JSON object")


def test_bailian_seconds_become_milliseconds_and_chats_sessions(tmp_path):
    rows = [
        BAILIAN,
        BAILIAN | {"chat_id": 160, "parent_chat_id": 159, "turn": 2},
        BAILIAN | {"chat_id": "161", "parent_chat_id": 160, "turn": 3},
        BAILIAN | {"chat_id": 7, "parent_chat_id": 5},
        {name: value for name, value in BAILIAN.items() if name != "parent_chat_id"},
    ]
    requests, trace = read(tmp_path, *rows)
    assert requests[0] == Request(61114, 20, 3, (1089, 1090), "159", type="text", turn=1)
    assert [request.session for request in requests] == ["159", "159", "159", "5", "159"]
    assert trace.block_tokens == 16


def test_bailian_rows_that_do_not_fit_leave_the_block_size_open(tmp_path):
    _, trace = read(tmp_path, BAILIAN, BAILIAN | {"input_length": 100}, BAILIAN)
    assert trace.block_tokens is None


def test_bailian_remembers_a_bounded_number_of_chats(monkeypatch):
    monkeypatch.setattr(BailianParser, "REMEMBERED", 3)
    parse = BailianParser()
    for chat in range(50):
        parse(json.dumps(BAILIAN | {"chat_id": chat, "parent_chat_id": chat - 1}).encode())
        assert len(parse._sessions) <= 3
    assert set(parse._sessions.values()) == {"0"}


def test_bailian_chats_with_long_names_are_sessions_too(tmp_path):
    first, other = "x" * 256, "y" * 257
    rows = [
        BAILIAN | {"chat_id": first},
        BAILIAN | {"chat_id": 2, "parent_chat_id": first},
        BAILIAN | {"chat_id": other},
        BAILIAN | {"chat_id": 4, "parent_chat_id": other},
        BAILIAN | {"chat_id": 5, "parent_chat_id": "z" * 10**6},
    ]
    sessions = [request.session for request in read(tmp_path, *rows)[0]]
    assert sessions[:2] == [first, first]
    assert sessions[2] == sessions[3] != sessions[4]
    assert [len(session) for session in sessions[2:]] == [32, 32, 32]
    assert sessions == [request.session for request in read(tmp_path, *rows)[0]], "in every run"


def test_lmcache_hashes_a_long_model_name_once_a_line(tmp_path, monkeypatch):
    """Not with each chunk: a line may hold a million."""
    hashed = 0

    def counted(data, **options):
        nonlocal hashed
        hashed += len(data)
        return blake2b(data, **options)

    monkeypatch.setattr("kvoffload.traces.formats.base.blake2b", counted)
    name = "m" * 100_000
    rows = [LMCACHE | {"model_name": name + end, "chunk_hashes": ["0xab"] * 999} for end in "ab"]
    first, second = read(tmp_path, *rows)[0]
    assert hashed < 4 * len(name)
    assert set(first.hash_ids).isdisjoint(second.hash_ids)


def test_lmcache_time_counts_from_the_first_line(tmp_path):
    rows = [LMCACHE | {"timestamp": LMCACHE["timestamp"] + later} for later in (0, 1.5, -2)]
    requests, _ = read(tmp_path, *rows)
    assert [request.timestamp for request in requests] == [0, 1500, 0]


def test_lmcache_lengths_and_chunks(tmp_path):
    rows = [LMCACHE, LMCACHE | {"chunk_hashes": ["0xAB12", "cd34", "-0xab12"], "seq_len": 800}]
    (first, second), trace = read(tmp_path, *rows)
    assert (first.input_length, first.output_length) == (600, 0)
    assert second.hash_ids[:2] == first.hash_ids, "case and prefix do not count, the sign does"
    assert len(set(second.hash_ids)) == 3
    assert trace.block_tokens == 256


def test_lmcache_models_share_nothing_and_may_have_other_chunks(tmp_path):
    (first, second), trace = read(
        tmp_path, LMCACHE, LMCACHE | {"model_name": "another", "chunk_size": 512}
    )
    assert set(first.hash_ids).isdisjoint(second.hash_ids)
    assert trace.block_tokens is None


def test_hexadecimal_text_has_neither_times_nor_lengths(tmp_path):
    first = "0xdeadbeef00 AABBCCDD,11223344"
    (one, other), trace = read(tmp_path, first, "DEADBEEF00\taabbccdd , 0x55667788")
    assert one.hash_ids[:2] == other.hash_ids[:2]
    assert len({*one.hash_ids, *other.hash_ids}) == 4
    assert one == Request(0, 0, 0, one.hash_ids)
    assert trace.block_tokens is None
    assert read(tmp_path, "a b 1", format="hex")[0][0].hash_ids[0] == hexadecimal_id("a", "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (BAILIAN | {"chat_id": [1]}, "chat_id must be an integer or a string, got [1]"),
        (BAILIAN | {"parent_chat_id": True}, "parent_chat_id must be an integer or a string"),
        (BAILIAN | {"timestamp": -1}, "timestamp must be a number >= 0, got -1"),
        (BAILIAN | {"hash_ids": [-1]}, "hash_ids[0] must be an integer >= 0, got -1"),
        (BAILIAN | {"input_length": "5"}, "input_length must be an integer >= 0, got '5'"),
        (LMCACHE | {"chunk_size": 0}, "chunk_size must be an integer >= 1, got 0"),
        (LMCACHE | {"seq_len": -1}, "seq_len must be an integer >= 0, got -1"),
        (LMCACHE | {"chunk_hashes": "0xab"}, "chunk_hashes must be a list of strings, got '0xab'"),
        (LMCACHE | {"chunk_hashes": [7]}, "chunk_hashes must be a list of strings, got [7]"),
        (LMCACHE | {"chunk_hashes": ["0x"]}, "chunk_hashes[0] must be a hexadecimal number, got"),
        (LMCACHE | {"chunk_hashes": ["0xg"]}, "chunk_hashes[0] must be a hexadecimal number, got"),
        (LMCACHE | {"model_name": 5}, "model_name must be a string, got 5"),
        (LMCACHE | {"timestamp": None}, "timestamp must be a number >= 0, got None"),
        (HEX + "\nzz", "hash 0 must be a hexadecimal number, got 'zz'"),
        (HEX + "\naa bé", "must be hexadecimal hashes, got"),
        (DYNAMO | {"event_type": None}, "a trace must hold at least one request"),
        (DYNAMO | {"request": 5}, "request must be an object, got 5"),
        (DYNAMO | {"agent_context": [1]}, "agent_context must be an object, got [1]"),
        (DYNAMO | {"agent_context": {"session_id": 5}}, "session_id must be a string, got 5"),
        (DYNAMO | {"agent_context": {"session_final": 1}}, "session_final must be true or false,"),
        (row(), "must have the field timestamp"),
        (row(session_id="a"), "must have the field timestamp"),
        (row(timestamp=0, delay=-1), "delay must be a number >= 0, got -1"),
        (row(timestamp=0, delay_ms=2**54), "delay_ms must be a number <= 9007199254740992"),
        (row(timestamp=0, session_id=1.5), "session_id must be a string or an integer, got 1.5"),
        (row(timestamp=0, request_id=[]), "request_id must be a string or an integer, got []"),
        (row(timestamp=0, wait_for=[[]]), "wait_for must be a string, an integer or a list"),
        (row(timestamp=0, think="1"), "think must be a number >= 0, got '1'"),
        (row(timestamp=0, ends=1), "ends must be true or false, got 1"),
        (row(timestamp=0, stop=1), "stop must be a string, got 1"),
        (OTHERS | {"created_time": -1}, "created_time must be a number >= 0, got -1"),
        (OTHERS | {"input_tokens": "9"}, "input_tokens must be an integer >= 0, got '9'"),
        (OTHERS | {"output_tokens": None}, "output_tokens must be an integer >= 0, got None"),
        (replayed(trace_block_size=0), "trace_block_size must be an integer >= 1, got 0"),
        (replayed(input_length=-1), "input_length must be an integer >= 0, got -1"),
        (replayed(input_sequence_hashes=5), "input_sequence_hashes must be a list of integers, go"),
        (replayed(input_sequence_hashes=[2**64]), "input_sequence_hashes[0] must be an integer <="),
    ],
)  # fmt: skip
def test_refuses_a_bad_row(tmp_path, row, message):
    assert rule(tmp_path, row).startswith(message)


@pytest.mark.parametrize(
    "line",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "generation_id,created_at,model_permaslug,tokens_prompt,tokens_completion",
        {"TIMESTAMP": "now", "ContextTokens": 4000},
        {"timestamp": 0, "input_length": 3, "output_length": 4},
        {"prompt_tokens": 3},
    ],
)
def test_a_table_of_counts_is_refused_for_showing_no_sharing(tmp_path, line):
    assert "counts of tokens do not show what prompts share, got ['" in rule(tmp_path, line)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "must have the field timestamp"),
        ({"requests": []}, "must have messages, a prompt or the ids of blocks"),
        ({"prompt_tokens": [3]}, "must have messages, a prompt or the ids of blocks"),
        ({"prompt_tokens": 3, "ask": "x" * 300}, "must have messages, a prompt or the ids of"),
    ],
)
def test_a_row_that_nearly_has_a_format_is_refused(tmp_path, row, message):
    assert rule(tmp_path, row).startswith(message)


def test_dynamo_records_of_requests_are_read_and_others_counted(tmp_path):
    tool = {"schema": DYNAMO["schema"], "event_type": "tool", "tool": {}}
    without = DYNAMO | {"request": {"request_id": "q"}}
    bare = {
        "request_received_ms": 1700000000001,
        "replay": DYNAMO["request"]["replay"] | {"input_sequence_hashes": []},
    }
    plain = {"schema": DYNAMO["schema"], "event_type": "request_end", "request": bare}
    requests, trace = read(tmp_path, DYNAMO, tool, without, plain, without)
    assert requests[0] == Request(
        1700000000000,
        128,
        8,
        (2**64 - 1, 7),
        "s",
        parent="p",
        service=9000.5,
        ends=True,
    )
    assert requests[1] == Request(1700000000001, 128, 0, ())
    assert (trace.format, trace.block_tokens, trace.has_hashes) == ("dynamo", 64, True)
    assert trace.remarks == [
        "2 requests have no block hashes: they are left out",
        "1 records of tools and payloads are not read",
    ]


LONG = "é" * 200
AGENT = {"type": "subagent", "t": 0, "agent_id": "a", "requests": [WEKA_REQUEST]}


@pytest.mark.parametrize(
    "row",
    [
        MOONCAKE | {"session": LONG, "parent": LONG, "stop": LONG},
        MOONCAKE | {"session_id": LONG},
        BAILIAN | {"chat_id": LONG},
        DYNAMO | {"agent_context": {"session_id": LONG, "parent_session_id": LONG}},
        WEKA | {"id": LONG, "requests": [WEKA_REQUEST | {"stop": LONG}]},
        WEKA | {"requests": [AGENT | {"agent_id": LONG}]},
    ],
    ids=["mooncake", "session_id", "bailian", "dynamo", "weka", "subagent"],
)
def test_a_name_of_more_than_256_bytes_becomes_a_digest(tmp_path, row):
    (request,), _ = read(tmp_path, row)
    (again,), _ = read(tmp_path, json.loads(json.dumps(row).replace("\\u00e9" * 200, "x" * 256)))
    (other,), _ = read(tmp_path, json.loads(json.dumps(row).replace("\\u00e9" * 200, "y" * 257)))
    names = [name for name in (request.session, request.parent, request.stop) if name is not None]
    assert all(len(name) <= len("s/") + 32 for name in names)
    if "subagent" not in str(row):
        assert again.session == "x" * 256
    assert len({request.session, again.session, other.session}) == 3
    assert request == read(tmp_path, row)[0][0], "in every run"


def test_session_id_is_the_session_and_delay_the_wait(tmp_path):
    (first, second), trace = read(
        tmp_path,
        row(timestamp=0, session_id="a"),
        row(timestamp=9, session_id=7, session="own", delay=250, tool_wait_ms=50),
    )
    assert (first.session, first.think) == ("a", None)
    assert (second.session, second.think) == ("own", 300)
    assert trace.remarks == []


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


def test_an_end_beyond_all_times_is_cut(tmp_path):
    rows, _ = read(
        tmp_path,
        row(timestamp=2**62, session_id="a", service=2**53),
        row(session_id="a", delay=2**53),
        row(session_id="a", delay=2**53, output_length=2**62),
        row(session_id="a", delay=2**53),
    )
    assert all(0 <= one.timestamp <= 2**63 for one in rows)
