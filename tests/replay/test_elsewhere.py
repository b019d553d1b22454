"""Grids by an executor: the results of this machine, and no other trace."""

from __future__ import annotations

import functools
import itertools
import signal
import sys
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from types import FrameType

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    GroupChunks,
    HintOptions,
    Result,
    processes,
    replay_all,
)
from kvoffload.replay.processes import Elsewhere
from kvoffload.traces import Request, Workload

HINTS = HintOptions(told="both")
BLOCKS = GroupChunks.of_blocks(512)


def by_configuration(results):
    return {one.configuration: one for one in results}


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
        cells = [Configuration(policy=policy, host=10, groups=BLOCKS) for policy in policies]
        found = replay_all(read(), cells, elsewhere=machines(counted))
        assert len(list(found)) == len(cells)
    assert len(reads) == 1


CELLS = [
    Configuration(policy=policy, host=size, groups=BLOCKS)
    for policy in ("lru", "arc", "belady")
    for size in (10, 50)
]


@pytest.mark.parametrize(
    "cells",
    [
        CELLS,
        [replace(cell, loop="closed", rate=5000) for cell in CELLS[:4]],
        [*(Configuration(engines=count, host=20) for count in (1, 2)), CELLS[0]],
    ],
    ids=["caches", "loops", "fleets"],
)
def test_a_grid_is_that_of_this_machine(machines, cells) -> None:
    alone = by_configuration(replay_all(read(), cells))
    assert set(alone) == set(cells)
    assert by_configuration(replay_all(read(), cells, elsewhere=machines(read))) == alone


def silent() -> DecodedTrace:
    return replace(read(), hints=None)


@pytest.mark.parametrize(
    "other", [functools.partial(read, seed=2), functools.partial(read, more=1), silent]
)
def test_another_trace_is_refused(machines, other) -> None:
    with pytest.raises(ValueError, match="trace must be the same on all machines, got another"):
        list(replay_all(read(), CELLS, elsewhere=machines(other)))


class Waiting(Executor):
    """Work that never begins."""

    def __init__(self) -> None:
        self.futures: list[Future[object]] = []

    def submit(self, *_: object) -> Future[object]:
        self.futures.append(Future())
        return self.futures[-1]


def interrupted(call: int) -> tuple[list[Future[object]], bool]:
    """Wait for work, and press Ctrl-C at the start of a call of the library of futures.

    Return the futures, and whether the wait ended before that many calls.
    """
    executor, calls, has_waited = Waiting(), itertools.count(1), False

    def watch(_: int) -> None:
        nonlocal has_waited
        if executor.futures:  # the first call comes before there are any
            has_waited = True
            raise KeyboardInterrupt

    def trace(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        is_of_futures = "concurrent" in file or file.endswith("threading.py")
        if executor.futures and is_of_futures and next(calls) == call:
            signal.raise_signal(signal.SIGINT)

    former = sys.gettrace()
    results = replay_all(read(), CELLS[:2], elsewhere=Elsewhere(executor, read, watch))
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(results)
    finally:
        sys.settrace(former)
    return executor.futures, has_waited


def test_an_interrupted_wait_leaves_no_future_locked(monkeypatch) -> None:
    """Else a pool would wait for ever for its thread, which waits for that lock."""
    monkeypatch.setattr(processes, "ASK_SECONDS", 0.01)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for call in itertools.count(1):
            futures, has_waited = interrupted(call)
            for future in futures:
                end = threading.Thread(target=future.cancel, daemon=True)
                end.start()
                end.join(10)
                assert not end.is_alive(), f"interrupted at call {call}"
            if has_waited:
                break
    finally:
        signal.signal(signal.SIGINT, former)


def test_what_is_left_is_cancelled() -> None:
    class Once(Waiting):
        def submit(self, *_: object) -> Future[object]:
            future = super().submit()
            if len(self.futures) == 1:
                future.set_result(Result(configuration=CELLS[0]))
            return future

    executor = Once()
    results = replay_all(read(), CELLS, elsewhere=Elsewhere(executor, read))
    next(results)
    results.close()
    assert [one.cancelled() for one in executor.futures] == [False] + [True] * (len(CELLS) - 1)
