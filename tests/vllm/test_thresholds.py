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

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.testing.policies import check_invariants
from tests.vllm.requests import key

REMEMBER = ["arc", "arc-classic", "s3fifo"]  # policies with ghosts in the table of keys


def resident_bytes() -> int:
    gc.collect()
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("reads /proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("cache_policy", REMEMBER)
def test_ghosts_that_are_offered_below_the_threshold_leave_memory_flat(cache_policy):
    """Every second offer stores a key, and has with it ghosts, the oldest among them."""
    capacity, offers = 8, 100_000
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
