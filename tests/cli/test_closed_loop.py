"""`--closed-loop` of `replay` and `sweep`."""

from __future__ import annotations

import json

import pytest

from kvoffload.cli.replay import IN_LOOP
from kvoffload.traces import Request, Workload, write_trace

pytestmark = pytest.mark.thorough

SIZES = ("--policy", "lru,infinite", "--capacity", "5%,20%", "--quiet")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("loop") / "trace.jsonl"
    write_trace(Workload(400, seed=1), path)
    return path


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A trace without sessions."""
    path = tmp_path_factory.mktemp("silent") / "trace.jsonl"
    write_trace([Request(1000 * n, 512, 1, (n // 2,)) for n in range(40)], path)
    return path


def read(kvoffload, *arguments):
    done = kvoffload(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_a_trace_without_sessions_or_times_is_refused(kvoffload, silent, tmp_path, command):
    done = kvoffload(command, str(silent), "--quiet", "--capacity", "2", "--closed-loop", "9")
    assert done.code == 2
    assert "--closed-loop: the trace must have sessions of several requests, got 40" in done.err
    path = tmp_path / "still.jsonl"
    write_trace([Request(0, 512, 1, (n,), "a") for n in range(3)], path)
    done = kvoffload(command, str(path), "--quiet", "--capacity", "2", "--closed-loop", "9")
    assert done.code == 2
    assert "--closed-loop needs times of arrival, got timestamp 0 in all requests" in done.err
    assert (
        kvoffload(
            command, str(path), "--quiet", "--capacity", "2", "--closed-loop", "recorded"
        ).code
        == 0
    )


def test_replay_and_sweep_find_the_same(kvoffload, trace):
    loop = ("--closed-loop", "9,000", "--decode-ms", "5")
    replayed = read(kvoffload, "replay", str(trace), *SIZES, *loop)
    swept = read(kvoffload, "sweep", str(trace), *SIZES, *loop, "--jobs", "2")
    for found in (replayed, swept):
        engine = found["loop"], found["prefill_tokens_per_second"], found["decode_ms"]
        assert engine == ("closed", 9000, 5.0)
    found = {(row["policy"], row["capacity"]): row for row in swept["results"]}
    assert len(found) == len(replayed["results"]) == 4
    for row in replayed["results"]:
        other = found[row["policy"], row["capacity"]]
        assert row["hits"] == other["hits"]
        assert row["ttft_p50"] <= row["ttft_p95"]
        for name in IN_LOOP:
            assert row[name] == other[name] > 0
    table = kvoffload("sweep", str(trace), *SIZES, *loop).out
    words = " ".join(table.split())
    assert "9,000 prompt tokens per second and engine, 5 ms per token of an answer" in words
    assert "; each session waits for its answers" in words
    assert "first token, 95th percentile, s" in table
    assert "first token" in kvoffload("replay", str(trace), *SIZES, *loop).out


def test_recorded_finds_the_hits_of_the_open_replay_and_no_times(kvoffload, trace):
    opened = read(kvoffload, "replay", str(trace), *SIZES)
    looped = read(kvoffload, "replay", str(trace), *SIZES, "--closed-loop", "recorded")
    assert [found["loop"] for found in (opened, looped)] == ["open", "recorded"]
    assert looped["prefill_tokens_per_second"] is None
    for one, other in zip(opened["results"], looped["results"], strict=True):
        assert one["hit_ratio"] == pytest.approx(other["hit_ratio"], abs=0.01)
        assert {other[name] for name in IN_LOOP} == {None}


def test_belady_is_left_out_with_a_note(kvoffload, trace):
    done = kvoffload(
        "sweep", str(trace), "--policy", "lru,belady", "--capacity", "5%", "--closed-loop", "9000"
    )
    assert done.code == 0
    assert "belady needs to know what comes next, which depends on the hits: it is" in done.err
    assert "belady" not in done.out
