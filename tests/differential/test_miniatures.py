"""Miniatures: requests served in one call, by both twins, and call by call by a manager."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload import Hints, PrepareStoreOutput
from kvoffload._sampling import REPEATABLE, secrets_from
from kvoffload.policies import registry
from tests.allocations import fail_after
from tests.blocks import A, B, C, D
from tests.differential.pairs import Pair, Twins, require_equal
from tests.differential.workloads import GENERATED, mixed_keys
from tests.observation import observe

TOLD = (None, Hints(ends=True), Hints(expect_s=3.0, source="a"), Hints(ends=True, expect_s=30.0))
COUNTED = {  # counts of miniatures, and those of managers
    "asked": "lookup_blocks",
    "hits": "hit_blocks",
    "stored": "stored_blocks",
    "evicted": "evicted_blocks",
    "not_admitted": "not_admitted",
    "refused": "refused_stores",
}


def miniature_of(twin: ModuleType, name: str, capacity: int) -> Any:
    kind = twin.CPUOffloadingManager._twin
    with secrets_from(REPEATABLE):
        return registry.parse(name).new_miniature(kind, capacity)


def miniatures(twins: Twins, name: str, capacity: int) -> Pair:
    return Pair(twins, lambda twin: miniature_of(twin, name, capacity))


def agree(pair: Pair) -> None:
    """Compare all that can be seen of two miniatures; the ids of blocks matter only to rows."""
    pair.agree()
    for miniature in pair.both:
        miniature._check()


def without_ids(value: Any) -> Any:
    """Return what was observed without the ids of blocks: miniatures have no slots."""
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name != "block_table"}
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, tuple) and len(value) == 2:
        first, second = value
        return first if isinstance(first, int) else (first, without_ids(second))
    return value


def require_a_managers(miniature: Any, manager: Any) -> None:
    """Compare a miniature whose stores have ended with a manager that made the same calls."""
    seen, expected = (without_ids(observe(each.policy)) for each in (miniature, manager))
    require_equal(seen, expected, "the policies of a miniature and a manager")
    stats = manager.stats()
    for own, counter in COUNTED.items():
        assert getattr(miniature, own) == stats[counter], own


def test_a_row_may_bring_two_new_sources_of_hints(twins: Twins) -> None:
    pair = miniatures(twins, "hit-density", 8)
    keys, blocks = [b"a", b"b"], np.arange(2, dtype=np.uint32)
    told = [(1.0, Hints(expect_s=3.0, source="first"), Hints(expect_s=9.0, source="second"))]
    for each in pair.both:
        arrays = np.array([0, 2]), blocks, np.zeros(1, np.int64)
        each.serve_rows(keys, *arrays, blocks.copy(), position=0, lag=0, told=told)
        assert [name for name, *_ in each.policy._sources.items()] == ["first", "second"]
    agree(pair)


@dataclass(frozen=True)
class Served:
    """What a manager answered to the calls for a request, whose store has not ended."""

    request: Any
    hits: int
    output: PrepareStoreOutput | None
    num_not_admitted: int

    @property
    def stored(self) -> list[bytes]:
        return [] if self.output is None else self.output.block_hashes_to_store

    @property
    def evicted(self) -> list[bytes]:
        return [] if self.output is None else self.output.block_hashes_evicted

    @property
    def counts(self) -> list[int]:
        """Those of a row: hits, stored, evicted, refused, not admitted."""
        numbers = len(self.stored), len(self.evicted), int(self.output is None)
        return [self.hits, *numbers, self.num_not_admitted]


def serve(manager: Any, hashes: list[bytes], first: int, told: Any = (None,) * 3) -> Served:
    """Serve a request, which asks for its blocks from the given one on."""
    before = manager.stats()["not_admitted"]
    now, at_begin, at_finish = told
    request = manager.begin(hashes, hints=at_begin, now=now)
    if hits := request.lookup(first):
        request.prepare_load(first, first + hits)
        request.complete_load(first, first + hits)
    output = request.prepare_store()
    request.finish(hints=at_finish)
    return Served(request, hits, output, manager.stats()["not_admitted"] - before)


def num_pending(miniature: Any) -> int:
    return sum(ref_cnt < 0 for ref_cnt, _ in miniature.policy.block_table)


def numbered(workload: str, seed: int) -> tuple[list[list[int]], list[bytes]]:
    """Return the rows of a workload as numbers of blocks, and the key of each."""
    numbers: dict[int, int] = {}
    rows = [
        [numbers.setdefault(block, len(numbers)) for block in batch]
        for batch in GENERATED[workload](seed, 100)
    ]
    return [*rows, []], mixed_keys(numbers)


def as_arrays(rows: list[list[int]], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where rows start, their blocks, and the number of each that is not asked for."""
    chance = random.Random(seed)
    starts = np.cumsum([0, *map(len, rows)])
    blocks = np.array([block for row in rows for block in row], dtype=np.uint32)
    return starts, blocks, np.array([chance.randint(0, len(row)) for row in rows], dtype=np.int64)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize(("workload", "capacity"), [("loops", 1), ("scans", 16), ("chats", 60)])
def test_requests_with_hints_and_events(
    twins: Twins, seed: int, name: str, workload: str, capacity: int
) -> None:
    pair = miniatures(twins, name, capacity)
    chance = random.Random(seed)
    position = 0
    for number, batch in enumerate(map(mixed_keys, GENERATED[workload](seed, 100))):
        keys = [key for key in batch if chance.random() < 0.3] if number % 3 else batch
        first, end = sorted(chance.randint(0, len(keys)) for _ in range(2))
        told = chance.choice(TOLD)
        for hints in (told, None):
            position += 1
            before, waits = position - chance.choice((-1, 0, 0.5, 4)), chance.random() < 0.2
            served = [
                each.serve(
                    *(keys, first, end, hints),
                    position=position,
                    before=before,
                    waits=waits,
                    early=position % 3 == 0,
                )
                for each in pair.both
            ]
            require_equal(*served, "hits")
            if chance.random() < 0.3:
                pair.do("end_stores", before)
                pair.do("release", keys[::2])
            if chance.random() < 0.3:
                pair.do("finish", keys, told)
        if number == 50:
            pair.do("clear")
            agree(pair)
            assert len(pair.compiled.policy) == 0
        if number % 10 == 0:
            agree(pair)
    agree(pair)
    if capacity > 1:  # each request of a seed may be longer than one block, and is refused then
        assert pair.compiled.stored > 0
        assert pair.compiled.evicted > 0


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize(
    ("workload", "capacity", "pending", "hinted", "at_once"),
    [
        ("scans", 0, 0, False, 30),
        ("loops", 1, 1, True, 30),
        ("chats", 16, 0, True, 30),
        ("scans", 16, 6, False, 30),
        ("loops", 60, 0, False, 30),
        ("chats", 60, 1, True, 30),
        ("scans", 1, 0, False, 1),
        ("chats", 16, 0, False, 1),
    ],
)
def test_rows_are_served_as_a_manager_serves_them_call_by_call(
    twins: Twins,
    seed: int,
    name: str,
    workload: str,
    capacity: int,
    pending: int,
    hinted: bool,
    at_once: int,
) -> None:
    """One row tells what it changes, too."""
    rows, keys = numbered(workload, seed)
    starts, blocks, first = as_arrays(rows, seed)
    chance = random.Random(seed)
    # Without a time policies read the clock, which differs between the twins.
    told = [
        (None, None, None) if row % 9 == 8 else (float(row), *chance.choices(TOLD, k=2))
        for row in range(len(rows))
    ]
    with secrets_from(REPEATABLE):
        manager = twins[1].CPUOffloadingManager(16, capacity, name)
    every: list[Served] = []
    for number, row in enumerate(rows):
        said = told[number] if hinted else (None,) * 3
        every.append(serve(manager, [keys[block] for block in row], int(first[number]), said))
        if number >= pending:
            every[number - pending].request.complete_store()
    for served in every[len(every) - pending :]:
        served.request.complete_store()
    pair = miniatures(twins, name, capacity)
    nodes = np.full(len(keys), 7, dtype=np.uint32)
    for start in range(0, len(rows), at_once):
        stop = min(start + at_once, len(rows))
        part = starts[start : stop + 1], blocks, first[start:stop]
        for each in pair.both:
            counts = each.serve_rows(
                *(keys, *part, nodes),
                position=start,
                lag=pending,
                told=told[start:stop] if hinted else None,
            )
            assert counts.tolist() == [served.counts for served in every[start:stop]]
        if at_once > 1:
            agree(pair)
            continue
        _, (left, entered) = pair.do("changes")
        require_equal(every[start].evicted, [keys[block] for block in left], "what has left")
        require_equal(every[start].stored, [keys[block] for block in entered], "what has entered")
    agree(pair)
    pair.do("end_stores", float(len(rows)))
    require_a_managers(pair.compiled, manager)


def test_a_store_ends_after_its_lag_or_for_a_request_that_waits(twins: Twins) -> None:
    pair = miniatures(twins, "lru", 3)

    def hits(position: float, before: float, *keys: bytes, waits: bool = False) -> int:
        when = {"position": position, "before": before, "waits": waits}
        asked = [*keys], 0, len(keys), None
        found = [each.serve(*asked, **when) for each in pair.both]
        require_equal(*found, "hits")
        agree(pair)
        return found[0]

    assert hits(1.0, -1.0, A, B) == 0
    assert hits(2.0, 1.0, A, B) == 0  # those of position 1 are under way
    assert num_pending(pair.compiled) == 2
    assert hits(3.0, 1.0, C, D) == 0  # refused: A and B may not leave
    assert pair.compiled.refused == 1
    assert hits(4.0, 1.0, A, waits=True) == 1
    assert num_pending(pair.compiled) == 1
    assert hits(5.0, 1.0, C, D) == 0  # A leaves
    assert hits(6.0, 5.0, B, C) == 1  # that of position 1 has ended, C has not
    pair.do("end_stores", 6.0)
    assert hits(7.0, 6.0, B, C, D) == 3
    pair.do("clear")
    assert hits(8.0, 8.0, A, B) == 0
    assert num_pending(pair.compiled) == 2


@pytest.mark.parametrize("twin", [0, 1])
def test_a_block_stored_again_takes_a_lag_of_its_own(twins: Twins, twin: int) -> None:
    """Its first store has ended for a request that waited."""
    miniature = miniature_of(twins[twin], "lru", 1)
    for position, key, waits in ((1, A, False), (2, A, True), (3, B, False), (4, B, True)):
        miniature.serve([key], 0, 1, None, position=position, before=0, waits=waits)
    miniature.serve([A], 0, 1, None, position=5, before=0)  # B leaves
    miniature._check()
    assert miniature.serve([A], 0, 1, None, position=6, before=2) == 0
    assert miniature.serve([A], 0, 1, None, position=7, before=6) == 1


@pytest.mark.refused_allocations
@pytest.mark.parametrize("name", registry.names())
def test_without_memory_a_request_is_served_or_raises(twins: Twins, name: str) -> None:
    """Its keys are too long to lie in a node, so that each store allocates."""
    keys = [bytes([1 + number]) * 99 for number in range(8)]
    served = set()
    for index in range(60):
        miniature = miniature_of(twins[1], name, 12)
        miniature.serve(keys[:2], 0, 2, None, position=0, before=0)
        fail_after(index)
        try:
            miniature.serve(keys, 0, 8, TOLD[2], position=1, before=0)
            served.add(True)
        except MemoryError:
            served.add(False)
        finally:
            fail_after(None)
        miniature._check()
        assert miniature.serve(keys, 0, 8, None, position=2, before=2) in (2, 8)
        miniature._check()
    assert served == {True, False}


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (0, 3), (2, 1)])
def test_what_is_asked_for_is_a_part_of_the_request(twins: Twins, first: int, stop: int) -> None:
    miniature = miniature_of(twins[1], "lru", 4)
    with pytest.raises(ValueError, match=rf"first and stop .* 0 \.\.\. 2, got {first}, {stop}"):
        miniature.serve([A, B], first, stop, None, position=1.0, before=1.0)
    assert miniature.asked == len(miniature.policy) == 0


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
        ({"keys": [b"0", "1"]}, "keys"),
    ],
)
def test_rows_that_are_none_are_refused(twins: Twins, change: dict, message: str) -> None:
    miniature = miniature_of(twins[1], "lru", 4)
    given = {"keys": [b"0", b"1"], "starts": [0, 2], "blocks": [0, 1], "first": [0]}
    given |= {"nodes": [0, 0]} | change
    kinds = {"starts": np.int64, "blocks": np.uint32, "first": np.int64, "nodes": np.uint32}
    arrays = [
        np.array(value, dtype=kinds[name]) if name in kinds else value
        for name, value in given.items()
    ]
    with pytest.raises((TypeError, ValueError), match=message):
        miniature.serve_rows(*arrays, position=0, lag=0)
    assert miniature.asked == 0
    nodes = np.zeros(4, dtype=np.uint32)[::2]
    with pytest.raises(TypeError, match="nodes must be a contiguous array"):
        miniature.serve_rows([b"0"], *arrays[1:4], nodes, position=0, lag=0)
