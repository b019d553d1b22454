"""Host memory with a disk behind it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from kvoffload import BlockHash, CPUOffloadingManager
from kvoffload.policies import registry
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    Group,
    GroupChunks,
    GroupLayout,
    HintOptions,
    Result,
    Selection,
    Tier,
    replay,
)
from kvoffload.replay.serving import group_key
from kvoffload.replay.tiers import TieredServer
from kvoffload.testing.policies import check_invariants
from kvoffload.traces import Request, Workload
from tests.policies.test_golden import decoded
from tests.replay import test_golden as golden

READ_COST = 0.2
"""A block that is read from the disk, in blocks that are computed."""


def with_disk(policy: str, host: int, disk: int, **settings: Any) -> Configuration:
    """Return host memory and a disk of one policy."""
    return Configuration(policy=policy, host=host, tier=Tier("private", disk, policy), **settings)


def without_disk(trace: DecodedTrace, configuration: Configuration) -> Result:
    """Replay host memory alone, which declines nothing either; it is a result as with a disk."""
    manager = CPUOffloadingManager(16, configuration.host, configuration.policy)
    manager.policy.set_declining(False)
    alone = replay(trace, replace(configuration, tier=None), manager=manager)
    return replace(alone, configuration=configuration)


@pytest.mark.parametrize(("policy", "device"), [("lru", 0), ("hit-density", 100)])
def test_in_steps_host_memory_hits_as_without_a_disk_too(policy: str, device: int) -> None:
    """Steps of 16 blocks: a prompt can push out its own head."""
    trace = decoded("lmcache_agents_64c")
    groups = GroupChunks.of_blocks(16, step_tokens=256)
    both = with_disk(policy, 482, 0, device=device, groups=groups)
    host_only, alone = replace(both, tier=None), without_disk(trace, both)
    if policy != "hit-density":  # which declines blocks where no disk is behind it
        assert replay(trace, host_only) == replace(alone, configuration=host_only)
    assert alone.hits != replay(trace, replace(host_only, groups=GroupChunks.of_blocks())).hits
    assert replay(trace, both) == alone
    behind = replay(trace, with_disk(policy, 482, 4_820, device=device, groups=groups))
    assert behind.asked == alone.asked
    assert behind.hits > alone.hits


def test_what_a_disk_saves() -> None:
    """Blocks recomputed per request; the disk has ten times the blocks of host memory."""
    full_blocks = Selection(golden.trace("mooncake_conversation"), full_block_tokens=512)
    trace = DecodedTrace.of(full_blocks)
    capacity = int(trace.unique_blocks * 0.02)
    groups = GroupChunks.of_blocks(512, step_tokens=16 * 512)
    for policy, expected in {"hit-density": 15.8, "lru": 16.0}.items():
        disk = with_disk(policy, capacity, 10 * capacity, pending=16, groups=groups)
        found = replay(trace, disk)
        missed = found.asked - found.hits
        recomputed = (missed + READ_COST * found.tier_hits) / trace.num_requests
        assert recomputed == pytest.approx(expected, rel=0.02)


# -- several groups --------------------------------------------------------------------------------

FULL, WINDOW, STATE = Group("full", 4, 16), Group("window", 4, 16, 48), Group("state", 4, 16)
WORKLOAD = DecodedTrace.of(Workload(150, seed=3))
LAYOUTS = {
    "window": GroupLayout((FULL, WINDOW), 4096),
    "windows": GroupLayout((FULL, WINDOW, Group("window", 4, 16, 100)), 4096),
    "state": GroupLayout((FULL, STATE), 4096),
    "chunked": GroupLayout((FULL, Group("chunked", 4, 16, 64)), 4096),
}


def of_groups(name: str, policy: str, host: int, disk: int, **settings: int) -> Configuration:
    return with_disk(policy, host, disk, groups=GroupChunks.of(LAYOUTS[name], 512), **settings)


@pytest.mark.parametrize(("name", "device"), [*zip(LAYOUTS, (0, 100, 100, 0), strict=True)])
@pytest.mark.parametrize("policy", registry.names())
def test_without_a_disk_groups_are_replayed_as_ever(name: str, policy: str, device: int) -> None:
    both = of_groups(name, policy, 200, 0, device=device)
    alone = without_disk(WORKLOAD, both)
    assert alone.host_tokens
    assert replay(WORKLOAD, both) == alone


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("device", [0, 100])
def test_a_disk_for_everything_hits_as_memory_for_everything(name: str, device: int) -> None:
    everything = replay(WORKLOAD, of_groups(name, "lru", 100_000, 0, device=device))
    both = replay(WORKLOAD, of_groups(name, "lru", 200, 100_000, device=device))
    assert both.tier_hits > 0
    assert both.asked == everything.asked
    assert both.hits == everything.host_hits
    assert both.tier_stored == everything.stored  # each chunk once


@pytest.mark.parametrize(("name", "pending"), [*zip(LAYOUTS, (0, 8, 0, 8), strict=True)])
@pytest.mark.parametrize("policy", registry.names())
def test_nothing_stays_pinned_and_loads_are_in_memory(name: str, policy: str, pending: int) -> None:
    groups = GroupChunks.of(LAYOUTS[name], 16, step_tokens=None if pending else 128)
    host, disk = (CPUOffloadingManager(16, slots, policy) for slots in (60, 200))
    host.policy.set_declining(False)
    server = TieredServer(groups, host, disk, ends_stores=not pending)
    rng, waiting, from_disk = random.Random(5), [], 0
    for _ in range(200):
        chat = rng.randrange(12)
        hashes = [BlockHash(b"%d %d" % (chat, n)) for n in range(rng.randint(2, 24))]
        served = server.serve(hashes, 16 * len(hashes) + rng.randrange(1, 16))
        assert served.disk_tokens <= served.hit_tokens
        assert host.lookup(served.loaded) == len(served.loaded) or served.evicted
        from_disk += served.disk_tokens
        waiting.append(served)
        if len(waiting) > pending:
            waiting.pop(0).complete()
        for manager in (host, disk):
            check_invariants(manager)
        assert host.stats()["pinned"] == disk.stats()["pinned"] == 0
    for served in waiting:
        served.complete()
    assert from_disk
    assert host.stats()["pending"] == disk.stats()["pending"] == 0


def tiered(
    layout: str, host: Iterable[tuple[int, int]], disk: Iterable[tuple[int, int]]
) -> tuple[TieredServer, list[BlockHash]]:
    """Return a server whose tiers have groups' chunks, and the blocks of the prompt."""
    hashes = [BlockHash(b"%d" % n) for n in range(8)]
    managers = []
    for chunks in (host, disk):
        manager = CPUOffloadingManager(16, 100, "lru")
        keys = [group_key(hashes[chunk], group) for group, chunk in chunks]
        manager.prepare_store(keys)
        manager.complete_store(keys)
        managers.append(manager)
    return TieredServer(GroupChunks.of(LAYOUTS[layout], 16), *managers), hashes


FULL_CHUNKS = [(0, chunk) for chunk in range(8)]


def test_a_token_is_the_disks_if_a_chunk_of_any_group_came_from_it() -> None:
    server, hashes = tiered("window", FULL_CHUNKS, [(1, chunk) for chunk in (5, 6, 7)])
    served = server.serve(hashes, 129)
    assert (served.hit_tokens, served.disk_tokens) == (128, 48)  # what the window holds
    server, hashes = tiered("window", [(1, chunk) for chunk in (5, 6, 7)], FULL_CHUNKS)
    served = server.serve(hashes, 129)
    assert (served.hit_tokens, served.disk_tokens) == (128, 128)
    server, hashes = tiered("window", [*FULL_CHUNKS[:3], (1, 5), (1, 6), (1, 7)], FULL_CHUNKS[3:])
    served = server.serve(hashes, 129, 32)
    assert (served.hit_tokens, served.disk_tokens) == (96, 80)
    server, hashes = tiered("state", FULL_CHUNKS, [(1, 7)])
    served = server.serve(hashes, 129)
    assert (served.hit_tokens, served.disk_tokens) == (128, 128)  # a state holds all before it


def test_what_a_lookup_finds_on_the_disk_comes_even_if_nothing_is_hit() -> None:
    server, hashes = tiered("window", [], [*FULL_CHUNKS, (1, 6)])
    served = server.serve(hashes, 129)
    assert served.hit_tokens == 0  # the window is not whole
    assert all(group_key(block, 0) in server.manager for block in hashes)
    assert group_key(hashes[6], 1) in server.manager
    assert server.manager.stats()["pinned"] == 0


def test_without_a_slot_what_the_disk_has_is_a_miss() -> None:
    hashes = [BlockHash(b"%d" % n) for n in range(8)]
    groups = GroupChunks.of(GroupLayout((FULL, FULL), 4096), 16)
    host, disk = (CPUOffloadingManager(16, slots, "lru") for slots in (10, 100))
    keys = [group_key(block, group) for group in (0, 1) for block in hashes]
    disk.prepare_store(keys)
    disk.complete_store(keys)
    served = TieredServer(groups, host, disk).serve(hashes, 128)
    assert (served.hit_tokens, served.disk_tokens) == (2 * 16, 2 * 16)  # 8 of one group, 2


@pytest.mark.parametrize(
    ("groups", "host", "disk", "hits"),
    [
        (GroupChunks.of_blocks(), 4, 8, 4),
        (GroupChunks.of(LAYOUTS["window"], 16), 7, 14, 64),
    ],
    ids=["blocks", "groups"],
)
def test_the_disk_hears_that_a_session_ends(groups, host, disk, hits) -> None:
    """Its blocks leave first: the disk keeps the chain that came before it."""
    rows = [range(4), range(10, 14), range(20, 24), range(4)]
    requests = [
        Request(1000 * number, 65, 0, tuple(row), f"session {number}", ends=number == 1, expect=1)
        for number, row in enumerate(rows)
    ]
    said = DecodedTrace.of(requests, hints=HintOptions(told="ends"))
    tiers = with_disk("lru", host, disk, groups=groups)
    assert replay(requests, tiers).tier_hits == 0
    assert replay(said, tiers).tier_hits == hits


def test_what_comes_from_the_disk_for_a_session_is_its_own() -> None:
    rows = [range(4), range(10, 18), range(6)]
    requests = [
        Request(1000 * number, 16 * len(row), 0, tuple(row), "abc"[number], ends=number == 2)
        for number, row in enumerate(rows)
    ]
    said = DecodedTrace.of(requests, hints=HintOptions(told="ends"))
    host = CPUOffloadingManager(16, 8)
    result = replay(said, with_disk("lru", 8, 100), manager=host)
    assert result.tier_hits == 4
    assert host.policy.num_released == 6
