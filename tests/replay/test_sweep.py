"""The grid: the same in one process and in several, and never computed twice."""

from __future__ import annotations

import json

import pytest

from kvoffload.replay import DecodedTrace, device_hits, simulate
from kvoffload.replay.sweep import Cell, ResultsFile, run
from kvoffload.traces import Workload

CELLS = [
    Cell(policy, capacity, device, pending)
    for policy in ("lru", "belady", "infinite")
    for capacity in (30, 300)
    for device, pending in ((0, 0), (100, 2))
]


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
    alone = dict(run(trace, CELLS, 1))
    assert dict(run(trace, CELLS, 2)) == alone
    assert set(alone) == set(CELLS)


def test_repeated_cells_are_computed_once(trace) -> None:
    assert [cell for cell, _ in run(trace, CELLS[:1] * 3, 1)] == CELLS[:1]


def test_results_come_back(trace, tmp_path) -> None:
    path = tmp_path / "results.jsonl"
    found = dict(run(trace, CELLS, 1))
    file = ResultsFile(path, trace.fingerprint())
    assert file.read() == {}
    for cell, counts in found.items():
        file.add(cell, counts)
    assert ResultsFile(path, trace.fingerprint()).read() == found
    assert ResultsFile(path, "another trace").read() == {}


@pytest.mark.parametrize("field", ["trace", "version"])
def test_results_of_other_traces_and_versions_are_not_used(trace, tmp_path, field) -> None:
    path = tmp_path / "results.jsonl"
    [(cell, counts)] = run(trace, CELLS[:1], 1)
    ResultsFile(path, trace.fingerprint()).add(cell, counts)
    row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {field: "other"}) + "\n")
    assert ResultsFile(path, trace.fingerprint()).read() == {}


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '{"trace": 1}', "\x00", "[" * 100_000, '{"cell": {"policy": 3}}'],
)
def test_damaged_lines_are_passed_over(trace, tmp_path, damage) -> None:
    path = tmp_path / "results.jsonl"
    first, second = run(trace, CELLS[:2], 1)
    ResultsFile(path, trace.fingerprint()).add(*first)
    with path.open("a") as file:
        file.write(damage)  # without a newline, as a crash leaves it
    again = ResultsFile(path, trace.fingerprint())
    assert again.read() == dict([first])
    again.add(*second)
    assert ResultsFile(path, trace.fingerprint()).read() == dict([first, second])


@pytest.mark.parametrize("name", ["hits", "asked"])
@pytest.mark.parametrize("value", ["3", None, 1.5, True])
def test_counts_of_a_wrong_type_are_not_used(trace, tmp_path, name, value) -> None:
    path = tmp_path / "results.jsonl"
    [(cell, counts)] = run(trace, CELLS[:1], 1)
    ResultsFile(path, trace.fingerprint()).add(cell, counts)
    row = json.loads(path.read_text())
    row["counts"][name] = value
    path.write_text(json.dumps(row) + "\n")
    assert ResultsFile(path, trace.fingerprint()).read() == {}
