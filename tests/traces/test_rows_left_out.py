"""Rows of a log that no engine computed, or of another model, are left out and counted."""

from __future__ import annotations

import json

import pytest

from kvoffload.traces import PromptOptions, Trace, TraceError

MESSAGES = [{"role": "user", "content": "the same long question " * 20}]
SPAN = {
    "name": "chat",
    "attributes": {"gen_ai.operation.name": "chat", "gen_ai.input.messages": MESSAGES},
}


def trace(folder, rows, **options):
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Trace(path, **options)


def row(time, model="m", **more):
    return {"timestamp": 1764000000 + time, "model": model, "messages": MESSAGES, **more}


@pytest.mark.parametrize(
    "failed",
    [
        {"status": 429},
        {"status": "Failure"},
        {"status_code": "503"},
        {"http_status": 400},
        {"level": "error"},
        {"error": {"message": "no"}},
        {"error": "Rate limit exceeded"},
        {"error": True, "status": 200},
        {"status": 429.0},
        {"response": {"status_code": 500, "body": {}}},
        {"response": {"type": "error", "error": {}}},
        {"response": {"error": {"code": 1}}},
    ],
    ids=str,
)
def test_a_request_that_failed_is_left_out(tmp_path, failed):
    found = trace(tmp_path, [{"time": "x", **failed}, row(0), row(1, **failed), row(2)])
    assert [request.timestamp for request in found] == [1764000000000, 1764000002000]
    assert found.remarks[1:] == ["2 rows left out: of requests that failed"]


@pytest.mark.parametrize(
    "served",
    [
        {"status": 200, "error": None, "level": "info"},
        {"status": "399", "error": {}, "response": {"status": "completed", "type": "message"}},
        {"status": 4000, "error": "None"},
        {"status": "200.0", "error": False, "response": {"error": " "}},
    ],
    ids=str,
)
def test_a_request_that_was_served_is_read(tmp_path, served):
    assert len(list(trace(tmp_path, [row(0, **served)]))) == 1


LEFT_OUT = "1 row left out: without a time, which others have"


@pytest.mark.parametrize("without", [0, 1, 2])
@pytest.mark.parametrize("value", [None, 0, "0"])
def test_a_row_without_the_time_that_others_have_is_left_out(tmp_path, without, value):
    rows = [row(number) for number in range(3)]
    rows[without]["timestamp"] = value
    found = trace(tmp_path, rows)
    assert len(list(found)) == 2
    assert found.start == 0.0
    assert found.remarks[1:] == [LEFT_OUT]


def test_times_may_count_from_the_start_of_the_log(tmp_path):
    found = trace(tmp_path, [{**row(number), "timestamp": 2 * number} for number in (0, 1, 0)])
    assert [request.timestamp for request in found] == [0, 2000, 0]
    assert len(found.remarks) == 1
    assert found.start is None


def test_times_that_are_all_zero_are_none(tmp_path):
    found = trace(tmp_path, [{**row(number), "timestamp": 0} for number in range(3)])
    assert [request.timestamp for request in found] == [0, 0, 0]
    assert found.start is None
    assert "no request has a time" in found.remarks[0]


def test_a_time_far_behind_requests_without_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("kvoffload.traces.reader.AHEAD_BYTES", 1)
    rows = [{**row(number), "timestamp": None} for number in range(3)]
    found = trace(tmp_path, [*rows, row(3)])
    with pytest.raises(TraceError, match=r":4: must have no time.* take out the rows"):
        list(found)


def test_a_span_whose_time_is_zero_has_none(tmp_path):
    spans = [{**SPAN, "startTimeUnixNano": str(nano)} for nano in (17 * 10**17, 0)]
    found = trace(tmp_path, spans)
    assert [request.timestamp for request in found] == [1_700_000_000_000]
    assert "without a time" in found.remarks[-1]
    observed = {**SPAN, "timeUnixNano": 0, "observedTimeUnixNano": 17 * 10**17}
    assert [one.timestamp for one in trace(tmp_path, [observed])] == [1_700_000_000_000]


def test_requests_to_several_models_are_named_and_one_can_be_chosen(tmp_path):
    rows = [row(0, "a"), row(1, "b"), row(2, "a")]
    both = trace(tmp_path, rows)
    assert len(list(both)) == 3
    said = "requests to 'a' (2), 'b' (1) count together: --model-name selects a model"
    assert said in both.remarks
    one = trace(tmp_path, rows, model_name="a")
    assert [request.timestamp for request in one] == [1764000000000, 1764000002000]
    assert one.remarks[1:] == []
    with pytest.raises(TraceError, match=r"to model 'c', got requests to 'a' \(2\), 'b' \(1\)"):
        list(trace(tmp_path, rows, model_name="c"))


def test_a_trace_that_names_no_models_cannot_be_reduced_to_one(tmp_path):
    rows = [{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}]
    with pytest.raises(TraceError, match=r"must be a log of prompts.*got mooncake"):
        list(trace(tmp_path, rows, model_name="a"))


def test_a_column_can_be_named_as_the_message_proposes(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("Ask At;Frage;Who\n1764000000;" + "x" * 300 + ";k\n")
    with pytest.raises(TraceError, match="--fields ") as caught:
        list(Trace(path))
    proposed = caught.value.rule.partition("--fields ")[2].split()[0]
    assert proposed.startswith("prompt=frage")
    for fields in ({"prompt": "frage"}, {"prompt": "Frage", "session": "Who"}):
        assert len(list(Trace(path, prompts=PromptOptions(fields=fields)))) == 1
