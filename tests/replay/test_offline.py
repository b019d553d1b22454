"""The ceilings and the device's cache, against counts by brute force."""

from __future__ import annotations

import random
from dataclasses import replace as replaced

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload import CPUOffloadingManager
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    GroupChunks,
    HintOptions,
    Selection,
    _belady,
    replay,
    requests,
)
from kvoffload.replay.offline import CEILINGS, belady
from kvoffload.replay.rows import Rows
from kvoffload.traces import Request, Survey, Workload
from tests.sources import plain

pytestmark = pytest.mark.fast

SUMMED = (
    *("requests", "blocks", "tokens", "asked", "device_hits", "hits"),
    *("loaded", "stored", "evicted", "refused", "not_admitted"),
)


def trace_of(*rows: tuple[int, ...]) -> DecodedTrace:
    return DecodedTrace.of(Request(0, 0, 0, row) for row in rows)


@pytest.mark.parametrize("capacity", [0, 1, 5, 20, 10**6])
def test_the_choice_is_alike_plain_and_compiled(seed, capacity):
    python = plain(_belady)
    for number in range(200):
        dice = random.Random(f"{seed} {number}")
        size = 5000 if number < 3 else dice.randrange(200)  # the first pass more uses than fit
        blocks = np.array([dice.randrange(30) for _ in range(size)], dtype=np.uint32)
        end, last = len(blocks), dict[int, int]()
        next_asked = np.full(end, end, dtype=np.int64)
        for position in reversed(range(end)):
            if dice.random() < 0.9:
                next_asked[position] = last.get(blocks[position], end)
            last[blocks[position]] = position
        arguments = blocks.data, next_asked.data, 30, capacity
        assert _belady.belady(*arguments) == python.belady(*arguments)


def on_device(trace: DecodedTrace, slots: int) -> np.ndarray:
    """Return the leading blocks of each request that the accelerator's cache has."""
    groups = GroupChunks.of_blocks()
    return Rows(trace, groups, trace.keys).on_device(slots).hits


def infinite_hits(trace: DecodedTrace, device_hits: np.ndarray) -> np.ndarray:
    """Return the leading blocks of each request that an earlier one had, less the device's."""
    hits, seen = [], set[int]()
    for row, found in zip(trace.rows(), device_hits.tolist(), strict=True):
        lead = next((at for at, block in enumerate(row) if block not in seen), len(row))
        seen.update(row)
        hits.append(max(0, lead - found))
    return np.array(hits)


def nothing(trace: DecodedTrace) -> np.ndarray:
    return on_device(trace, 0)


def best_hits(trace: DecodedTrace, capacity: int, front: list[int]) -> int:
    """Return the most hits over all choices, at each use of a block, of what to store and evict."""
    states = {frozenset[int](): 0}  # by what the cache holds, the most hits so far
    for row, on_device in zip(trace.rows(), front, strict=True):
        for position, block in enumerate(row):
            after: dict[frozenset[int], int] = {}
            for cached, hits in states.items():
                if block in cached:
                    choices, hits = [cached], hits + (position >= on_device)
                else:
                    choices = [cached]
                    if len(cached) < capacity:
                        choices.append(cached | {block})
                    elif capacity:
                        choices += [cached - {victim} | {block} for victim in cached]
                for chosen in choices:
                    after[chosen] = max(hits, after.get(chosen, 0))
            states = after
    return max(states.values())


@settings(max_examples=200)
@given(
    rows=st.lists(
        st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(tuple),
        min_size=1,
        max_size=7,
    ),
    capacity=st.integers(0, 3),
    device=st.integers(0, 3),
)
def test_belady_is_the_best_choice_behind_an_accelerator(rows, capacity, device) -> None:
    trace = trace_of(*rows)
    front = on_device(trace, device)
    assert belady(trace, capacity, front)[0] == best_hits(trace, capacity, front.tolist())


def test_the_infinite_cache_hits_what_a_survey_calls_ideal() -> None:
    workload = Workload(300, seed=1)
    trace = DecodedTrace.of(workload)
    survey = Survey.of(workload)
    infinite = replay(trace, Configuration(policy="infinite", host=0))
    assert infinite.hits == infinite_hits(trace, nothing(trace)).sum() == survey.ideal_hits
    assert (trace.num_requests, trace.num_blocks) == (survey.requests, survey.blocks)
    assert trace.unique_blocks == survey.unique_blocks


def test_a_store_in_flight_cannot_be_hit() -> None:
    trace = trace_of((1,), (1,), (1,), (1,))
    found = [replay(trace, Configuration(host=4, pending=pending)).hits for pending in (0, 1, 2, 9)]
    assert found == [3, 2, 1, 0]


def test_requests_without_blocks_count_nothing() -> None:
    trace = trace_of((), (7,), (), (7,))
    assert belady(trace, 1, nothing(trace)) == (1, 1)
    for policy in ("lru", *CEILINGS):
        found = replay(trace, Configuration(policy=policy, host=1))
        assert (found.hits, found.asked, found.stored) == (1, 2, 1)


def test_the_fingerprint_knows_where_requests_end_and_how_long_they_are() -> None:
    prints = {
        trace_of(*rows).fingerprint() for rows in ([(1, 2)], [(1,), (2,)], [(2, 1)], [(1, 3)])
    }
    prints.add(DecodedTrace.of([Request(0, 5, 0, (1, 2))]).fingerprint())
    assert len(prints) == 5


@pytest.mark.parametrize("parts", [2, 3, 10, 500])
def test_parts_add_up_to_the_whole_and_the_cache_goes_on_between_them(parts: int) -> None:
    trace = DecodedTrace.of(Workload(120, seed=1))
    one = Configuration(policy="arc", host=200, device=20, pending=2)
    whole = replay(trace, one, parts=parts)
    found = whole.parts
    assert len(found) == parts
    assert replay(trace, one) == replaced(whole, parts=())
    assert max(part.requests for part in found) - min(part.requests for part in found) <= 1
    for name in SUMMED:
        assert sum(getattr(part, name) for part in found) == getattr(whole, name)


def test_without_the_tokens_of_a_block_there_are_no_percentiles() -> None:
    requests = [Request(0, 64 + 16 * n, 0, tuple(range(n, n + 5))) for n in range(10)]
    trace, groups = DecodedTrace.of(requests), GroupChunks.of_blocks(16)
    unsized = replay(trace, Configuration(host=6))
    assert (unsized.missed_p50, unsized.missed_tokens, unsized.token_hit_ratio) == (None,) * 3
    ceiling = replay(trace, Configuration(policy="belady", host=6, groups=groups))
    assert (ceiling.missed_p95, ceiling.hit_tokens) == (None, None)
    assert unsized.tokens == ceiling.tokens == sum(one.input_length for one in requests)
    one = Configuration(host=6, groups=groups)
    assert replay(requests, one, manager=CPUOffloadingManager(16, 6)) == replay(trace, one)


# -- the blocks of a decoded trace, against a sort of all of them ----------------------------------

IDS = st.integers(0, 12) | st.sampled_from([2**63, 2**64 - 1])
ROW = st.lists(IDS, max_size=6).map(tuple)
ROWS = st.lists(ROW, max_size=20)


@given(rows=ROWS, batch=st.sampled_from([1, 5, 2**18]))
def test_blocks_are_indices_into_the_distinct_ids_ascending(rows, batch):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests._Numbering, "BATCH", batch)
        trace = DecodedTrace.of(Request(0, len(row), 0, row) for row in rows)
    flat = np.array([hash_id for row in rows for hash_id in row], dtype=np.uint64)
    ids, blocks = np.unique(flat, return_inverse=True)
    assert (trace.ids.dtype, trace.blocks.dtype) == (np.uint64, np.uint32)
    assert trace.ids.tolist() == ids.tolist()
    assert trace.blocks.tolist() == blocks.tolist()
    assert trace.starts.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    assert trace.lengths.tolist() == [len(row) for row in rows]


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 30) | st.just(2**63 - 1), ROWS.map(lambda r: sum(r, ())))
    ),
    size=st.integers(1, 9),
)
def test_full_blocks_are_those_of_a_selection(rows, size):
    given = [
        Request(index, length, 1, ids, "s", ends=True) for index, (length, ids) in enumerate(rows)
    ]
    options = {"hints": HintOptions(told="ends") if given else None, "arrivals": True}
    cut = DecodedTrace.of(given, **options).full_blocks(size)
    chosen = DecodedTrace.of(Selection(given, full_block_tokens=size), **options)
    assert cut.fingerprint() == chosen.fingerprint()
    for name, array in chosen.arrays().items():
        assert getattr(cut, name).dtype == array.dtype
        assert getattr(cut, name).tolist() == array.tolist()
    if given:
        assert cut.hints.ends.tolist() == chosen.hints.ends.tolist()
    assert cut.arrivals.following.tolist() == chosen.arrivals.following.tolist()
