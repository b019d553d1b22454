"""The grid: the same in one process and in several, with no cell computed twice."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    Group,
    GroupChunks,
    GroupLayout,
    HintOptions,
    replay,
    replay_all,
)
from kvoffload.replay.results_file import ResultsFile
from kvoffload.traces import Workload

UNKNOWN, BLOCKS = GroupChunks.of_blocks(), GroupChunks.of_blocks(512)
CELLS = [
    Configuration(policy=policy, host=capacity, device=device, pending=pending)
    for policy in ("lru", "belady", "infinite")
    for capacity in (30, 300)
    for device, pending in ((0, 0), (100, 2))
]


def found_of(trace, cells, jobs=1):
    return {one.configuration: one for one in replay_all(trace, cells, jobs=jobs)}


def with_blocks(cells):
    return [replace(cell, groups=BLOCKS) for cell in cells]


def with_digest(row):
    del row["digest"]
    text = json.dumps(row, sort_keys=True)
    return row | {"digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


@pytest.fixture(scope="module")
def trace() -> DecodedTrace:
    return DecodedTrace.of(Workload(200, seed=4), arrivals=True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_cell_is_what_a_replay_gives(trace, jobs) -> None:
    in_loop = [cell for cell in with_blocks(CELLS) if cell.policy != "belady"]
    loops = [replace(cell, rate=400, loop="closed", pending=0) for cell in in_loop]
    cells = [*CELLS, *with_blocks(CELLS), *loops]
    found = found_of(trace, cells, jobs)
    assert set(found) == set(cells)
    for cell, result in found.items():
        assert result == replay(trace, cell)
        with pytest.raises(ValueError, match=r"^log must be of a result of replay"):
            result.log  # noqa: B018


def test_every_part_is_what_a_replay_gives(trace) -> None:
    cells = [cell for cell in CELLS if cell.policy != "belady"]
    for one in replay_all(trace, cells, parts=3):
        assert one.parts == replay(trace, one.configuration, parts=3).parts
        assert [part.requests for part in one.parts] == [66, 67, 67]


def test_repeated_cells_are_computed_once(trace) -> None:
    assert [one.configuration for one in replay_all(trace, CELLS[:1] * 3)] == CELLS[:1]


def test_results_come_back(trace, tmp_path) -> None:
    path = tmp_path / "results.jsonl"
    found = found_of(trace, CELLS)
    file = ResultsFile(path, trace, UNKNOWN)
    assert file.read(CELLS) == {}
    for result in found.values():
        file.add(result)
    again = ResultsFile(path, trace, UNKNOWN)
    assert again.read(CELLS) == found
    assert again.read(CELLS[:3]) == {cell: found[cell] for cell in CELLS[:3]}
    assert ResultsFile(path, DecodedTrace.of(Workload(5)), UNKNOWN).read(CELLS) == {}


@pytest.mark.parametrize("field", ["trace", "version"])
def test_results_of_other_traces_and_versions_are_not_used(trace, tmp_path, field) -> None:
    path = tmp_path / "results.jsonl"
    [result] = replay_all(trace, CELLS[:1])
    ResultsFile(path, trace, UNKNOWN).add(result)
    row = json.loads(path.read_text()) | {field: "other"}
    path.write_text(json.dumps(with_digest(row)) + "\n")
    assert ResultsFile(path, trace, UNKNOWN).read(CELLS) == {}


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", "null", '{"trace": 1}', "\x00", "[" * 50_000, '{"cell": {"policy": 3}}',
        "x" * 2**16, "x" * (2**16 - 1), "x" * 10**6, "\n" * 1000,
    ],
    ids=lambda damage: f"{len(damage)} of {damage[:9]!r}",
)  # fmt: skip
def test_damaged_lines_are_passed_over(trace, tmp_path, damage) -> None:
    path = tmp_path / "results.jsonl"
    first, second = replay_all(trace, CELLS[:2])
    ResultsFile(path, trace, UNKNOWN).add(first)
    with path.open("a") as file:
        file.write(damage)  # without a newline, as a crash leaves it
    again = ResultsFile(path, trace, UNKNOWN)
    assert again.read(CELLS) == {first.configuration: first}
    again.add(second)
    both = {one.configuration: one for one in (first, second)}
    assert ResultsFile(path, trace, UNKNOWN).read(CELLS) == both


@pytest.mark.parametrize("content", ["x", "\n", "[]\n", '{"trace": 1}\n', "x" * 10**6, "[" * 10**5])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(trace, tmp_path, content) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"must be a file of results or an empty one, got .*notes"):
        ResultsFile(path, trace, UNKNOWN)
    assert path.read_text() == content


def test_lines_that_were_changed_are_not_used(trace, tmp_path) -> None:
    path, cells = tmp_path / "results.jsonl", with_blocks(CELLS)
    [result] = replay_all(trace, cells[:1])
    ResultsFile(path, trace, BLOCKS).add(result)
    line = path.read_text()
    row, counts = json.loads(line), json.loads(line)["counts"]
    for changed in (
        *({"counts": counts | {name: value + 1}} for name, value in counts.items() if value),
        {"cell": row["cell"] | {"host": 300}},
        {"digest": "0" * 16},
    ):
        path.write_text(json.dumps(row | changed) + "\n")
        assert ResultsFile(path, trace, BLOCKS).read(cells) == {}, changed
    path.write_text(line)
    assert ResultsFile(path, trace, BLOCKS).read(cells) == {cells[0]: result}
    assert ResultsFile(path, trace, UNKNOWN).read(cells) == {}


def test_results_are_kept_apart_by_what_was_told_and_how_it_was_offered(tmp_path) -> None:
    path, requests = tmp_path / "results.jsonl", [*Workload(100, seed=4)]
    requests[1:] = [replace(one, session="a") for one in requests[1:]]
    layout = GroupLayout((Group("full", 1, 512), Group("window", 1, 512, 700)), 1)
    every = [
        (DecodedTrace.of(requests, hints=hints), Configuration(host=3, groups=groups))
        for hints, groups in (
            *((None, GroupChunks.of_blocks(512, step_tokens=step)) for step in (None, 1024, 2048)),
            *((None, GroupChunks.of(layout, 512, retention)) for retention in (0, 512)),
            *((HintOptions(told="expect", noise=noise), BLOCKS) for noise in (1, 2)),
        )
    ]
    for trace, one in every:
        file = ResultsFile(path, trace, one.groups)
        assert file.read([one]) == {}
        file.add(replay(trace, one))
    for trace, one in every:
        assert ResultsFile(path, trace, one.groups).read([one]) == {one: replay(trace, one)}


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_device_is_not_read_and_is_written_through(trace) -> None:
    file = ResultsFile("/dev/zero", trace, UNKNOWN)
    assert file.read(CELLS) == {}  # it has no end
    [result] = replay_all(trace, CELLS[:1])
    file.add(result)
    assert Path("/dev/zero").is_char_device()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(trace) -> None:
    [result] = replay_all(trace, CELLS[:1])
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        ResultsFile("/dev/full", trace, UNKNOWN).add(result)
