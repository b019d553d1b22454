"""One workload as each gateway logs it: the same blocks, sessions, times and answers."""

from __future__ import annotations

import csv
import io
import json
import random

import pytest

from kvoffload.traces import PromptOptions, Trace, TraceError
from kvoffload.traces.formats import LOG_FORMATS
from kvoffload.traces.sorting import counted_from_first, sorted_by_time

from .samples import (
    LITELLM_BLOCKS,
    LOGS,
    UNIX,
    body,
    chats,
    iso,
    items,
    langfuse,
    openai,
    otel,
    otlp,
    responses,
    whole,
)

CHATS = chats()
FORMS = [(name, form) for name, forms in LOGS.items() for form in forms]
IDS = [form.__name__ for _, form in FORMS]


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
    trace = Trace(
        path, format=options.pop("format", None), prompts=PromptOptions(salt="s", **options)
    )
    return structure(trace), trace


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return what the plainest log shows."""
    path = write(tmp_path_factory.mktemp("plain"), lines(map(openai, CHATS)))
    found, trace = read(path)
    assert len(found) == len(CHATS)
    assert len({block for *_, blocks in found for block in blocks}) > 300
    assert trace.remarks[0].startswith("read as openai: request.messages, request.tools, timestamp")
    return found


def test_every_log_has_samples():
    assert {*LOGS, "litellm-blocks"} == {*LOG_FORMATS}


@pytest.mark.parametrize("format", ["openai", None])
@pytest.mark.parametrize(("name", "form"), FORMS, ids=IDS)
def test_the_order_and_what_is_around_does_not_matter(expected, tmp_path, name, form, format):
    """A list over several lines, shuffled, with rows that are no chats in between."""
    rows = [form(one) for one in CHATS]
    random.Random(1).shuffle(rows)
    other = {"url": "/v1/embeddings", "body": {"model": "bge", "input": "x" * 300}}
    text = json.dumps([*rows[:3], other, *rows[3:]], indent=1)
    found, trace = read(write(tmp_path, text, "log.json"), format=format)
    assert sorted(found) == sorted(expected)
    assert "1 row left out: of calls that are no chats" in trace.remarks
    assert trace.format == name


@pytest.mark.parametrize(("name", "form"), FORMS, ids=IDS)
def test_a_request_that_has_two_rows_counts_once_if_its_log_has_ids(tmp_path, name, form):
    row = form(CHATS[0])
    count = 1 if LOG_FORMATS[name].ids else 2
    found, trace = read(write(tmp_path, lines([row, row, form(CHATS[1])])))
    assert len(found) == count + 1
    left_out = "1 row left out: of requests that an earlier row has"
    assert (left_out in trace.remarks) == (count == 1)


def test_a_file_of_a_collector_may_begin_with_metrics(tmp_path):
    metrics = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "x" * 300}]}]}]}
    found, trace = read(write(tmp_path, lines([metrics, otlp(CHATS[0]), metrics])))
    assert (len(found), trace.format) == (1, "otel")


def test_a_call_that_is_no_chat_shows_whose_log_it_is(tmp_path):
    chat = {"call_type": "acompletion", "startTime": 1, "messages": "What is it?"}
    rows = [chat | {"call_type": "aembedding"}, chat, chat | {"status": "failure"}]
    found, trace = read(write(tmp_path, lines(rows)))
    assert (len(found), trace.format) == (1, "litellm")


@pytest.mark.parametrize(("name", "form"), FORMS, ids=IDS)
def test_every_log_shows_the_same_and_dirty_lines_are_skipped(expected, tmp_path, name, form):
    rows = lines(map(form, CHATS)).splitlines()
    rows[5:5] = [
        "not json",
        '{"messages": null, "timestamp": 1}',
        "[1, 2",
        '{"a": "' + "x" * 300 + '"}',
    ]
    trace = Trace(
        write(tmp_path, "\n".join([*rows, rows[-1][:200]])),
        skip_bad=True,
        prompts=PromptOptions(salt="s"),
    )
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
    for one in CHATS:
        cells = [iso(one["time"]), one["session"], one["model"], json.dumps(whole(one))]
        writer.writerow([*cells, json.dumps(one["tools"]), one["output"]])
    path = tmp_path / "export.csv"
    path.write_bytes(b"\xef\xbb\xbf" + stream.getvalue().encode())
    assert read(path)[0] == expected
    fields = {"messages": "Messages", "tools": "Tools", "time": "Created At", "model": "Model"}
    fields |= {"session": "Session ID", "output": "Completion Tokens"}
    for options in ({}, {"format": "csv"}, {"delimiter": delimiter}):
        assert read(path, fields=fields, **options)[0] == expected


@pytest.mark.parametrize("nested", [False, True])
def test_a_parquet_file_shows_the_same(expected, tmp_path, arrow, parquet, nested):
    rows = [
        {"timestamp": one["time"] * 1000, "session_id": one["session"]}
        | {"request": json.dumps(body(one)), "completion_tokens": one["output"]}
        for one in CHATS
    ]
    if nested:
        for row in rows:
            request = json.loads(row["request"])
            row["request"] = {"model": request["model"], "tools": json.dumps(request["tools"])}
            row["request"]["messages"] = json.dumps(request["messages"])
    path = tmp_path / "log.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=7)
    found, trace = read(path)
    assert found == expected
    assert trace.format == "openai"


def test_fields_name_what_is_not_recognised(expected, tmp_path):
    rows = [
        {"event": {"at": iso(one["time"]), "who": one["session"], "ask": whole(one)}}
        | {"uses": one["tools"], "llm": one["model"], "n": str(one["output"])}
        for one in CHATS
    ]
    path = write(tmp_path, lines(rows))
    with pytest.raises(TraceError) as caught:
        read(path)
    assert caught.value.rule == (
        "must have messages, a prompt or the ids of blocks, got an object with the fields "
        "event.at, event.who, event.ask, uses, llm, n; --fields messages=event.ask,time=event.at "
        "names where they are"
    )
    fields = {"messages": "event.ask", "time": "event.at", "session": "event.who", "tools": "uses"}
    found, trace = read(path, fields=fields | {"model": "llm", "output": "n"})
    assert found == expected
    assert trace.format == "fields"


@pytest.mark.parametrize("data", [[], "text"])
def test_an_observation_may_have_other_data_than_a_page(expected, tmp_path, data):
    rows = [langfuse(one) | {"data": data} for one in CHATS]
    assert read(write(tmp_path, lines(rows)))[0] == expected


def test_the_nearest_log_is_named(tmp_path):
    row = {"startTime": 1, "trace_id": "t", "model_group": "m", "model_parameters": {}, "ask": "x"}
    with pytest.raises(TraceError, match=r"ask \(most like litellm\); --fields "):
        list(Trace(write(tmp_path, lines([row]))))
    row = {"timestamp": "2026-11-25T15:53:20Z", "ask": "x" * 99}  # as Mooncake's
    with pytest.raises(TraceError, match=r"timestamp, ask; --fields prompt=ask,time=timestamp"):
        list(Trace(write(tmp_path, lines([row]))))


@pytest.mark.parametrize("key", ["previous_response_id", "conversation"])
def test_what_goes_on_from_a_response_is_put_together(tmp_path, key):
    longest = max(CHATS, key=lambda one: len(one["messages"]))
    picture = {"type": "image_url", "image_url": {"url": "data:" + "00" * 99}}
    first = {"role": "user", "content": [{"type": "text", "text": "x" * 99}, picture]}
    one = longest | {"messages": [first, *longest["messages"][1:]]}
    messages = one["messages"]
    ends = [index for index, each in enumerate(messages) if each["role"] != "assistant"]
    rows, full, start, before = [], [], 0, None
    for number, end in enumerate(ends):
        if end + 1 < len(messages) and messages[end + 1]["role"] != "assistant":
            continue
        row = responses(one | {"messages": messages[start : end + 1]})
        row["user"] = "" if key == "conversation" else row["user"]
        answer = items(messages[end + 1 : end + 2])
        row["response"] |= {"id": f"resp_{number}", "output": answer}
        if key == "conversation":
            row["body"]["conversation"] = {"id": one["session"]}
        elif before is not None:
            row["body"]["previous_response_id"] = before
        before, start = f"resp_{number}", end + 2
        rows.append(row)
        full.append(responses(one | {"messages": messages[: end + 1]}))
    assert len(rows) > 1
    found, _ = read(write(tmp_path, lines(rows)))
    assert found == read(write(tmp_path, lines(full)))[0]
    lost, trace = read(write(tmp_path, lines(rows[1:])))
    assert lost[0][1] < found[1][1]
    assert len(lost) == len(rows) - 1
    said = "1 request continues a response that no row before has: only what is new of"
    assert any(text.startswith(said) for text in trace.remarks) == (key != "conversation")


def test_chains_of_a_small_log_are_bounded(tmp_path):
    row = {"created_at": UNIX, "input": "x" * 2000, "conversation": "c"}
    path = write(tmp_path, lines([row] * 3000))
    with pytest.raises(TraceError, match="must have at most"):
        list(Trace(path))


LISTED = {
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "s" * 300,
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "u" * 300,
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.name": "f",
    "gen_ai.prompt.2.tool_calls.0.arguments": '{"q":1}',
    "gen_ai.completion.0.content": "a" * 300,
}
OPENINFERENCE = {
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "s" * 300,
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "u" * 300,
    "llm.input_messages.2.message.role": "assistant",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "f",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"q":1}',
    "llm.model_name": "m",
    "llm.token_count.completion": 7,
}


@pytest.mark.parametrize(
    ("listed", "more"),
    [(LISTED, {}), (OPENINFERENCE, {"model": "m", "usage": {"completion_tokens": 7}})],
    ids=["older spans", "OpenInference"],
)
def test_messages_of_a_span_may_have_an_attribute_for_each_field(tmp_path, listed, more):
    call = {"function": {"name": "f", "arguments": '{"q":1}'}}
    messages = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": "u" * 300}]
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    row = {"ts": 0, "messages": messages} | more
    found, trace = read(write(tmp_path, lines([{"startTimeUnixNano": "5", "attributes": listed}])))
    assert found == read(write(tmp_path, lines([row])))[0]
    assert trace.format == "otel"


@pytest.mark.parametrize("kind", ["event", "log record"])
def test_messages_of_a_span_may_stand_in_an_event(tmp_path, kind):
    messages = [{"role": "user", "parts": [{"type": "text", "content": "x" * 300}]}]
    value = {"stringValue": json.dumps(messages)}
    attributes = [{"key": "gen_ai.input.messages", "value": value}]
    event = {"name": "gen_ai.client.inference.operation.details", "attributes": attributes}
    span = {"startTimeUnixNano": "1764000000000000000", "attributes": [], "events": [event]}
    row = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    if kind == "log record":
        record = {"timeUnixNano": "1764000000000000000", "attributes": attributes}
        row = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}
    found, trace = read(write(tmp_path, lines([row])))
    assert found == read(write(tmp_path, lines([{"ts": UNIX, "messages": messages}])))[0]
    assert (trace.format, len(trace.remarks)) == ("otel", 1)


def test_parts_of_a_message_may_be_a_text_of_json(tmp_path):
    parts = [
        {"type": "text", "text": "x" * 300},
        {"type": "image_url", "image_url": {"url": "data:" + "00" * 100_000}},
    ]
    span = {"startTimeUnixNano": "1764000000000000000"}
    span["attributes"] = {"gen_ai.prompt.0.role": "user"}
    span["attributes"]["gen_ai.prompt.0.content"] = json.dumps(parts)
    row = {"ts": UNIX, "messages": [{"role": "user", "content": parts}]}
    found = read(write(tmp_path, lines([span])))[0]
    assert found == read(write(tmp_path, lines([row])))[0]
    span["attributes"]["gen_ai.prompt.0.content"] = '[{"a": 1}]'
    assert read(write(tmp_path, lines([span])))[0][0][1] < 10


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"call_type": "acompletion", "status": "failure"}, "of requests that failed"),
        ({"call_type": "acompletion", "cache_hit": "True"}, "of answers from the gateway's own"),
        ({"request_created_at": iso(UNIX), "response_status": 429}, "of requests that failed"),
        ({"type": "GENERATION", "traceId": "t", "level": "ERROR"}, "of requests that failed"),
        ({"startTimeUnixNano": "1", "status": {"code": 2}}, "of requests that failed"),
    ],
)
def test_prompts_that_no_engine_computed_are_left_out_and_counted(tmp_path, row, why):
    messages = [{"role": "user", "content": "x" * 300}]
    row |= {"messages": messages, "request_body": {"messages": messages}, "input": messages}
    row["attributes"] = {"gen_ai.input.messages": messages}
    served = row | {"status": {"code": 1}, "level": "DEFAULT", "response_status": 200}
    served["cache_hit"] = "False"
    trace = Trace(write(tmp_path, lines([served, row, row])))
    assert len(list(trace)) == 1
    assert [text for text in trace.remarks if text.startswith("2 rows left out: " + why)]


def test_redacted_prompts_are_left_out_and_counted(tmp_path):
    redacted = {"call_type": "acompletion", "startTime": UNIX}
    redacted["messages"] = [{"role": "user", "content": "redacted-by-litellm"}]
    kept = redacted | {"messages": [{"role": "user", "content": "x" * 300}]}
    trace = Trace(write(tmp_path, lines([kept, redacted])))
    assert len(list(trace)) == 1
    assert trace.remarks[1].startswith("1 row left out: whose prompts LiteLLM has redacted (lit")
    with pytest.raises(TraceError, match="turn_off_message_logging"):
        list(Trace(write(tmp_path, lines([redacted] * 3))))


def test_a_log_that_counts_far_more_tokens_than_it_holds_is_named(tmp_path):
    usage = {"completion_tokens": 1, "prompt_tokens": 500}
    row = {"messages": [{"role": "user", "content": "***"}], "usage": usage}
    trace = Trace(write(tmp_path, lines([row] * 4)))
    list(trace)
    said = "the log counts 2,000 tokens in prompts that have 8 here: it may lack parts of them"
    assert said in trace.remarks
    whole = row | {"messages": [{"role": "user", "content": "x" * 1500}]}
    trace = Trace(write(tmp_path, lines([whole])))
    list(trace)
    assert len(trace.remarks) == 1


@pytest.mark.parametrize(
    ("row", "guess"),
    [
        ({"prompt_ids": [1, 2], "ts": 5}, "prompt=prompt_ids,time=ts"),
        ({"request": {"choices": [{"x": 1}]}, "ask": [{"role": "u"}]}, "messages=ask"),
        ({"a": 1}, "prompt=FIELD"),
    ],
)
def test_fields_to_start_from_are_of_the_right_kind(tmp_path, row, guess):
    with pytest.raises(TraceError, match="must have messages") as caught:
        list(Trace(write(tmp_path, lines([row]))))
    assert f"--fields {guess} names" in caught.value.rule


def test_a_row_of_many_and_long_names_gets_a_short_error(tmp_path):
    for names in ([f"field {n} of this row" for n in range(50)], ["a" * 60, "time " + "b" * 55]):
        row = {name: {name: {name: "x" * 300}} for name in names}
        with pytest.raises(TraceError, match="; --fields ") as caught:
            list(Trace(write(tmp_path, lines([row]))))
        assert len(caught.value.rule) <= 300


def test_a_long_answer_alone_makes_no_bad_line(tmp_path):
    row = {"request": None, "response": {"choices": [{"text": "x" * 500}]}}
    chat = {"request": {"messages": [{"role": "user", "content": "x" * 99}]}}
    trace = Trace(write(tmp_path, lines([chat, row])))
    assert len(list(trace)) == 1
    assert "1 row left out: without a prompt" in trace.remarks


def test_an_empty_page_of_langfuse_holds_nothing(tmp_path):
    page = json.dumps({"data": [], "meta": {"page": 1}})
    with pytest.raises(TraceError, match="must hold at least one request"):
        list(Trace(write(tmp_path, page + "\n")))


def test_ids_of_litellm_need_no_text(tmp_path):
    second = LITELLM_BLOCKS | {"startTime": UNIX + 2, "completion_tokens": 5}
    second["metadata"] = json.dumps(
        {
            "spend_logs_metadata": {
                "prefix_block_hashes": {"block_size": 16, "hash_ids": ["00FF00FF00FF00FF"]}
            }
        }
    )
    trace = Trace(write(tmp_path, lines([LITELLM_BLOCKS, {"call_type": "x"}, second])))
    one, other = counted_from_first(trace)
    assert (one.timestamp, one.input_length, one.output_length, len(one.hash_ids)) == (0, 40, 3, 3)
    assert (other.timestamp, other.hash_ids) == (2000, one.hash_ids[:1])
    assert (trace.format, trace.has_hashes) == ("litellm-blocks", True)
    assert trace.remarks[1:] == ["1 row left out: without the hashes of blocks"]
    assert "bytes" not in trace.remarks[0]
    named = PromptOptions(block_tokens=16)
    trace = Trace(write(tmp_path, lines([LITELLM_BLOCKS])), prompts=named)
    assert len(list(trace)) == 1
    assert trace.block_tokens == 16


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"call_type": "acompletion", "startTime": 1, "messages": {}}, "store_prompts_in_spend"),
        ({"generation_id": "g", "tokens_prompt": 5, "created_at": iso(UNIX)}, "Logging is on"),
        ({"request_created_at": iso(UNIX), "request_body": None}, "--include-body"),
        ({"type": "SPAN", "traceId": "t", "input": "x"}, "an export needs the field group"),
        ({"startTimeUnixNano": "1", "attributes": {}}, "CAPTURE_MESSAGE_CONTENT=SPAN_ONLY"),
    ],
)
def test_a_log_without_prompts_says_how_they_are_logged(tmp_path, row, advice):
    path = write(tmp_path, lines([row, row]))
    with pytest.raises(TraceError, match="must hold at least one request, got 2 rows ") as caught:
        list(Trace(path))
    assert advice in caught.value.rule


def test_values_of_other_types_make_bad_rows_not_crashes(tmp_path):
    call = openai(CHATS[0]) | {"messages": [{"role": "user", "content": "a", "tool_calls": ["x"]}]}
    path = write(tmp_path, lines([openai(CHATS[0]), call]))
    with pytest.raises(TraceError, match=r"tool_calls must be a list of objects, got a string in"):
        list(Trace(path))
    assert len(list(Trace(path, skip_bad=True))) == 1
    with pytest.raises(TraceError, match="must have messages, a prompt or"):
        list(Trace(write(tmp_path, lines([{"type": ["GENERATION"], "traceId": "t"}]))))
    for count in ("--5", "1" * 5000):
        spans = otlp(CHATS[0])
        for one in spans["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            one["attributes"] = [
                pair | {"value": {"intValue": count}}
                if pair["key"] == "gen_ai.usage.output_tokens"
                else pair
                for pair in one["attributes"]
            ]
        with pytest.raises(TraceError, match="output_tokens must be an integer >= 0"):
            list(Trace(write(tmp_path, lines([spans]))))


@pytest.mark.parametrize("kind", ["messages", "prompt"])
def test_prompts_that_litellm_has_cut_are_counted(tmp_path, kind):
    cut = "a" * 700 + "... (litellm_truncated skipped 9000 chars. A note) ..." + "b" * 1300
    rows = [
        {kind: [{"role": "user", "content": text}] if kind == "messages" else text}
        for text in (cut, "whole", cut)
    ]
    trace = Trace(write(tmp_path, lines(rows)))
    assert len(list(trace)) == 3
    said = "2 rows with prompts that LiteLLM has cut, so these figures are not those"
    assert any(remark.startswith(said) for remark in trace.remarks)


def test_fields_that_are_named_and_missing_are_said(tmp_path):
    """A row that a log would recognise is not read as that log instead."""
    row = {"request": {"messages": [{"role": "user", "content": "x" * 99}]}, "ts": 1_770_000_000}
    path = write(tmp_path, lines([row]))
    with pytest.raises(TraceError, match=r"object with the fields request.messages, ts; --f"):
        read(path, fields={"messages": "request.mesages", "time": "ts"})
    found, trace = read(path, fields={"messages": "request.messages", "time": "at"})
    assert len(found) == 1
    assert "no row has a value at `at`, which is named as time" in trace.remarks


def test_rows_of_another_log_are_read_as_that_one_whichever_is_first(tmp_path):
    chat = {"messages": [{"role": "user", "content": "x" * 99}], "created": UNIX}
    span = otel(CHATS[0])
    for rows in ([span, chat, chat], [chat, span, chat]):
        found, trace = read(write(tmp_path, lines(rows)))
        assert len(found) == 3, trace.remarks
        assert not any("left out" in remark for remark in trace.remarks)
