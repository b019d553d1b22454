"""The twins see the same, call by call; and a manager decides the same with a watch and without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload._sampling import hash_key
from kvoffload.managers._watching import WatchPlan
from kvoffload.testing.policies import check_invariants
from kvoffload.watch.ages import bin_start
from tests.allocations import fail_after
from tests.blocks import KEY_LENGTHS, block_hash, store
from tests.differential.pairs import require_equal
from tests.fuzz.calls import LOOK_EVERY, Driver, Sequence
from tests.observation import observe

from .watched import SECRET, Clock, requests, seen, serve, served, watched, whole

OPTIONS = [
    {"max_rate": 1.0, "slots": 2**20, "policy_slots": 8, "policies": ["arc", "hit-density"]},
    {"max_rate": 0.5, "slots": 2**20, "memory": [0.3, 3], "policies": []},
]
KEYS = [block_hash(index) for index in range(64)]
CALLS = st.binary(min_size=8, max_size=500)
MOST_KEYS = 2**14


def without_times(taken):
    """Return the collected requests without the time of each, which each twin reads itself."""
    return [[[each[:4] for each in part] for part in stretches] for stretches in taken]


def check_collected(cores):
    taken = [core.take_requests() for core in cores]
    require_equal(*map(without_times, taken), what="the collected requests")
    for keys, first, end, *_ in (
        each for stretches in taken[0] for part in stretches for each in part
    ):
        assert 0 <= first <= end <= len(keys) if first >= 0 else end == 0


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "half"])
@given(data=CALLS)
def test_the_twins_see_the_same(twins, options, data):
    clock = Clock()
    python, compiled = (watched(twin, clock=clock, **options) for twin in twins)
    sequence = Sequence(data)
    driver = Driver((python, compiled), sequence)
    pair = driver.pair
    for index, operation in enumerate(sequence.calls(), start=1):
        clock.seconds += operation / 7
        driver.call(operation)
        driver.check()
        require_equal(seen(pair.python), seen(pair.compiled), what="what the watch holds")
        if index % LOOK_EVERY == 0 and index % (2 * LOOK_EVERY):
            check_collected([manager.watch._core for manager in (pair.python, pair.compiled)])
        elif index % LOOK_EVERY == 0:
            reports = [manager.watch.report() for manager in (pair.python, pair.compiled)]
            require_equal(*reports, what="the report")
            answers = [manager.watch.explain(KEYS) for manager in (pair.python, pair.compiled)]
            require_equal(*answers, what="the explanations")


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "half"])
@given(data=CALLS)
def test_decisions_are_the_same_on_and_off(twin, options, data):
    sequence = Sequence(data)
    driver = Driver((twin, watched(twin, **options)), sequence)
    for operation in sequence.calls():
        driver.call(operation)
        driver.check()
    plain, with_watch = (observe(each) for each in (driver.pair.python, driver.pair.compiled))
    assert plain.pop("watch") is None
    assert with_watch.pop("watch") == "Watch"
    require_equal(plain, with_watch, what="what can be seen")


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["lru", "arc", "hit-density", "s3fifo"])
def test_the_twins_see_the_same_of_a_long_run_in_which_stores_overlap(twins, policy, seed):
    clock = Clock()
    managers = [whole(twin, 100, policy, clock=clock) for twin in twins]
    asked = requests(seed, 500)
    for part in (asked[:100], asked[100:200], asked[200:]):
        clock.seconds += 7
        for manager in managers:
            if len(part) > 100:
                served(manager, part, under_way=10)
                continue
            for hashes in part:  # these are loaded, too
                serve(manager, hashes)
        require_equal(*map(seen, managers), what="what the watch holds")
        require_equal(*(manager.watch.report() for manager in managers), what="the report")
    require_equal(*(manager.watch.counters() for manager in managers), what="the counters")
    for manager in managers:
        check_invariants(manager)


def test_what_no_lookup_takes_is_bounded(twins):
    """An engine that only stores never lets its watch take requests."""
    managers = [whole(twin, 40_000) for twin in twins]
    for index in range(0, 20_000, 100):
        for manager in managers:
            store(manager, [block_hash(position) for position in range(index, index + 100)])
    cores = [manager.watch._core for manager in managers]
    assert all(core.due for core in cores)
    taken = [core.take_requests() for core in cores]
    require_equal(*taken, what="the collected requests")
    ((requests,),) = taken[0]
    assert MOST_KEYS <= sum(len(keys) + 1 for keys, *_ in requests) <= MOST_KEYS + 1
    assert {(first, end) for _, first, end, *_ in requests} == {(0, 0)}
    for manager in managers:
        check_invariants(manager)


@pytest.mark.refused_allocations
def test_without_memory_a_request_is_not_collected(twins):
    outcomes = []
    for index in range(20):
        manager = whole(twins[1], 100)
        fail_after(index)
        try:
            served = manager.lookup(KEYS) == 0
        except MemoryError:
            served = False
        finally:
            fail_after(None)
        ((requests,),) = manager.watch._core.take_requests()
        assert requests in ([], [(KEYS, 0, len(KEYS), None)])
        outcomes.append((served, bool(requests)))
        check_invariants(manager)
    assert (True, False) in outcomes
    assert outcomes[-1] == (True, True)


def test_both_hash_alike(twins):
    words = [
        int.from_bytes(SECRET[position : position + 8], "little") for position in range(0, 64, 8)
    ]
    keys = [block_hash(index, length) for index, length in enumerate((*KEY_LENGTHS, *range(1, 70)))]
    for twin in twins:
        manager = whole(twin, 200)
        for key in keys:
            manager.lookup([key])
        assert manager.watch._core.order() == [[hash_key(key, words) for key in reversed(keys)]]


@pytest.mark.parametrize("age", [0, 1, 7, 8, 9, 15, 16, 17, 2**20, 2**32 - 1])
def test_an_age_is_counted_in_its_bin(twin, age):
    clock = Clock()
    manager = whole(twin, 1, clock=clock)
    store(manager, KEYS[:1])
    clock.seconds += age / 1000
    store(manager, KEYS[1:2])
    bins = manager.watch._core.overall()["unused_ages"]
    (index,) = (index for index, count in enumerate(bins) if count)
    assert bin_start(index) <= age < bin_start(index + 1)


def test_a_plan_is_checked():
    from kvoffload.managers._watch_c import WatchCore

    with pytest.raises(ValueError, match="1, 2 or 4 quarters"):
        WatchCore(WatchPlan(1, 1, limits=[1], lengths=[1], quarters=3), SimpleNamespace())
