"""Ids that cannot be prefix-chained: exact against dictionaries, bounded, silent on real traces."""

import hashlib
import itertools
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload._sampling import REPEATABLE, SECRET_BYTES, hash_ids, hash_key, words_of
from kvoffload.traces import Request, Survey
from kvoffload.traces.chaining import BATCH, Chaining, ChainingCounter
from kvoffload.traces.sorting import sorted_by_time
from tests.replay.test_golden import trace

RECORDED = ("mooncake_conversation", "weka_cc_a", "lmcache_agents_64c")
MIXED = st.integers(0, 9) | st.sampled_from([2**64 - 1, 2**63])
ROWS = st.lists(st.lists(MIXED, max_size=8), max_size=25)


def counted(rows, **options) -> Chaining:
    counter = ChainingCounter(**options)
    for row in rows:
        counter.add(tuple(row))
    return counter.counts()


def exact(rows) -> tuple[int, int, int]:
    """Return the ids that repeat, those that are unchained, and the requests with a block."""
    times: dict[int, int] = {}
    before: dict[int, set[int]] = {}
    twice = set()
    for row in rows:
        for index, hash_id in enumerate(row):
            times[hash_id] = times.get(hash_id, 0) + 1
            if index:
                before.setdefault(hash_id, set()).add(row[index - 1])
        twice |= {hash_id for hash_id in row if row.count(hash_id) > 1}
    unchained = twice | {hash_id for hash_id, found in before.items() if len(found) > 1}
    return sum(n > 1 for n in times.values()), len(unchained), sum(map(bool, rows))


@given(ROWS, st.integers(1, 30))
@example([[10, 20, 30], [5], [20, 30]], 30)  # the last is recorded behind another cache
def test_counts_are_exact_while_all_ids_are_remembered(rows, batch):
    found = counted(rows, batch=batch * 1000)
    assert (found.repeated_ids, found.unchained_ids, found.requests) == exact(rows)
    # in small batches, of which not all are examined, nothing is made up
    assert counted(rows, batch=batch).unchained_ids <= found.unchained_ids


@given(st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=30), st.integers(1, 50))
def test_chained_ids_are_never_suspected(prompts, batch):
    known: dict[tuple[int, ...], int] = {}
    rows = [
        # a recording may begin anywhere in a prompt
        [known.setdefault(tuple(row[: n + 1]), len(known) * 7919) for n in range(len(row))][skip:]
        for row, skip in zip(prompts, itertools.cycle((0, 1, 0, 3)), strict=False)
    ]
    for most in (4, 2**14):
        found = counted(rows, most_ids=most, batch=batch)
        assert (found.unchained_ids, found.unchained_requests) == (0, 0)


def documents(requests: int, *, chained: bool, seed: int = 1):
    """Yield prompts of documents in any order, with hashes of content, or of the whole prefix."""
    chance = random.Random(seed)
    pool = [[chance.randbytes(8) for _ in range(8)] for _ in range(400)]
    for _ in range(requests):
        before = b""
        row = []
        for block in itertools.chain(*chance.choices(pool, k=6)):
            before = hashlib.sha256(before + block).digest() if chained else block
            row.append(int.from_bytes(before[:8], "big"))
        yield row


def test_hashes_of_content_are_found_and_chained_ones_of_the_same_prompts_are_not():
    wrong, right = (counted(documents(3000, chained=chained)) for chained in (False, True))
    assert wrong.is_broken
    assert wrong.unchained_requests == 3000
    assert wrong.unchained_ids >= 400  # the first block of each document, at least
    assert not right.is_suspect
    few = counted([*documents(300, chained=True), (1, 2), (3, 2)])  # one collision
    assert (few.unchained_ids, few.is_suspect, few.is_broken) == (1, False, False)
    assert [Chaining(500, n, 500, 0).is_suspect for n in (4, 5)] == [False, True]
    assert not Chaining(500, 5, 500, 5).is_broken, "one in a hundred"
    assert Chaining(500, 6, 500, 5).is_broken
    assert Chaining(500, 5, 500, 6).is_broken


def test_a_sample_of_many_ids_estimates_their_number():
    rows = [*documents(3000, chained=False)]
    repeated, unchained, requests = exact(rows)
    found = counted(rows, most_ids=500)
    assert found.repeated_ids == pytest.approx(repeated, rel=0.2)
    assert found.unchained_ids == pytest.approx(unchained, rel=0.3)
    assert (found.requests, found.is_broken) == (requests, True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "step",
    [
        1,
        pytest.param(2**32, marks=pytest.mark.nightly),
        pytest.param(2**48 + 1, marks=pytest.mark.nightly),
        pytest.param(0x9E3779B97F4A7C15, marks=pytest.mark.nightly),
    ],
    ids=hex,
)
def test_memory_is_bounded_however_many_ids_there_are(step):
    tracemalloc.start()
    counter = ChainingCounter()
    peaks = []
    for start in range(0, 24 * BATCH, 64):
        counter.add(tuple(index * step % 2**64 for index in range(start, start + 64)))
        if start in (12 * BATCH, 23 * BATCH):
            peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.1 < 40 * 2**20
    assert counter.counts().unchained_ids == 0


@pytest.mark.parametrize("name", RECORDED)
def test_real_traces_are_chained(name):
    survey = Survey.of(trace(name), unique=False)
    assert (survey.chaining.unchained_ids, survey.backwards) == (0, 0)
    assert survey.chaining.repeated_ids > 10_000


@given(st.lists(st.integers(0, 5) | st.floats(0, 5, allow_nan=False), max_size=30))
def test_sorting_by_time_is_stable_and_changes_nothing_else(times):
    requests = [
        Request(time, index, 1, (index, 2**64 - 1), str(index) if index % 2 else None)
        for index, time in enumerate(times)
    ]
    assert list(sorted_by_time(iter(requests))) == sorted(requests, key=lambda r: r.timestamp)


def test_ids_are_hashed_as_keys_of_eight_bytes() -> None:
    draw = random.Random(3)
    ids = [0, 1, 2**32, 2**64 - 1, *(draw.getrandbits(64) for _ in range(200))]
    for secret in (REPEATABLE, bytes(range(SECRET_BYTES))):
        words = words_of(secret)
        expected = [hash_key(number.to_bytes(8, "little"), words) for number in ids]
        assert hash_ids(np.array(ids, dtype=np.uint64), secret).tolist() == expected
