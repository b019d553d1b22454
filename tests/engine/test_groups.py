"""A real engine of a model with windows: what it hits is what the rule makes of its recording."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from kvoffload import CPUOffloadingManager
from kvoffload.replay import Group, GroupChunks, GroupLayout, replay_groups
from kvoffload.replay.group_replay import GroupServer
from kvoffload.replay.timed import BlockKeys
from kvoffload.traces import Trace
from tests.engine.load import Client, plan
from tests.engine.metrics import Metrics
from tests.engine.model import LAYERS, token_bytes
from tests.engine.runs import NO_DEVICE_CACHE, ORDERLY, OURS
from tests.engine.server import BLOCK_TOKENS, Answer, Server

WINDOW = 2 * BLOCK_TOKENS
KINDS = ["sliding_attention", "full_attention"]
LAYOUT = GroupLayout(
    (Group("window", 1, BLOCK_TOKENS, WINDOW), Group("full", 1, BLOCK_TOKENS)),
    BLOCK_TOKENS * token_bytes(layers=1),
)
FULL = 1
CHUNKS = GroupChunks.of(LAYOUT, BLOCK_TOKENS)
NUM_TURNS = 90
NUM_SLOTS = 250


@dataclass
class Served:
    """What an engine with windows did.

    Attributes
    ----------
    answers : list of Answer
        One for each turn.
    metrics : Metrics
        At rest, after the last turn.
    exported : Metrics
        When its watch had sent all.
    trace : list of Request
        Its recording of the turns.
    """

    answers: list[Answer]
    metrics: Metrics
    exported: Metrics
    trace: list = field(default_factory=list)


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """Ask an engine that takes the model of all tests for one whose first layer has a window."""
    assert len(KINDS) == LAYERS
    folder = tmp_path_factory.mktemp("groups")
    trace = folder / "requests.jsonl.gz"
    extra = {
        **OURS,
        "cpu_bytes_to_use": NUM_SLOTS * LAYOUT.slot_bytes(),
        "kvoffload_record": str(trace),
        "kvoffload_watch": {"policies": [], "interval": 0.5},
    }
    windows = json.dumps({"layer_types": KINDS, "sliding_window": WINDOW})
    arguments = (*NO_DEVICE_CACHE, *ORDERLY, "--hf-overrides", windows)
    with Server(model, folder, extra, arguments=arguments) as server:
        answers = Client(server).one_by_one(plan(NUM_TURNS, num_conversations=12))
        metrics = server.metrics()
        exported = server.exported()
        assert server.stop() == 0, server.log()[-4000:]
    return Served(answers, metrics, exported, list(Trace(trace))[:NUM_TURNS])


def test_the_recording_tells_each_prompt_s_blocks_and_whether_it_goes_on_behind_them(served):
    assert [(len(request.hash_ids), request.input_length) for request in served.trace] == [
        (blocks, blocks * BLOCK_TOKENS + (answer.prompt_tokens % BLOCK_TOKENS > 0))
        for answer in served.answers
        if (blocks := answer.prompt_tokens // BLOCK_TOKENS)
    ]


def test_the_recording_replays_by_the_rule_to_the_engine_s_own_hits(served):
    result = replay_groups(served.trace, CPUOffloadingManager(BLOCK_TOKENS, NUM_SLOTS), CHUNKS)
    assert result.requests == NUM_TURNS
    assert result.hits == served.metrics.loaded_tokens
    assert result.hits == sum(answer.cached_tokens for answer in served.answers)
    stored_bytes = served.metrics.value("vllm:kv_offload_store_bytes_total")
    assert result.stored * LAYOUT.slot_bytes() == stored_bytes
    assert result.hits > NUM_TURNS * BLOCK_TOKENS
    assert result.evicted > NUM_SLOTS


def test_the_watch_counts_what_the_window_kept_from_being_loaded(served):
    manager = CPUOffloadingManager(BLOCK_TOKENS, NUM_SLOTS)
    server, keys = GroupServer(CHUNKS, manager), BlockKeys()
    kept = hits = asked = 0
    for request in served.trace:
        hashes = keys.of(request)
        had = manager.lookup([key + FULL.to_bytes(4, "big") for key in hashes])
        one = server.serve(hashes, request.input_length)
        server.complete(one)
        asked += len(hashes)
        hits += one.hits // BLOCK_TOKENS
        kept += had * BLOCK_TOKENS - one.hits
    assert kept > 10 * BLOCK_TOKENS
    assert served.exported.value("vllm:kvoffload_tail_missed_tokens_total") == kept
    assert served.exported.value("vllm:kvoffload_asked_blocks_total") == asked
    assert served.exported.value("vllm:kvoffload_missed_blocks_total") == asked - hits
