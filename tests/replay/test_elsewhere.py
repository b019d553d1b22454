"""Grids by an executor: the results of this machine, and no other trace."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.replay import ClosedLoop, DecodedTrace, HintOptions, processes
from kvoffload.replay.fleet import Fleet
from kvoffload.replay.grid import Cell, GridWork, run_grid
from kvoffload.replay.groups import GroupChunks
from kvoffload.replay.processes import Elsewhere
from kvoffload.traces import Request, Workload

HINTS = HintOptions(told="both")


def read(seed: int = 1, more: int = 0) -> DecodedTrace:
    requests = [
        replace(one, session=f"{number % 20}")
        for number, one in enumerate(Workload(200, seed=seed))
    ]
    requests += [Request(10**6 + number, 512, 1, (number,), "a") for number in range(more)]
    return DecodedTrace.of(requests, hints=HINTS, arrivals=True)


@pytest.fixture
def machines(monkeypatch):
    """Workers that have no trace yet."""
    monkeypatch.setattr(processes, "_kept_by_worker", None)
    with ThreadPoolExecutor(3) as executor:
        yield functools.partial(Elsewhere, executor)


def test_a_trace_is_read_once_for_many_grids(machines) -> None:
    reads: list[int] = []

    def counted() -> DecodedTrace:
        reads.append(1)
        return read()

    for policies in (("lru",), ("arc", "lru")):
        cells = [Cell(policy, 10) for policy in policies]
        work = GridWork(read(), cells, groups=GroupChunks.of_blocks(512))
        assert len(list(run_grid(1, work, machines(counted)))) == len(cells)
    assert len(reads) == 1


CELLS = [Cell(policy, size) for policy in ("lru", "arc", "belady") for size in (10, 50)]


def test_a_grid_is_that_of_this_machine(machines) -> None:
    for loop, cells in ((None, CELLS), (ClosedLoop(5000), CELLS[:4])):
        work = GridWork(read(), cells, groups=GroupChunks.of_blocks(512), loop=loop)
        assert dict(run_grid(1, work)).keys() == dict(run_grid(1, work, machines(read))).keys()
        for cell, (found,) in run_grid(1, work, machines(read)):
            (alone,) = dict(run_grid(1, work))[cell]
            assert found.as_row() == alone.as_row()
            assert found.loop == alone.loop


def test_fleets_are_those_of_this_machine(machines) -> None:
    work = [Fleet(engines=count, host_blocks=20) for count in (1, 2)] + [Cell("lru", 40)]
    grid = GridWork(read(), work)
    assert dict(run_grid(1, grid, machines(read))) == dict(run_grid(1, grid))


@pytest.mark.parametrize(
    "other", [functools.partial(read, seed=2), functools.partial(read, more=1)]
)
def test_another_trace_is_refused(machines, other) -> None:
    with pytest.raises(ValueError, match="trace must be the same on all machines, got another"):
        dict(run_grid(1, GridWork(read(), CELLS), machines(other)))


def test_hints_and_times_are_of_the_trace(machines) -> None:
    def silent() -> DecodedTrace:
        return replace(read(), hints=None)

    with pytest.raises(ValueError, match="trace must be the same"):
        dict(run_grid(1, GridWork(read(), CELLS), machines(silent)))


def test_what_is_left_is_cancelled() -> None:
    class Never:
        def __init__(self) -> None:
            self.futures: list[Future[object]] = []

        def submit(self, *_: object) -> Future[object]:
            self.futures.append(Future())
            if len(self.futures) == 1:
                self.futures[0].set_result([])
            return self.futures[-1]

    executor = Never()
    rows = run_grid(1, GridWork(read(), CELLS), Elsewhere(executor, read))
    next(rows)
    rows.close()
    assert [one.cancelled() for one in executor.futures] == [False] + [True] * (len(CELLS) - 1)
