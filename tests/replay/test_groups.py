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


WIDE = Group("window", 12, 32, 100)


@pytest.mark.parametrize(
    ("groups", "block_tokens", "per_chunk", "chunks", "engine_chunks", "align"),
    [
        ((FULL, WINDOW), 64, 4, (64, 64), (64, 64), 64),
        ((FULL, WIDE), 16, 1, (16, 32), (16, 32), 16),
        ((FULL, Group("full", 12, 32), WINDOW), 16, 1, (16, 32, 16), (16, 32, 16), None),
        # blocks that are no chunks stand for those of the engine
        ((Group("full", 12, 544), Group("state", 36, 544)), 512, 1, (512,) * 2, (544,) * 2, 512),
        ((Group("full", 12, 544), Group("state", 36, 544)), 16, 1, (544,) * 2, (544,) * 2, 544),
        (
            (Group("full", 12, 544), Group("state", 36, 544)),
            4096,
            8,
            (4096,) * 2,
            (4352,) * 2,
            4096,
        ),
        ((FULL, WINDOW), 512, 32, (512, 512), (512, 512), 512),
        ((FULL, WINDOW), 2**24, 2**20, (2**24,) * 2, (2**24,) * 2, 2**24),
    ],
)
def test_chunks_are_blocks_of_the_trace_or_stand_for_those_of_the_engine(
    groups, block_tokens, per_chunk, chunks, engine_chunks, align
) -> None:
    found = bound(*groups, block_tokens=block_tokens)
    assert (found.blocks_per_chunk, found.chunk_tokens, found.align) == (per_chunk, chunks, align)
    assert (found.engine_chunk_tokens, found.is_exact) == (engine_chunks, chunks == engine_chunks)
    assert found.slot_bytes == per_chunk * 393216


@pytest.mark.parametrize(
    ("groups", "block_tokens", "retention", "message"),
    [
        ((FULL, WINDOW), 16, 24, "retention must be .* multiple of 16, got"),
        ((FULL, WINDOW), 64, 96, "retention must be .* multiple of 64, got"),
        ((FULL, WIDE), 16, 48, "retention must be .* multiple of 32, got"),
        ((FULL, STATE), 64, -64, "retention must be .* multiple of 64, got"),
        ((FULL, CHUNKED), 16, 64, ".* no group is a window or a state, got 64"),
        # a few bytes of a configuration do not ask for a range of 2**40 chunks
        ((FULL, WINDOW), 2**24 + 1, 0, f"block_tokens must be <= 16777216, got {2**24 + 1}"),
        ((FULL, WINDOW), 0, 0, "block_tokens must be >= 1, got 0"),
        (
            (FULL, Group("window", 12, 2**20, 100)),
            4096,
            0,
            f"block_tokens must give chunks of at most 16777216 tokens, got 4096, .* {2**28}",
        ),
    ],
)
def test_what_an_engine_refuses_is_named(groups, block_tokens, retention, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        bound(*groups, block_tokens=block_tokens, retention=retention)


def test_the_length_of_a_prompt() -> None:
    chunks = bound(FULL)
    assert chunks.length_of(30, 2) == 30
    assert [chunks.length_of(0, n) for n in (0, 2)] == [0, 33]  # not known, with blocks
    assert chunks.length_of(100, 2) == 47  # what is cut off is not there
    by_token = bound(CHUNKED, block_tokens=1)
    assert by_token.length_of(0, 15) == 15  # one more would end a chunk
    assert by_token.local(0, lambda chunk: chunk.chunk < 0) == (0, 0)


ONE_MORE = bound(FULL, Group("window", 12, 16, 49))  # than whole chunks, of which one is not stored
EIGHT, LAST_THREE = list(range(8)), [4, 5, 6]


@pytest.mark.parametrize(
    ("chunks", "served", "offered"),
    [
        (bound(FULL, WINDOW), (128, 0, 0), [(EIGHT, LAST_THREE)]),  # before 112: 47 tokens
        (bound(FULL, WINDOW), (128, 0, 0, 48), [(EIGHT, [0, 1, 2, *LAST_THREE])]),  # a junction
        (bound(FULL, WINDOW, retention=64), (130, 0, 0), [(EIGHT, [1, 2, 3, 5, 6, 7])]),
        (bound(FULL, WINDOW, retention=None), (130, 0, 0), [(EIGHT, EIGHT)]),
        # 48 tokens before 256 lie in the chunk from 192 on, which is stored whole
        (bound(FULL, WINDOW, block_tokens=64), (300, 0, 0), [([0, 1, 2, 3], [3])]),
        (
            bound(FULL, Group("full", 12, 32), WINDOW),
            (128, 0, 0),
            [(EIGHT, [0, 1, 2, 3], EIGHT)],
        ),
        (bound(FULL, WINDOW), (128, 0, 64), [([4, 5, 6, 7], LAST_THREE)]),  # after a load
        (bound(FULL, WINDOW), (128, 64, 0), [(EIGHT, LAST_THREE)]),  # the accelerator has four
        (bound(FULL, WINDOW, retention=None), (128, 96, 0), [(EIGHT, [3, 4, 5, 6, 7])]),
        (bound(FULL, STATE), (40, 0, 0), [([], [1]), ([0, 1], [])]),  # step by step
        (
            bound(FULL, STATE, retention=None),
            (48, 0, 0),
            [([], [1]), ([0, 1], []), ([], [2]), ([2], [])],
        ),
        (ONE_MORE, (129, 0, 0), [(EIGHT, [5, 6, 7])]),
        (bound(Group("chunked", 1, 1, 4), block_tokens=1), (0, 0, 0), []),
    ],
)  # fmt: skip
def test_what_is_offered(chunks, served, offered) -> None:
    groups = range(len(chunks.chunk_tokens))
    calls = chunks.offers(*served)
    assert [tuple(of_group(call, group) for group in groups) for call in calls] == offered


def test_steps_end_where_their_tokens_do() -> None:
    layout = GroupLayout((FULL, STATE), 4096)
    chunks = GroupChunks.of(layout, 16, None, step_tokens=40)
    states = [call[0].chunk for call in chunks.offers(100, 0, 0) if call[0].group == 1]
    assert states == [1, 3, 5]  # 32, 64 and 96 tokens
    calls = bound(FULL, STATE, retention=None).offers(10_000, 0, 0)  # 8,192 a step
    assert [call[0].chunk for call in calls if call[0].group == 1] == [511, 623, 624]


WINDOWS = bound(FULL, Group("window", 12, 16, 64), WINDOW)


@pytest.mark.parametrize(
    ("chunks", "length", "local", "present", "hit"),
    [
        (bound(FULL, FULL), 128, 0, [range(5), range(3)], 48),
        (bound(FULL, FULL), 128, 0, [range(8), range(8)], 128),
        (bound(FULL, FULL), 128, 32, [range(2, 5), range(2, 5)], 48),
        (bound(FULL), 15, 0, [[]], 0),  # shorter than a chunk: the prompt,
        (bound(FULL), 40, 24, [range(2)], 0),  # what is after the accelerator's,
        (bound(FULL), 64, 8, [range(1)], 0),  # what is there
        (bound(FULL, WINDOW), 128, 0, [range(8), range(3, 7)], 112),
        (bound(FULL, WINDOW), 129, 0, [range(8), range(3, 7)], 112),  # nothing before 128
        (bound(FULL, WINDOW), 128, 0, [range(8), range(2)], 32),  # it reaches the beginning
        (ONE_MORE, 129, 0, [range(8), range(5, 8)], 0),
        (ONE_MORE, 129, 0, [range(8), range(4, 8)], 128),
        (bound(FULL, STATE), 128, 0, [range(8), range(4, 5)], 80),
        (bound(FULL, STATE), 128, 0, [range(4), range(4, 5)], 0),
        # what a later group lowers is asked again: at 64 the wider window has nothing
        (WINDOWS, 129, 0, [range(8), range(4, 8), range(1, 4)], 0),
        (WINDOWS, 129, 0, [range(8), range(8), range(1, 4)], 64),
    ],
)
def test_what_is_hit(chunks, length, local, present, hit) -> None:
    assert chunks.hit(length, local, Has(*enumerate(present))) == hit


@pytest.mark.parametrize(
    ("window", "there", "found"), [(48, [0, 1], (32, 64)), (1, [2], (48, 64)), (1, [], (0, 64))]
)
def test_what_the_accelerator_has(window, there, found) -> None:
    """A window that reaches the beginning is long enough; one of a token asks for its own chunk."""
    present = {(0, chunk) for chunk in range(4)} | {(1, chunk) for chunk in there}
    chunks = bound(FULL, Group("window", 12, 16, window))
    assert chunks.local(65, lambda index: index in present) == found
    left = bound(FULL, Group("full", 12, 32)).left_on_device(64)
    assert left == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]


def test_what_is_loaded() -> None:
    chunks = bound(FULL, WINDOW, STATE, CHUNKED)
    loaded = chunks.loaded(0, 112)
    # of the window from token 65 on, of the last group from token 64 on
    assert [of_group(loaded, group) for group in range(4)] == [
        list(range(7)),
        [4, 5, 6],
        [6],
        [4, 5, 6],
    ]
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


def test_every_chunk_is_used_where_a_prompt_repeats_one() -> None:
    manager = CPUOffloadingManager(1, 4, "lru")
    server = GroupServer(GroupChunks.of_blocks(1, step_tokens=4), manager)
    for prompt in ([b"a", b"b"], [b"x"], [b"a", b"a", b"b"]):
        server.serve(prompt, len(prompt)).complete()
    assert [*manager.policy.blocks] == [b"x", b"b", b"a"]
    manager = CPUOffloadingManager(1, 4, "slru")
    server = GroupServer(GroupChunks.of_blocks(1, step_tokens=4), manager)
    for prompt in ([b"a"], [b"a"], [b"a", b"b", b"a"]):  # the last use of a is one of its prefix
        server.serve(prompt, len(prompt)).complete()
    assert [*manager.policy.protected] == [b"b", b"a"]


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
