"""The grid: the same in one process and in several, with no cell computed twice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from kvoffload.policies import registry
from kvoffload.replay import DecodedTrace, GroupChunks, device_hits, simulate
from kvoffload.replay.grid import Cell, GridWork, run_grid
from kvoffload.replay.results_file import ResultsFile
from kvoffload.traces import Workload

BLOCKS = GroupChunks.of_blocks(512)
CELLS = [
    Cell(policy, capacity, device, pending)
    for policy in ("lru", "belady", "infinite")
    for capacity in (30, 300)
    for device, pending in ((0, 0), (100, 2))
]


def run(trace, cells, jobs):
    for cell, (counts,) in run_grid(jobs, GridWork(trace, cells)):
        yield cell, counts


@pytest.fixture(scope="module")
def trace() -> DecodedTrace:
    return DecodedTrace.of(Workload(200, seed=4))


def test_every_cell_is_what_a_simulation_gives(trace) -> None:
    for cell, counts in run(trace, CELLS, 1):
        assert counts == simulate(
            trace,
            trace.keys(),
            cell.policy,
            cell.capacity,
            device_hits=device_hits(trace, cell.device_blocks),
            pending=cell.pending,
        )


def test_processes_give_the_same(trace) -> None:
    work = GridWork(trace, CELLS, groups=BLOCKS)
    alone = dict(run_grid(1, work))
    assert dict(run_grid(2, work)) == alone
    assert set(alone) == set(CELLS)
    assert all((found.hit_tokens or 1) > 0 for [found] in alone.values())


def test_repeated_cells_are_computed_once(trace) -> None:
    assert [cell for cell, _ in run(trace, CELLS[:1] * 3, 1)] == CELLS[:1]


def test_results_come_back(trace, tmp_path) -> None:
    path = tmp_path / "results.jsonl"
    found = dict(run(trace, CELLS, 1))
    file = ResultsFile(path, trace)
    assert file.read(CELLS) == {}
    for cell, counts in found.items():
        file.add(cell, counts)
    assert ResultsFile(path, trace).read(CELLS) == found
    assert ResultsFile(path, trace).read(CELLS[:3]) == {cell: found[cell] for cell in CELLS[:3]}
    assert ResultsFile(path, DecodedTrace.of(Workload(5))).read(CELLS) == {}


@pytest.mark.parametrize("field", ["trace", "version"])
def test_results_of_other_traces_and_versions_are_not_used(trace, tmp_path, field) -> None:
    path = tmp_path / "results.jsonl"
    [(cell, counts)] = run(trace, CELLS[:1], 1)
    ResultsFile(path, trace).add(cell, counts)
    row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {field: "other"}) + "\n")
    assert ResultsFile(path, trace).read(CELLS) == {}


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
    first, second = run(trace, CELLS[:2], 1)
    ResultsFile(path, trace).add(*first)
    with path.open("a") as file:
        file.write(damage)  # without a newline, as a crash leaves it
    again = ResultsFile(path, trace)
    assert again.read(CELLS) == dict([first])
    again.add(*second)
    assert ResultsFile(path, trace).read(CELLS) == dict([first, second])


@pytest.mark.parametrize("content", ["x", "\n", "[]\n", '{"trace": 1}\n', "x" * 10**6, "[" * 10**5])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(trace, tmp_path, content) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"must be a file of results or an empty one, got .*notes"):
        ResultsFile(path, trace)
    assert path.read_text() == content


IMPOSSIBLE = {
    "requests": (199, 201, 10**400),
    "blocks": (0, -1, 10**400),
    "asked": (0, -1, 10**400),
    "hits": (-1, 10**9, 10**400),
    "stored": (-1, 10**9, 10**400),
    "evicted": (-1, 10**9, 10**400),
    "refused": (-1, 201, 10**400),
    "not_admitted": (-1, 10**9, 10**400),
    "tokens": (-1, 0, 10**400),
    "hit_tokens": (-1, 10**9, 10**400),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_counts_that_no_replay_of_the_trace_can_have_are_not_used(trace, tmp_path, name) -> None:
    path = tmp_path / "results.jsonl"
    [(cell, [counts])] = run_grid(1, GridWork(trace, CELLS[:1], groups=BLOCKS))
    ResultsFile(path, trace, BLOCKS).add(cell, counts)
    row = json.loads(path.read_text())
    for value in ("3", None, 1.5, True, *IMPOSSIBLE[name]):
        path.write_text(json.dumps(row | {"counts": row["counts"] | {name: value}}) + "\n")
        assert ResultsFile(path, trace, BLOCKS).read(CELLS) == {}, value
    path.write_text(json.dumps(row) + "\n")
    assert ResultsFile(path, trace, BLOCKS).read(CELLS) == {cell: counts}
    assert ResultsFile(path, trace).read(CELLS) == {}


@pytest.mark.parametrize("policy", [*registry.names(), "belady", "infinite"])
def test_what_a_replay_gives_is_possible(trace, tmp_path, policy) -> None:
    path = tmp_path / "results.jsonl"
    cells = [Cell(policy, *rest) for rest in itertools.product((1, 40), (0, 100), (0, 3))]
    work = GridWork(trace, cells, groups=BLOCKS)
    found = {cell: counts for cell, (counts,) in run_grid(1, work)}
    for cell, counts in found.items():
        ResultsFile(path, trace, BLOCKS).add(cell, counts)
    assert ResultsFile(path, trace, BLOCKS).read(cells) == found


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_device_is_not_read_and_is_written_through(trace) -> None:
    file = ResultsFile("/dev/zero", trace)
    assert file.read(CELLS) == {}  # it has no end
    [(cell, counts)] = run(trace, CELLS[:1], 1)
    file.add(cell, counts)
    assert Path("/dev/zero").is_char_device()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(trace) -> None:
    [(cell, counts)] = run(trace, CELLS[:1], 1)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        ResultsFile("/dev/full", trace).add(cell, counts)
