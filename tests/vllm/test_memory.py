"""When an allocation fails: MemoryError, nothing changed, and the same call works afterwards.

Random sequences run through two managers. Of the second every call is first made with one
allocation failing, for every one that it makes; what that leaves behind shows at once or as a
difference in what both do later. An offer may have been recorded, and learned from: that changes
the order of the chunks and ghosts, not which are there, and shows in nothing that both do later.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from kvoffload.watch import Watch
from tests.allocations import fail_after
from tests.vllm.conftest import SEED, SEQUENCES
from tests.vllm.pair import Pair, learned, seen
from tests.vllm.sequences import Drawn, Sequence, Shape
from tests.vllm.watched import watch_all

CALLS = {
    "lookup",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "touch",
    "on_new_request",
    "on_request_finished",
    "get_stats",
}
MOST_ALLOCATIONS = 2000
INLINE_KEY_BYTES = 36  # longer keys are allocated


def fail_ours(number: int) -> Callable[[], None]:
    """Let every C allocation after so many fail; return what ends that."""
    fail_after(number)
    return lambda: fail_after(None)


def fail_pythons(number: int) -> Callable[[], None]:
    """Let one allocation of the interpreter fail; return what ends that."""
    testcapi = pytest.importorskip(
        "_testcapi", reason="this Python cannot make its allocations fail"
    )
    testcapi.set_nomemory(number, number + 1)
    return testcapi.remove_mem_hooks


@pytest.fixture
def no_collector():
    """Keep the collector, whose allocations would fail, from running."""
    gc.disable()
    yield
    gc.enable()


whose_fail = pytest.mark.parametrize(
    "fail", [pytest.param(fail_ours, marks=pytest.mark.refused_allocations), fail_pythons]
)


class Failing:
    """A manager whose calls are first made with an allocation failing, one after the other.

    Parameters
    ----------
    manager : KVOffloadManager
        What is called.
    keys : list of bytes
        Every key that will be used.
    fail : callable
        `fail_ours` or `fail_pythons`.
    """

    def __init__(self, manager, keys, fail):
        self.manager = manager
        self.keys = keys
        self.fail = fail
        self.failures = dict.fromkeys(CALLS, 0)

    def __getattr__(self, name):
        member = getattr(self.manager, name)
        if name not in CALLS:
            return member

        def call(*arguments, **keywords):
            context = next((one for one in arguments if isinstance(one, ReqContext)), None)
            before = seen(self.manager, self.keys)
            order = learned(self.manager, context)
            recorded = False
            for number in range(MOST_ALLOCATIONS):
                end = self.fail(number)
                try:
                    result = member(*arguments, **keywords)
                except MemoryError:
                    failed = True
                else:
                    failed = False
                finally:
                    end()
                if not failed:
                    return result
                self.failures[name] += 1
                check_invariants(self.manager)
                after = seen(self.manager, self.keys)
                assert after == before, f"{name}: allocation {number} left a trace"
                now = learned(self.manager, context)
                if name == "prepare_store" and now != order and not recorded:
                    recorded, order = True, now
                assert now == order, f"{name}: allocation {number} changed the order"
            raise AssertionError(f"{name}: an allocation fails however late it is")

        return call


@whose_fail
@pytest.mark.parametrize("cache_policy", registry.names())
def test_a_failing_allocation_leaves_no_trace(no_collector, cache_policy, fail):
    failures = dict.fromkeys(CALLS, 0)
    for number in range(max(1, SEQUENCES // 75)):
        for name, count in run_sequence(SEED + number, cache_policy, fail).items():
            failures[name] += count
    assert failures["prepare_store"] > 10


@pytest.mark.refused_allocations
@pytest.mark.parametrize("cache_policy", registry.names())
def test_a_failing_allocation_while_arrays_grow_leaves_no_trace(cache_policy):
    """More victims, more chunks in use and longer keys than there is room for at first."""
    shape = Shape(1, 6, 150, 0, odd_keys=True)
    failures = [run_sequence(SEED + number, cache_policy, fail_ours, shape) for number in range(3)]
    assert sum(counts["prepare_store"] for counts in failures) > 10


@whose_fail
@pytest.mark.parametrize("cache_policy", ["lru", "hit-density"])
def test_a_failing_allocation_leaves_no_trace_with_a_watch(no_collector, cache_policy, fail):
    for number in range(max(1, SEQUENCES // 75)):
        watches = [watch_all(slots=16, policies=("arc",)) for _ in range(2)]
        run_sequence(SEED + number, cache_policy, fail, watches=watches)
        expected, counters = (watch.counters() for watch in watches)
        for name in ("stored", "evicted", "declined", "refused", "failed"):
            assert counters[name] == expected[name]
        # Without memory the watch leaves out what it may, and counts nothing twice.
        for name in ("requests", "asked", "missed"):
            assert counters[name] <= expected[name]
        assert sum(counters["causes"]) <= counters["missed"] <= counters["asked"]


class HintedPair(Pair):
    """Give some requests hints, of which some end their session and some are malformed."""

    def context(self, name):
        rng = random.Random(name)
        hints = {"ends": rng.choice((True, False, 7)), "expect_s": rng.choice((2.5, None, "x"))}
        params = rng.choice((None, {"kvoffload": hints}))
        return tuple(ReqContext(name, params) for _ in self.both)


@whose_fail
@pytest.mark.parametrize("cache_policy", registry.names())
def test_a_failing_allocation_leaves_no_trace_with_hints(no_collector, cache_policy, fail):
    for number in range(max(1, SEQUENCES // 75)):
        run_sequence(SEED + number, cache_policy, fail, pair=HintedPair)


def run_sequence(
    seed: int,
    cache_policy: str,
    fail,
    shape: Shape | None = None,
    watches: list[Watch] | None = None,
    pair: type[Pair] = Pair,
) -> dict[str, int]:
    """Run one sequence; return how many allocations failed, by call.

    With two `watches`, or hints, both managers are ours.
    """
    drawn = Drawn(seed, shape)
    rng, keys = drawn.rng, drawn.keys
    if cache_policy == "hit-density" and max(map(len, keys)) > INLINE_KEY_BYTES:
        cache_policy += "?guard=0"  # its miniatures leave out a long key without memory for it
    arguments = {
        "cache_policy": cache_policy,
        "num_chunks": rng.randint(1, max(2, len(keys) // 2)),
        "enable_events": rng.random() < 0.7,
        "store_threshold": rng.choice((1, 2, 2)),
        "max_tracker_size": rng.randint(2, 2 * len(keys)),
    }
    if watches is not None:
        reference, ours = (KVOffloadManager(**arguments, watch=watch) for watch in watches)
    else:
        own = cache_policy not in ("lru", "arc") or pair is not Pair
        reference = (KVOffloadManager if own else CPUOffloadingManager)(**arguments)
        ours = KVOffloadManager(**arguments)
    tested = Failing(ours, keys, fail)
    try:
        Sequence(pair(reference, tested, keys), drawn).run(60)
    except BaseException as cause:
        raise AssertionError(f"sequence {seed}, {arguments}: {cause}") from cause
    return tested.failures
