"""The commands' options: one word for one thing, and the words of 0.1 go on working."""

from __future__ import annotations

import json

import pytest

from kvoffload.replay import DecodedTrace, device_hits, simulate
from kvoffload.traces import Workload, write_trace

WORKLOAD = Workload(250, seed=1)
QUIET = ("--jobs", "1", "--quiet")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "trace.jsonl"
    write_trace(WORKLOAD, path)
    return path


def found(done):
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize(
    ("old", "new", "notes"),
    [
        (
            ["sweep", "--policies", "lru", "--capacities", "9", "--device-blocks", "50"],
            ["sweep", "--policy", "lru", "--capacity", "9", "--device-memory", "50"],
            ["policies is called --policy", "capacities is called --capacity",
             "device-blocks is called --device-memory"],
        ),
        (
            ["advise", "--memory", "1MB", "--kv-bytes-per-token", "9", "--processes", "1"],
            ["advise", "--capacity", "1MB", "--kv-bytes-per-token", "9", "--jobs", "1"],
            ["memory is called --capacity now; a number alone is blocks",
             "processes is called --jobs"],
        ),
    ],
    ids=["sweep", "advise"],
)  # fmt: skip
def test_earlier_names_go_on_working_and_say_so_once(kvoffload, trace, old, new, notes):
    earlier = kvoffload(old[0], trace, *old[1:], "--json", "--quiet")
    assert found(earlier) == found(kvoffload(new[0], trace, *new[1:], "--json", "--quiet"))
    lines = earlier.err.splitlines()
    assert len(lines) == len(notes)
    assert all(any(note in line for line in lines) for note in notes)


@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_device_memory_is_blocks_bytes_or_a_share(kvoffload, trace, command):
    arguments = [command, trace, "--policy", "lru", "--capacity", "99", "--block-bytes", "1KiB"]
    arguments += ["--json", "--quiet"]
    unique = DecodedTrace.of(WORKLOAD).unique_blocks
    whole = found(kvoffload(*arguments, "--device-memory", unique // 10))["results"]
    for same in ("10%", f"{unique // 10 * 1024}B"):
        again = found(kvoffload(*arguments, "--device-memory", same))["results"]
        assert [row["hits"] for row in again] == [row["hits"] for row in whole]
        assert whole[0]["asked"] == again[0]["asked"] < whole[0]["blocks"]
    none = found(kvoffload(*arguments, "--device-memory", "0"))["results"]
    assert none[0]["asked"] == none[0]["blocks"]


def test_ceilings_are_rows_wherever_policies_are_compared(kvoffload, trace):
    arguments = ["--policy", "lru,belady,infinite", "--capacity", "99", "--device-memory", "80"]
    arguments += ["--json", "--quiet"]
    decoded = DecodedTrace.of(WORKLOAD)
    front = device_hits(decoded, 80)
    for command in ("replay", "sweep"):
        for row in found(kvoffload(command, trace, *arguments))["results"]:
            counts = simulate(decoded, decoded.keys(), row["policy"], 99, device_hits=front)
            assert (row["hits"], row["asked"], row["stored"]) == (
                counts.hits, counts.asked, counts.stored
            )  # fmt: skip
            assert (row["evicted"] is None) == (row["policy"] != "lru")
    table = kvoffload("replay", trace, *arguments[:-2], "--quiet").out
    assert "found in 80 on device" in table
    advice = kvoffload("advise", trace, "--capacity=1MB", "--kv-bytes-per-token=9", *QUIET).out
    assert all(f"\n{name} " in advice for name in ("belady", "infinite"))


def test_several_memories_are_compared_and_the_first_is_advised_on(kvoffload, trace):
    arguments = ("advise", trace, "--kv-bytes-per-token=2KiB", *QUIET, "--json")
    value = found(kvoffload(*arguments, "--capacity", "200,5%", "--capacity", "1GiB"))
    unique = DecodedTrace.of(WORKLOAD)
    capacities = [memory["capacity"] for memory in value["memories"]]
    assert value["memory"] == 200 * 2**20
    assert 200 in capacities
    assert 1024 in capacities
    assert len(capacities) == 3
    assert capacities == sorted(capacities)
    assert min(capacities) < unique.unique_blocks


def test_one_memory_alone_can_be_asked_for(kvoffload, trace):
    arguments = ("--kv-bytes-per-token=2KiB", "--capacity", "100,100", *QUIET)
    done = kvoffload("advise", trace, *arguments)
    assert done.code == 0, done.err
    assert "No other memory was compared." in done.out
