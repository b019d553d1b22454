"""Keys that are offered less often than ``store_threshold``, ghosts among them.

A tracker that is smaller than the ghost lists forgets how often a ghost was offered, so that a key
which was evicted and is remembered comes back below the threshold, while others are stored.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.vllm.conftest import SEED, SEQUENCES
from tests.vllm.pair import Pair
from tests.vllm.requests import key
from tests.vllm.sequences import Drawn, Sequence

REMEMBER = ["arc", "arc-classic", "s3fifo"]  # policies with ghosts in the table of keys


def run_tiny_sequence(seed: int, reference: type, cache_policy: str) -> None:
    """Run one sequence with a cache and a tracker that are always full."""
    drawn = Drawn(seed)
    rng = drawn.rng
    arguments = {
        "num_chunks": rng.randint(1, 4),
        "store_threshold": rng.randint(2, 3),
        "max_tracker_size": rng.randint(3, 8),
        "enable_events": rng.random() < 0.5,
    }
    kinds = (reference, KVOffloadManager)
    pair = Pair(*(kind(cache_policy=cache_policy, **arguments) for kind in kinds), drawn.keys)
    try:
        Sequence(pair, drawn).run(100)
    except BaseException as cause:
        raise AssertionError(f"sequence {seed}, {arguments}, {cause}") from cause
    pair.call("touch", drawn.keys, contexts=pair.context("all"))  # every key that is still known


def test_ghosts_below_the_threshold_are_those_of_vllm():
    for number in range(SEQUENCES):
        run_tiny_sequence(SEED + number, CPUOffloadingManager, "arc")


@pytest.mark.parametrize("cache_policy", registry.names())
def test_every_policy_keeps_its_invariants_below_the_threshold(cache_policy):
    for number in range(SEQUENCES // 15):
        run_tiny_sequence(SEED + number, KVOffloadManager, cache_policy)


def resident_bytes() -> int:
    gc.collect()
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("reads /proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("cache_policy", REMEMBER)
def test_ghosts_that_are_offered_below_the_threshold_leave_memory_flat(cache_policy):
    """Every second offer stores a key, and has with it ghosts, the oldest among them."""
    capacity, offers = 8, 300_000
    manager = KVOffloadManager(
        cache_policy=cache_policy, num_chunks=capacity, store_threshold=2, max_tracker_size=4
    )
    context = ReqContext("r")
    before = 0
    for number in range(offers // 2):
        if number == offers // 10:
            before = resident_bytes()
        if number % 100 == 0:
            context = ReqContext(str(number))  # a request keeps what it has shown
            manager.get_stats()  # a manager keeps samples until then
        fresh = key(number)
        manager.prepare_store([fresh], context)
        evicted = map(key, range(max(0, number - 2 * capacity - 1), max(0, number - capacity)))
        below = [one for one in evicted if one not in manager.counts]
        output = manager.prepare_store([*below, fresh], context)
        assert output.keys_to_store == [fresh]
        manager.complete_store([fresh], context)
        if number % 2:  # some are used again, and become other ghosts
            reader = ReqContext("reader")
            manager.prepare_load([fresh], reader)
            manager.complete_load([fresh], reader)
            manager.on_request_finished(reader)
    grown = resident_bytes() - before
    assert grown < 400_000, f"grew by {grown:,} bytes"
    check_invariants(manager)


@pytest.mark.parametrize("cache_policy", ["arc", "s3fifo"])
def test_evicting_for_what_is_not_stored_keeps_no_key(cache_policy):
    """``_policy.evict`` is given keys to protect, of which it is not said that they come."""
    manager = KVOffloadManager(cache_policy=cache_policy, num_chunks=4)
    context = ReqContext("r")
    for start in range(0, 100, 4):
        keys = [key(number) for number in range(start, start + 4)]
        manager.prepare_store(keys, context)
        manager.complete_store(keys, context)
        ghosts = [key(number) for number in range(start)]
        assert manager._policy.evict(4, ghosts) is not None
        check_invariants(manager)
        manager.touch(ghosts, context)
