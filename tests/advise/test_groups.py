"""Advice on models with several KV groups: tokens and slots, and where to resume."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.advise import RecordedTrace, Setup, advise, details, model_shape
from kvoffload.advise.configuration import vllm_arguments
from kvoffload.advise.economy import balance, engine_of
from kvoffload.advise.remarks import group_remarks
from kvoffload.advise.retention import retentions, vllm_flag
from kvoffload.advise.wording import prompt_text
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    Group,
    GroupChunks,
    GroupLayout,
    Selection,
    replay,
)
from kvoffload.traces import Request, Trace, Workload

from .said import said

TRACE = Path(os.environ.get("KVOFFLOAD_TRACES") or os.devnull) / "mooncake_conversation.jsonl.gz"
MIB = 2**20
LAYOUT = GroupLayout((Group("full", 4, 16), Group("window", 4, 16, 128)), 4096)
CHUNKS = GroupChunks.of(LAYOUT, 512)  # a slot of 128 KiB
WORKLOAD = list(Workload(300, seed=3))


@pytest.fixture(scope="module")
def recorded():
    return RecordedTrace.of(WORKLOAD)


def test_a_small_trace_by_hand():
    """A window of 32 tokens over blocks of 16: two chunks before a resume point."""
    layout = GroupLayout((Group("full", 1, 16), Group("window", 1, 16, 32)), 4096)
    requests = [
        Request(0, 65, 1, (0, 1, 2, 3)),  # stores 4, and 2 of the window
        Request(1000, 97, 1, (0, 1, 2, 3, 4, 5)),  # hits 64, loads 4 + 2, stores 2 + 2
        Request(3000, 97, 1, (0, 1, 2, 3, 4, 5)),  # hits 96, loads 6 + 2
        Request(10_000, 81, 1, (0, 1, 7, 8, 9)),  # the window has nothing at 32: stores 3 + 2
    ]
    engine = engine_of(None, None, prefill_rate=100, link_bandwidth=2 * 4096)
    groups = GroupChunks.of(layout, 16)
    setup = Setup(64 * 4096, 16, 0, policies=("lru",), engine=engine, groups=groups)
    found = advise(requests, setup)
    cell = found.of("lru")
    assert (setup.capacity(setup.memory), found.vllm_default.asked_tokens) == (
        64,
        65 + 97 + 97 + 81,
    )
    assert (cell.offloaded_tokens, cell.loaded, cell.stored) == (64 + 96, 6 + 8, 6 + 4 + 5)
    assert found.stored_per_hit(cell) == 1.5  # of 10 blocks that are hit
    assert found.rates(cell)[:2] == (15 * 4096 / 10, 14 * 4096 / 10)
    costs = balance(setup, cell, engine)
    assert (costs.prefill_seconds, costs.load_seconds, costs.store_seconds) == (1.6, 7, 7.5)


def prompts_that_a_cache_without_bounds_resumes_earlier():
    """What hits 96 tokens ends its steps at 160 and 192; what hits nothing at 64, 128 and 192."""
    first = tuple(range(6))
    longer = (*first, *range(10, 16))
    yield Request(0, 97, 1, first)
    yield Request(1000, 385, 1, tuple(range(100, 124)))  # the first one leaves for it
    yield Request(2000, 193, 1, longer)
    for n in range(10):
        yield Request(3000 + n, 145, 1, (*longer[:8], 1000 + n))


def test_a_cache_without_bounds_may_be_no_ceiling_of_states():
    layout = GroupLayout((Group("full", 1, 16), Group("state", 1, 16)), 4096)
    groups = GroupChunks.of(layout, 16, None, step_tokens=64)
    setup = Setup(30 * 4096, 16, 0, policies=("lru",), others=(60 * 4096,), groups=groups)
    found = advise(prompts_that_a_cache_without_bounds_resumes_earlier(), setup)
    assert found.of("lru").offloaded_tokens == 10 * 128
    assert found.of("lru", 60 * 4096).offloaded_tokens == 11 * 96
    assert found.unbounded * found.vllm_default.asked_tokens == pytest.approx(11 * 96)
    assert not found.unbounded_is_ceiling
    assert found.ceilings[setup.memory] >= found.of("lru").hit_ratio > found.unbounded
    # with a recommendation
    texts = said(replace(found, objections=[]))
    assert "which limits no policy" in texts["Ceiling"]
    assert "more memory" not in texts["Ceiling"]
    assert texts["More memory"].startswith("Doubling it to 240 KiB would lose ")
    larger = Setup(60 * 4096, 16, 0, policies=("lru",), others=(30 * 4096,), groups=groups)
    found = advise(prompts_that_a_cache_without_bounds_resumes_earlier(), larger)
    texts = said(replace(found, objections=[]))
    assert texts["More memory"].startswith("With 120 KiB it would hit ")


def test_without_a_full_group_the_ceiling_is_not_known():
    layout = GroupLayout((Group("window", 4, 16, 1024),), 4096)
    setup = Setup(25 * MIB, 512, 0, groups=GroupChunks.of(layout, 512))
    found = advise(WORKLOAD, setup)
    assert [*found.ceilings.values()] == [None] * 4
    assert found.ceiling_tokens()[0] is None
    texts = said(found)
    assert "is unknown, because no group is full" in texts["Ceiling"]


@pytest.mark.thorough
@pytest.mark.parametrize("interval", [0, 512])
def test_no_policy_behind_an_accelerator_exceeds_the_ceilings(recorded, interval):
    groups = GroupChunks.of(LAYOUT, 512, interval)
    found = advise(recorded, Setup(25 * MIB, 512, 0, device_memory=12 * MIB, groups=groups))
    for memory, ceiling in found.ceilings.items():
        for policy in found.setup.policies:
            assert found.of(policy, memory).hit_ratio <= ceiling


@pytest.mark.thorough
def test_intervals_are_compared_in_any_number_of_processes(recorded):
    """Those of the advice itself are not replayed again."""
    groups = [GroupChunks.of(LAYOUT, 512, interval) for interval in (0, 512)]
    several = [
        Setup(25 * MIB, 512, 0, device_memory=12 * MIB, policies=("lru",), groups=each)
        for each in groups
    ]
    reported: list[int] = []
    advised = [advise(recorded, setup) for setup in several]
    first = retentions(recorded, advised[0], progress=reported.append)
    assert reported == [2, 3]
    assert [cell.interval for cell in first] == [0, 512, None]
    assert retentions(recorded, advised[1]) == first
    given = advise(recorded, replace(several[0], groups=GroupChunks.of(LAYOUT, 512, 2048)))
    cells = retentions(recorded, given)
    assert [cell.interval for cell in cells] == [0, 512, None, 2048]
    assert cells[3].hit_ratio == given.result.hit_ratio
    assert vllm_flag(None) == "--prefix-cache-retention-interval None"  # as vLLM reads it
    assert retentions(recorded, advised[0], jobs=2) == first


def test_where_nothing_is_windowed_no_interval_is_compared(recorded):
    layout = GroupLayout((Group("full", 4, 16), Group("chunked", 4, 16, 8192)), 4096)
    setup = Setup(25 * MIB, 512, 0, groups=GroupChunks.of(layout, 512))
    assert retentions(recorded, advise(recorded, setup)) == []


@pytest.mark.parametrize(
    ("groups", "interval", "text"),
    [
        (("full", "window"), 0, "16, and 1 for its window"),
        (("full", "window"), 2048, "16, and 5 for its window"),
        (("full", "window"), None, "16, and 16 for its window"),
        (("full", "state", "state", "state"), 0, "16, and 3 for its states"),
        (("full", "full", "window", "state"), 0, "32, and 1 for its window, and 1 for its state"),
        (("window", "window"), 0, "2 for its windows"),
    ],
)
def test_it_tells_what_a_prompt_takes(groups, interval, text):
    tokens = 512 if "state" in groups else 16
    layout = GroupLayout(
        tuple(Group(kind, 4, tokens, 128 * (kind == "window")) for kind in groups), 4096
    )
    whole = prompt_text(GroupChunks.of(layout, 512, interval))
    assert whole == f"a prompt of 8,192 tokens takes {text}"


@pytest.mark.parametrize(
    ("groups", "slots", "what"),
    [
        (((16, "full"), (16, "window")), 1, "the full groups"),
        (((16, "full"), (16, "full")), 2, "the full groups"),
        (((16, "full"), (32, "full"), (16, "window")), 1.5, "the full groups"),
        (((16, "window"), (32, "window")), 1, "one group"),
    ],
)
def test_reuse_is_of_the_slots_that_a_block_takes(groups, slots, what):
    layout = GroupLayout(
        tuple(Group(kind, 1, tokens, 64 * (kind == "window")) for tokens, kind in groups), 4096
    )
    recorded = RecordedTrace.of(
        Request(n, 33, 1, prompt) for n, prompt in enumerate([(1, 2), (3, 4), (1, 2)])
    )
    advice = advise(
        recorded, Setup(8 * 4096, 16, 0, policies=("lru",), groups=GroupChunks.of(layout, 16))
    )
    found = details(recorded, advice)
    assert found.reuse.bytes_at[50] == 3 * slots * 4096
    text = said(replace(advice, objections=[]), details=found)["Reuse"]
    assert text.endswith(f"LRU needs that much memory for their chunks of {what}.")


@pytest.mark.parametrize(("block", "chunk"), [(16, 32), (544, 1), (4096, 1)])
def test_the_configuration_has_the_chunk_that_slots_are_counted_for(block, chunk):
    layout = GroupLayout((Group("full", 1, block), Group("window", 1, block, 128)), 4096)
    extra = vllm_arguments("lru", 2**30, GroupChunks.of(layout, 512))["kv_connector_extra_config"]
    assert extra["blocks_per_chunk"] == chunk
    assert "block_size" not in extra


def test_it_says_what_chunks_stand_for_and_which_windows_lose():
    def remarks(window, block, block_tokens):
        layout = GroupLayout((Group("full", 4, block), Group("window", 4, block, window)), 4096)
        return group_remarks(GroupChunks.of(layout, block_tokens))

    assert remarks(128, 16, 512) == []
    assert remarks(48, 16, 16) == remarks(50, 16, 16) == []
    (lost,) = remarks(49, 16, 16)
    assert lost.startswith(
        "A window of 49 tokens is one more than 3 × 16: vLLM stores a chunk less"
    )
    (stands,) = remarks(128, 544, 512)
    assert stands.endswith("chunks of 512 tokens stand for vLLM's of 544.")


@pytest.mark.skipif(not TRACE.exists(), reason=f"no {TRACE.name} where KVOFFLOAD_TRACES points")
@pytest.mark.parametrize(("interval", "expected"), [(0, 0.110), (None, 0.060)])
def test_a_public_trace_with_gpt_oss(interval, expected):
    """64 GiB, its first 1,500 requests, nothing on the accelerator."""
    groups = GroupChunks.of(model_shape("gpt-oss-20b").layout(), 512, interval)
    requests = itertools.islice(Trace(TRACE), 1500)
    trace = DecodedTrace.of(Selection(requests, full_block_tokens=512))
    setup = Setup(2**36, 512, 0, groups=groups)
    assert setup.capacity(setup.memory) == 5461
    found = replay(trace, Configuration(host=5461, groups=groups))
    assert found.hit_ratio == pytest.approx(expected, abs=0.0005)
