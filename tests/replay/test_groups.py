"""The rule of several KV groups, worked by hand, and replays by it."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.policies import registry
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    Group,
    GroupChunks,
    GroupLayout,
    Result,
    replay,
)
from kvoffload.replay.device import new_device
from kvoffload.replay.rows import Rows
from kvoffload.replay.serving import GroupServer, group_key
from kvoffload.traces import Request

FULL = Group("full", 12, 16)
WINDOW = Group("window", 12, 16, 48)
STATE = Group("state", 12, 16)
CHUNKED = Group("chunked", 12, 16, 64)


def bound(*groups: Group, block_tokens: int = 16, retention: int | None = 0) -> GroupChunks:
    return GroupChunks.of(GroupLayout(groups, 393216), block_tokens, retention)


class Has:
    """Runs over a set of places."""

    def __init__(self, *indexes: tuple[int, range]) -> None:
        self.indexes = {(group, chunk) for group, chunks in indexes for chunk in chunks}

    def leading(self, group: int, start: int, end: int) -> int:
        found = [(group, chunk) in self.indexes for chunk in range(start, end)]
        return found.index(False) if False in found else len(found)

    def trailing(self, group: int, start: int, end: int) -> int:
        found = [(group, chunk) in self.indexes for chunk in range(end - 1, start - 1, -1)]
        return found.index(False) if False in found else len(found)


def of_group(indexes, group: int) -> list[int]:
    return [index.chunk for index in indexes if index.group == group]


# -- chunks and the trace --------------------------------------------------------------------------


def test_a_chunk_is_a_block_of_the_trace_where_that_is_whole_blocks() -> None:
    chunks = bound(FULL, WINDOW, block_tokens=64)
    assert (chunks.blocks_per_chunk, chunks.chunk_tokens) == (4, (64, 64))
    assert chunks.is_exact
    assert chunks.slot_bytes == 4 * 393216


def test_groups_with_larger_blocks_have_larger_chunks() -> None:
    chunks = bound(FULL, Group("window", 12, 32, 100))
    assert (chunks.blocks_per_chunk, chunks.chunk_tokens, chunks.align) == (1, (16, 32), 16)


def test_other_blocks_stand_for_chunks() -> None:
    large = [Group("full", 12, 544), Group("state", 36, 544)]
    chunks = bound(*large, block_tokens=512)
    assert not chunks.is_exact
    assert (chunks.chunk_tokens, chunks.engine_chunk_tokens) == ((512, 512), (544, 544))
    assert bound(*large, block_tokens=16).chunk_tokens == (544, 544)
    assert bound(*large, block_tokens=16).is_exact
    assert bound(*large, block_tokens=4096).blocks_per_chunk == 8


def test_no_chunk_is_smaller_than_a_block_of_the_trace() -> None:
    assert min(bound(FULL, WINDOW, block_tokens=512).chunk_tokens) == 512


@pytest.mark.parametrize(
    ("groups", "block_tokens", "retention", "multiple"),
    [
        ((FULL, WINDOW), 16, 24, 16),
        ((FULL, WINDOW), 64, 96, 64),
        ((FULL, Group("window", 12, 32, 100)), 16, 48, 32),
        ((FULL, STATE), 64, -64, 64),
    ],
)
def test_a_retention_that_the_engine_refuses_names_the_number(
    groups, block_tokens, retention, multiple
) -> None:
    with pytest.raises(ValueError, match=f"^retention must be .* multiple of {multiple}, got"):
        bound(*groups, block_tokens=block_tokens, retention=retention)


def test_chunks_have_a_limit() -> None:
    """A few bytes of a configuration do not ask for a range of 2**40 chunks."""
    assert bound(FULL, WINDOW, block_tokens=2**24).chunk_tokens == (2**24, 2**24)
    with pytest.raises(ValueError, match=f"^block_tokens must be <= 16777216, got {2**24 + 1}"):
        bound(FULL, WINDOW, block_tokens=2**24 + 1)
    with pytest.raises(ValueError, match=r"^block_tokens must be >= 1, got 0"):
        bound(FULL, WINDOW, block_tokens=0)
    rule = f"^block_tokens must give chunks of at most 16777216 tokens, got 4096, .* {2**28}"
    with pytest.raises(ValueError, match=rule):
        bound(FULL, Group("window", 12, 2**20, 100), block_tokens=4096)


def test_retention_needs_a_window_or_a_state() -> None:
    with pytest.raises(ValueError, match="no group is a window or a state, got 64"):
        bound(FULL, CHUNKED, retention=64)


def test_the_length_of_a_prompt() -> None:
    chunks = bound(FULL)
    assert chunks.length_of(30, 2) == 30
    assert chunks.length_of(0, 2) == 33  # not known
    assert chunks.length_of(100, 2) == 47  # what is cut off is not there


# -- what is stored --------------------------------------------------------------------------------


def test_a_window_is_stored_before_its_resume_points() -> None:
    (call,) = bound(FULL, WINDOW).offers(128, 0, 0)
    assert of_group(call, 0) == list(range(8))
    assert of_group(call, 1) == [4, 5, 6]  # before 112; of 47 tokens
    (call,) = bound(FULL, WINDOW).offers(128, 0, 0, junction=48)
    assert of_group(call, 1) == [0, 1, 2, 4, 5, 6]
    (call,) = bound(FULL, WINDOW, retention=64).offers(130, 0, 0)
    assert of_group(call, 1) == [1, 2, 3, 5, 6, 7]
    (call,) = bound(FULL, WINDOW, retention=None).offers(130, 0, 0)
    assert of_group(call, 1) == list(range(8))


def test_a_chunk_of_several_blocks_is_stored_whole() -> None:
    (call,) = bound(FULL, WINDOW, block_tokens=64).offers(300, 0, 0)
    assert of_group(call, 1) == [3]  # 48 tokens before 256 lie in the chunk from 192 on


def test_full_chunks_of_several_sizes_store_every_chunk_of_a_window() -> None:
    chunks = bound(FULL, Group("full", 12, 32), WINDOW)
    assert chunks.align is None
    (call,) = chunks.offers(128, 0, 0)
    assert of_group(call, 2) == list(range(8))


def test_states_are_offered_step_by_step() -> None:
    chunks = bound(FULL, STATE)
    first, second = chunks.offers(40, 0, 0)
    assert [tuple(index) for index in first] == [(1, 1)]  # after 32 tokens
    assert of_group(second, 0) == [0, 1]
    calls = bound(FULL, STATE, retention=None).offers(48, 0, 0)
    assert [[tuple(index) for index in call] for call in calls] == [
        [(1, 1)],
        [(0, 0), (0, 1)],
        [(1, 2)],
        [(0, 2)],
    ]


def test_steps_end_where_their_tokens_do() -> None:
    layout = GroupLayout((FULL, STATE), 4096)
    chunks = GroupChunks.of(layout, 16, None, step_tokens=40)
    states = [call[0].chunk for call in chunks.offers(100, 0, 0) if call[0].group == 1]
    assert states == [1, 3, 5]  # 32, 64 and 96 tokens
    calls = bound(FULL, STATE, retention=None).offers(10_000, 0, 0)  # 8,192 a step
    assert [call[0].chunk for call in calls if call[0].group == 1] == [511, 623, 624]


def test_after_a_load_is_offered_what_follows() -> None:
    (call,) = bound(FULL, WINDOW).offers(128, 0, 64)
    assert of_group(call, 0) == [4, 5, 6, 7]
    (call,) = bound(FULL, WINDOW).offers(128, 64, 0)
    assert of_group(call, 0) == list(range(8))  # the accelerator has four of them


def test_of_a_window_on_the_accelerator_is_offered_what_it_keeps() -> None:
    (call,) = bound(FULL, WINDOW, retention=None).offers(128, 96, 0)
    assert of_group(call, 1) == [3, 4, 5, 6, 7]  # from token 49 on


# -- the hit rule ----------------------------------------------------------------------------------


def test_full_groups_hit_what_all_of_them_have() -> None:
    chunks = bound(FULL, FULL)
    assert chunks.hit(128, 0, Has((0, range(5)), (1, range(3)))) == 48
    assert chunks.hit(128, 0, Has((0, range(8)), (1, range(8)))) == 128
    assert chunks.hit(128, 32, Has((0, range(2, 5)), (1, range(2, 5)))) == 48


def test_what_is_shorter_than_a_chunk_is_no_hit() -> None:
    assert bound(FULL).hit(15, 0, Has()) == 0  # of the prompt
    assert bound(FULL).hit(40, 24, Has((0, range(2)))) == 0  # after what the accelerator has
    assert bound(FULL).hit(64, 8, Has((0, range(1)))) == 0  # of what is there


def test_a_window_hits_before_the_last_token() -> None:
    has = Has((0, range(8)), (1, range(3, 7)))
    assert bound(FULL, WINDOW).hit(128, 0, has) == 112
    assert bound(FULL, WINDOW).hit(129, 0, has) == 112  # the window before 128 is not there


def test_a_window_that_reaches_the_beginning_is_long_enough() -> None:
    assert bound(FULL, WINDOW).hit(128, 0, Has((0, range(8)), (1, range(2)))) == 32


def test_a_window_of_a_chunk_and_a_token_is_stored_one_chunk_short() -> None:
    """Of 49 tokens over chunks of 16 three are stored and four are asked for."""
    chunks = bound(FULL, Group("window", 12, 16, 49))
    (call,) = chunks.offers(129, 0, 0)
    assert of_group(call, 1) == [5, 6, 7]
    assert chunks.hit(129, 0, Has((0, range(8)), (1, range(5, 8)))) == 0
    assert chunks.hit(129, 0, Has((0, range(8)), (1, range(4, 8)))) == 128


def test_a_state_hits_where_it_ends() -> None:
    chunks = bound(FULL, STATE)
    assert chunks.hit(128, 0, Has((0, range(8)), (1, range(4, 5)))) == 80
    assert chunks.hit(128, 0, Has((0, range(4)), (1, range(4, 5)))) == 0


def test_what_a_later_group_lowers_is_asked_again() -> None:
    windows = bound(FULL, Group("window", 12, 16, 64), WINDOW)
    has = Has((0, range(8)), (1, range(4, 8)), (2, range(1, 4)))
    assert windows.hit(129, 0, has) == 0  # at 64 the wider window has nothing
    has = Has((0, range(8)), (1, range(8)), (2, range(1, 4)))
    assert windows.hit(129, 0, has) == 64


def test_on_the_accelerator_a_window_that_reaches_the_beginning_is_long_enough() -> None:
    there = {(0, chunk) for chunk in range(4)} | {(1, 0), (1, 1)}
    assert bound(FULL, WINDOW).local(65, lambda index: index in there) == (32, 64)


def test_a_window_of_one_token_asks_for_its_own_chunk() -> None:
    there = {(0, chunk) for chunk in range(4)} | {(1, 2)}
    windows = bound(FULL, Group("window", 12, 16, 1))
    assert windows.local(65, lambda index: index in there) == (48, 64)


def test_chunks_are_left_in_the_order_of_their_last_tokens() -> None:
    left = bound(FULL, Group("full", 12, 32)).left_on_device(64)
    assert left == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]


def test_what_is_loaded() -> None:
    chunks = bound(FULL, WINDOW, STATE, CHUNKED)
    loaded = chunks.loaded(0, 112)
    assert of_group(loaded, 0) == list(range(7))
    assert of_group(loaded, 1) == [4, 5, 6]  # from token 65 on
    assert of_group(loaded, 2) == [6]
    assert of_group(loaded, 3) == [4, 5, 6]  # from token 64 on
    assert of_group(chunks.loaded(96, 16), 0) == [6]
    assert chunks.loaded(96, 0) == []


# -- replays ---------------------------------------------------------------------------------------


def run(trace: DecodedTrace, policy: str, host: int, groups: GroupChunks, **how) -> Result:
    return replay(trace, Configuration(policy=policy, host=host, groups=groups, **how))


def system_prompt(count: int = 40) -> list[Request]:
    """Prompts that share 4,096 tokens and nothing else; of 4,480 tokens each."""
    shared = tuple(range(1, 257))
    return [
        Request(0, 4480, 0, (*shared, *range(1000 * n, 1000 * n + 24))) for n in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("groups", "retention", "hit_tokens"),
    [
        ((FULL,), 0, 4096),
        ((FULL, WINDOW), 0, 0),
        ((FULL, WINDOW), 512, 4096),
        ((FULL, WINDOW), None, 4096),
        ((FULL, STATE), 0, 0),
    ],
)
def test_a_shared_system_prompt_on_a_cold_cache(groups, retention, hit_tokens) -> None:
    chunks = bound(*groups, retention=retention)
    result = run(DecodedTrace.of(system_prompt()), "lru", 100_000, chunks)
    assert result.offloaded_tokens == 39 * hit_tokens
    assert result.asked_tokens == 40 * 4480
    if hit_tokens:
        assert result.hit_ratio == pytest.approx(0.891, abs=1e-3)


def on_device(trace: DecodedTrace, slots: int, groups: GroupChunks):
    return Rows(trace, groups, trace.keys).on_device(slots)


def test_a_junction_makes_the_third_prompt_hit() -> None:
    trace, chunks = DecodedTrace.of(system_prompt(4)), bound(FULL, WINDOW)
    hits, junctions = on_device(trace, 100_000, chunks)
    assert hits.tolist() == [0, 0, 256, 256]
    assert junctions.tolist() == [0, 256, 0, 0]
    # Behind it, host memory is offered the resume point there.
    result = run(trace, "lru", 100_000, chunks, device=100_000)
    assert result.has_junctions
    assert result.log["junction"].tolist() == [0, 4096, 0, 0]
    assert result.log["device"].tolist() == [0, 0, 4096, 4096]


def test_the_accelerators_cache_forgets_the_least_recent() -> None:
    trace = DecodedTrace.of(system_prompt(3))
    chunks = bound(FULL)
    for none in on_device(trace, 0, chunks):
        assert none.tolist() == [0] * 3
    found = on_device(trace, 300, chunks).hits
    assert found.tolist() == on_device(trace, 300, GroupChunks.of_blocks()).hits.tolist()
    some = np.array((1, 2), dtype=np.uint32)
    rows = Rows(trace, chunks, trace.keys)
    for groups in chunks, GroupChunks.of_blocks():
        assert new_device(Rows(trace, groups, trace.keys), 300).find(some[:0], 0) == (0, 0)
    without = new_device(rows, 0)
    for _ in range(2):
        assert without.find(some, 33) == (0, 0)
        without.leave(some, 33, 0, 0)


@pytest.mark.parametrize("policy", registry.names())
def test_a_subclass_of_a_policy_is_served_as_the_policy(policy: str) -> None:
    chunks = bound(FULL, WINDOW, retention=512)
    plain = CPUOffloadingManager(16, 400, policy)
    same = type("Same", (type(plain.policy),), {})(400)
    servers = [GroupServer(chunks, plain), GroupServer(chunks, CPUOffloadingManager(16, 400, same))]
    for request in system_prompt(40):
        hashes = [b"%d" % block for block in request.hash_ids]
        found = []
        for server in servers:
            one = server.serve(hashes, 4480)
            one.complete()
            found.append((one.hit_tokens, one.offered, one.to_store, one.evicted, one.refused))
        assert found[0] == found[1]


def test_the_head_of_a_request_is_the_most_recent() -> None:
    chunks = bound(FULL, WINDOW)
    manager = CPUOffloadingManager(16, 8, "lru")
    server = GroupServer(chunks, manager)
    server.serve([b"a", b"b", b"c", b"d"], 65).complete()
    served = server.serve([b"x"], 17)  # one chunk of each group, and one slot is free
    assert served.evicted == [group_key(b"d", 1)]


def test_a_refused_call_is_refused_whole() -> None:
    server = GroupServer(bound(FULL, WINDOW), CPUOffloadingManager(16, 4, "lru"))
    served = server.serve([b"a", b"b", b"c"], 49)
    assert (served.refused, served.to_store) == (1, [])


def test_prompts_of_unknown_length_are_a_token_longer_than_their_blocks() -> None:
    prompt = tuple(range(8))
    requests = [Request(0, length, 0, prompt) for length in (0, 129, 0, 0, 129)]
    result = run(DecodedTrace.of(requests), "lru", 100, bound(FULL, WINDOW))
    assert (result.offloaded_tokens, result.hit_tokens) == (4 * 128, 4 * 128)
    assert (result.tokens, result.missed_tokens) == (5 * 129, 129 + 4)


@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_lengths_are_added_without_overflow(policy: str) -> None:
    trace = DecodedTrace.of(Request(0, 2**62, 0, (1, 2)) for _ in range(4))
    assert run(trace, policy, 10, bound(FULL, WINDOW)).tokens == 2**64


def test_full_groups_with_chunks_of_several_sizes_do_not_share_alike() -> None:
    """A prompt of 64 tokens takes four slots of one group and two of the other."""
    chunks = bound(FULL, Group("full", 12, 32))
    trace = DecodedTrace.of(Request(0, 64, 0, (1, 2, 3, 4)) for _ in range(5))
    hits = [run(trace, policy, 6, chunks).offloaded_tokens for policy in ("lru", "belady")]
    assert hits[0] == 4 * 64 <= hits[1]
    assert run(trace, "belady", 6, bound(FULL, FULL)).offloaded_tokens == 4 * 48  # 3 slots each


def test_a_ceiling_counts_the_slots_of_every_full_group() -> None:
    trace = DecodedTrace.of(Request(0, 64, 0, (1, 2, 3, 4)) for _ in range(5))
    for groups, slots in ((FULL,), 4), ((FULL, FULL), 8):
        assert run(trace, "belady", 100, bound(*groups)).stored == slots


def test_what_is_refused_or_not_admitted_is_counted() -> None:
    trace = DecodedTrace.of(system_prompt(6))
    chunks = bound(FULL, WINDOW)
    for policy in ("lru", "hit-density"):
        manager = CPUOffloadingManager(16, 300, policy)
        one = Configuration(policy=policy, host=300, groups=chunks)
        result = replay(trace, one, manager=manager)
        counts = run(trace, policy, 300, chunks)
        stats = manager.stats()
        assert counts.refused == result.refused == stats["refused_stores"]
        assert counts.not_admitted == result.not_admitted == stats["not_admitted"]
    assert result.not_admitted > 0
    tiny = run(trace, "lru", 4, chunks)
    assert (tiny.refused, tiny.stored) == (6, 0)


def test_without_a_full_group_belady_bounds_nothing() -> None:
    trace = DecodedTrace.of(system_prompt(2))
    with pytest.raises(ValueError, match="'belady' where no group is full"):
        run(trace, "belady", 10, bound(WINDOW))
