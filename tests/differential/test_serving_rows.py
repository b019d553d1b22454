"""Requests of a trace that the compiled manager serves many in one call, and one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.policies import registry
from kvoffload.replay.groups import GroupChunks
from kvoffload.replay.requests import DecodedTrace
from kvoffload.replay.serving import serve
from kvoffload.replay.simulate import Demand, Serving
from kvoffload.traces import Request
from tests.differential.pairs import Pair, Twins, require_equal
from tests.differential.workloads import GENERATED


def serve_all(manager, keys: list[bytes], trace: DecodedTrace, first: np.ndarray) -> np.ndarray:
    demand = Demand(trace, GroupChunks.of_blocks(1), first, np.zeros_like(first))
    return Serving(manager, demand, keys).hits(slice(0, trace.num_requests))


def decoded(rows: list[list[int]]) -> DecodedTrace:
    return DecodedTrace.of(Request(number, 0, 0, tuple(row)) for number, row in enumerate(rows))


def numbered(workload: str, seed: int) -> tuple[list[list[int]], list[bytes]]:
    """Return the rows of a workload as numbers of blocks, and the key of each."""
    numbers: dict[bytes, int] = {}
    rows = [
        [numbers.setdefault(key, len(numbers)) for key in batch]
        for batch in GENERATED[workload](seed, 100, 36)
    ]
    return rows, list(numbers)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("workload", GENERATED)
@pytest.mark.parametrize("capacity", [0, 1, 16, 60])
def test_served_by_rows_or_call_by_call(
    twins: Twins, seed: int, name: str, workload: str, capacity: int
) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name))
    rows, _ = numbered(workload, seed)
    chance = random.Random(seed)
    trace = decoded([*rows, []])
    first = np.array([chance.randint(0, size) for size in np.diff(trace.starts)], dtype=np.int64)
    python, compiled = (
        serve_all(manager, trace.keys(), trace, first) for manager in (pair.python, pair.compiled)
    )
    require_equal(python.tolist(), compiled.tolist(), "the hits of each request")
    pair.agree()
    require_equal(pair.python.stats(), pair.compiled.stats(), "stats")


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("workload", GENERATED)
@pytest.mark.parametrize("capacity", [0, 1, 16, 60])
def test_one_row_and_what_it_changes(
    twins: Twins, seed: int, name: str, workload: str, capacity: int
) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name))
    rows, keys = numbered(workload, seed)
    chance = random.Random(seed)
    slots = np.zeros(capacity, dtype=np.uint32)
    for row in [*rows, []]:
        first = chance.randint(0, len(row))
        served = serve(pair.python, [keys[number] for number in row], first)
        served.complete()
        blocks = np.array(row, dtype=np.uint32)
        hits, changed = pair.compiled._serve_row(keys, blocks, first, slots)
        assert hits == served.hits
        left, entered = changed or ([], [])
        require_equal(served.evicted, [keys[number] for number in left], "what has left")
        require_equal(served.to_store, [keys[number] for number in entered], "what has entered")
    pair.agree()
    require_equal(pair.python.stats(), pair.compiled.stats(), "stats")


def test_what_lies_in_the_manager_before_stays_as_it_is(twins: Twins) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 4, "lru"))
    trace = decoded([[0, 1, 2, 1], [3, 4, 5, 6]])
    keys = trace.keys()
    pair.do("prepare_store", [keys[2]])
    pair.do("prepare_store", [keys[0]])
    pair.do("complete_store", [keys[0]])
    pair.do("prepare_load", [keys[0]])
    none = np.zeros(2, dtype=np.int64)
    for manager in (pair.python, pair.compiled):
        assert serve_all(manager, keys, trace, none).tolist() == [1, 0]
    pair.agree()
    assert pair.compiled.stats()["refused_stores"] == 1


def test_calls_of_a_subclass_are_made(twins: Twins) -> None:
    calls = []

    class Counting(twins[1].CPUOffloadingManager):
        def prepare_store(self, hashes):
            calls.append(len(hashes))
            return super().prepare_store(hashes)

    trace = decoded([[0, 1], [0, 1, 2]])
    hits = serve_all(Counting(16, 4), trace.keys(), trace, np.zeros(2, dtype=np.int64))
    assert hits.tolist() == [0, 2]
    assert calls == [2, 3]


def test_events_are_given(twins: Twins) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 2, enable_events=True))
    trace = decoded([[0, 1], [2]])
    for manager in (pair.python, pair.compiled):
        serve_all(manager, trace.keys(), trace, np.zeros(2, dtype=np.int64))
    pair.agree()
    assert len(pair.compiled.events) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": [0, 3]}, "row 0 must lie in blocks"),
        ({"starts": [0, -1]}, "row 0 must lie in blocks"),
        ({"starts": [0]}, "starts must have one more than first"),
        ({"first": [3]}, "first must lie in row 0, got 3"),
        ({"blocks": [0, 2]}, "row 0 must have keys, got 2"),
        ({"nodes": [0]}, "nodes as many as keys"),
        ({"keys": [b"", b"1"]}, "keys"),
    ],
)
def test_rows_that_are_none_are_refused(twins: Twins, change: dict, message: str) -> None:
    manager = twins[1].CPUOffloadingManager(16, 4)
    given = {"keys": [b"0", b"1"], "starts": [0, 2], "blocks": [0, 1], "first": [0]}
    given |= {"nodes": [0, 0]} | change
    kinds = {"starts": np.int64, "blocks": np.uint32, "first": np.int64, "nodes": np.uint32}
    arrays = [
        np.array(value, dtype=kinds[name]) if name in kinds else value
        for name, value in given.items()
    ]
    with pytest.raises((TypeError, ValueError), match=message):
        manager._serve_rows(*arrays)
    assert manager.stats()["lookups"] == 0
    with pytest.raises(TypeError, match="nodes must be a contiguous array"):
        manager._serve_rows([b"0"], *arrays[1:4], np.zeros(4, dtype=np.uint32)[::2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": [0, 2]}, "blocks must be below 2, got 2"),
        ({"first": 3}, "2 keys, got 3 and 2"),
        ({"first": -1}, "2 keys, got -1 and 2"),
        ({"slots": [0] * 3}, "slots must be 4, got 3"),
        ({"slots": None, "keys": [b"0", b""]}, "keys"),
        ({"slots": None, "keys": [b"0", "1"]}, "keys"),
    ],
)
def test_a_row_that_is_none_is_refused(twins: Twins, change: dict, message: str) -> None:
    manager = twins[1].CPUOffloadingManager(16, 4)
    given = {"keys": [b"0", b"1"], "blocks": [0, 1], "first": 0, "slots": [0] * 4}
    given |= change
    arrays = [
        np.array(value, dtype=np.uint32)
        if name in ("blocks", "slots") and value is not None
        else value
        for name, value in given.items()
    ]
    with pytest.raises((TypeError, ValueError), match=message):
        manager._serve_row(*arrays)
    assert manager.stats()["lookups"] == 0
    assert len(manager) == 0


def test_rows_are_served_by_the_compiled_steps_alone(twins: Twins) -> None:
    nothing = np.zeros(0, dtype=np.uint32)
    for options, is_served in (({}, True), ({"enable_events": True}, False)):
        manager = twins[1].CPUOffloadingManager(16, 4, **options)
        assert (manager._serve_row([], nothing, 0) is not None) is is_served
