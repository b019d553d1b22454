"""``kvoffload fleet``."""

from __future__ import annotations

import csv
import json

import pytest

from kvoffload.traces import Request, write_trace

pytestmark = pytest.mark.thorough

SIZE = ("--block-bytes", "1MiB")
TIMED = (*SIZE, "--prefill-tokens-per-second", "1000")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Ten sessions of eight turns, each of them a block longer than the one before."""
    path = tmp_path_factory.mktemp("fleet") / "trace.jsonl"
    requests = [
        Request(
            1000 * turn + 37 * session,
            16 * (turn + 2),
            5,
            (0, *(100 * session + block for block in range(1, turn + 2))),
            f"session {session}",
            think=500,
            service=100,
        )
        for turn in range(8)
        for session in range(10)
    ]
    write_trace(requests, path)
    return path


@pytest.fixture
def fleet(kvoffload, trace):
    def run(*arguments):
        return kvoffload("fleet", trace, "--quiet", "--jobs", "1", *arguments)

    return run


def results(done):
    assert done.code == 0, done.err
    return json.loads(done.out)["results"]


def test_the_table_has_a_row_for_each_fleet_and_says_what_is_not_modelled(fleet):
    done = fleet("--engines", "1,2", "--router", "round-robin,session", "--capacity", "20%")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    rows = [line[:4] for line in lines if line[2:3] in (["lru"], ["hit-density"])]
    assert rows == [
        [engines, "20%", policy, router]
        for engines in "12"
        for policy in ("lru", "hit-density")
        for router in ("round-robin", "session")
    ]
    assert "no rate: prompts take no time" in done.out
    assert "Simplifications: an engine computes one prompt at a time" in done.out


def test_one_engine_hits_what_a_sweep_and_a_closed_loop_hit(fleet, kvoffload, trace):
    memory = ("--capacity", "25%", "--policy", "lru,arc,hit-density", "--device-memory", "6")
    for more in ((), ("--closed-loop", "1000")):
        alone = kvoffload("sweep", trace, "--quiet", "--jobs", "1", *memory, *more, "--json")
        loop = (*TIMED, "--closed-loop", "closed") if more else ()
        every = results(
            fleet("--engines", "1", "--router", "events,cost", *memory, *loop, "--json")
        )
        for sweep in json.loads(alone.out)["results"]:
            same = [one for one in every if one["policy"] == sweep["policy"]]
            assert len(same) == 2
            for one in same:
                assert one["host_hits"] == sweep["hits"]


def test_json_and_csv_say_the_same_whatever_the_jobs(fleet, tmp_path, kvoffload, trace):
    arguments = (
        *("--engines", "2,3", "--router", "sticky,events?lag_ms=5", "--policy", "lru"),
        *("--shared", "none,100", "--disk", "64MiB", "--capacity", "8", *TIMED, "--json"),
    )
    path = tmp_path / "fleets.csv"
    done = fleet(*arguments, "--csv", path)
    value = json.loads(done.out)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(value["results"]) == 12
    for row, one in zip(rows, value["results"], strict=True):
        assert row["placement"] == one["placement"]
        assert float(row["ttft_p95"]) == one["ttft_p95"]
        assert int(row["bytes_host_in"]) == one["stored"] * 2**20
        assert sum(part["missed_tokens"] for part in one["per_engine"]) == one["missed_tokens"]
    assert [one["tier"] for one in value["results"][:6:2]] == [None, "shared", "private"]
    several = kvoffload("fleet", trace, "--quiet", "--jobs", "2", *arguments)
    assert several.out == done.out
    for total in value["totals"]:
        assert total["pooled"]["lru"] <= total["belady"] <= total["infinite"]


def test_what_is_enough_is_named(fleet):
    memory = ("--engines", "1,2", "--capacity", "8,16,32", "--policy", "lru,hit-density")
    done = fleet(*memory, *TIMED, "--router", "round-robin,session", "--price", "host=5,tier=.1")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "Enough for 1 engine: round-robin, " in text
    assert "Enough for 2 engines: " in text
    assert "of the prefill, the best" in text
    value = json.loads(fleet(*memory, "--router", "round-robin,session", "--json").out)
    for one in value["enough"]:
        assert one["best"] - 0.01 <= one["saving"] <= one["best"]
    bare = fleet("--engines", "2", "--capacity", "8", "--policy", "lru", "--router", "session")
    assert "Enough" not in bare.out


def test_a_total_is_divided(fleet):
    found = results(fleet("--engines", "3", "--capacity", "100", "--total", "--json"))
    assert {one["capacity"] for one in found} == {33}


def test_the_address_of_a_tier_gives_its_size_and_policy(fleet):
    address = "slab:/nowhere?capacity=10MiB&policy=arc"
    found = results(
        fleet("--engines", "2", "--shared", address, "--capacity", "8", *SIZE, "--json")
    )
    assert {(one["tier_blocks"], one["tier_policy"]) for one in found} == {(10, "arc")}


def test_what_cannot_pay_is_noted(kvoffload, trace):
    done = kvoffload(
        *("fleet", trace, "--jobs", "1", "--engines", "2", "--capacity", "8", "--disk", "8"),
        *("--block-bytes", "1MiB", "--prefill-tokens-per-second", "100"),
    )
    assert done.code == 0
    assert "adds nothing if it is no larger than the host memory of 8" in done.err
    assert "90 of 440 blocks belong to requests that are longer than a host memory of 8" in done.err
    assert "are busy 90% of the time or more" in done.err


def test_a_loop_needs_sessions_and_a_rate_times(kvoffload, tmp_path):
    path = tmp_path / "still.jsonl"
    write_trace([Request(0, 16, 1, (1,)), Request(0, 16, 1, (1,))], path)
    message = "--closed-loop: the trace must have sessions of several requests, got 2"
    loop = ("--capacity", "1", "--closed-loop", "closed")
    assert message in kvoffload("fleet", path, "--quiet", *loop).error
    done = kvoffload("fleet", path, "--quiet", "--capacity", "1", *TIMED)
    assert "must have times of arrival with a rate, got 0 in all requests" in done.error


def test_the_picture_is_drawn(fleet, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the plot extra")
    path = tmp_path / "fleets.svg"
    assert fleet("--engines", "2,4", "--capacity", "5%,20%", "--plot", path).code == 0
    text = path.read_text()
    assert "<svg" in text
    for line in ("round-robin lru", "events hit-density"):
        assert f"<!-- {line} -->" in text
