"""Real engines of models with windows and with states: the rule makes their hits of a recording."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from kvoffload import CPUOffloadingManager
from kvoffload.replay import Configuration, DecodedTrace, Group, GroupChunks, GroupLayout, replay
from kvoffload.replay.serving import GroupServer, group_key
from kvoffload.traces import Request, Trace
from tests.engine.load import Client, plan
from tests.engine.metrics import Metrics
from tests.engine.model import STATE_HEAD_SIZE, STATE_HEADS, make_state_model, token_bytes
from tests.engine.runs import NO_DEVICE_CACHE, ORDERLY, OURS
from tests.engine.server import BLOCK_TOKENS, Answer, Server

NUM_TURNS = 70
WINDOW = 2 * BLOCK_TOKENS
STATE_BLOCK = 96  # tokens; of attention as large as a state
WINDOWS = GroupLayout(
    (Group("window", 1, BLOCK_TOKENS, WINDOW), Group("full", 1, BLOCK_TOKENS)),
    BLOCK_TOKENS * token_bytes(layers=1),
)
STATES = GroupLayout(
    (*[Group("state", 1, STATE_BLOCK)] * 3, Group("full", 1, STATE_BLOCK)),
    STATE_BLOCK * 2 * STATE_HEADS * STATE_HEAD_SIZE * 2,
)
#: Told, as what vLLM takes for a state depends on what its kernels for this CPU can.
STATE_TYPES = ("--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float32")
#: What the engine of the model of all tests takes it for.
OVERRIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


@dataclass(frozen=True)
class Setting:
    """A model with several groups, and an engine for it."""

    layout: GroupLayout
    num_slots: int  # chunks in host memory
    arguments: tuple[str, ...]  # for ``vllm serve``
    forgets: bool = False  # before each turn: without its cache the device keeps no state


SETTINGS = {
    "windows": Setting(WINDOWS, 180, (*NO_DEVICE_CACHE, "--hf-overrides", json.dumps(OVERRIDES))),
    "states": Setting(STATES, 80, STATE_TYPES, forgets=True),
}


@dataclass
class Served:
    """What an engine did."""

    setting: Setting
    answers: list[Answer]  # one for each turn
    metrics: Metrics  # at rest, after the last turn
    exported: Metrics  # when its watch had sent all
    trace: list[Request]  # its recording of the turns

    @property
    def chunks(self) -> GroupChunks:
        return GroupChunks.of(self.setting.layout, self.block_tokens)

    @property
    def block_tokens(self) -> int:
        return self.setting.layout.groups[0].block_tokens

    def new_manager(self) -> CPUOffloadingManager:
        return CPUOffloadingManager(self.block_tokens, self.setting.num_slots)


@pytest.fixture(
    scope="module", params=["windows", pytest.param("states", marks=pytest.mark.nightly)]
)
def served(request, runs, model, tmp_path_factory):  # the runs go on meanwhile
    setting = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "states":
        model = make_state_model(folder / "model")
    trace = folder / "requests.jsonl.gz"
    extra = {
        **OURS,
        "cpu_bytes_to_use": setting.num_slots * setting.layout.slot_bytes(),
        "kvoffload_record": str(trace),
        "kvoffload_watch": {"policies": [], "interval": 0.5},
    }
    with Server(model, folder, extra, arguments=(*ORDERLY, *setting.arguments)) as server:
        client = Client(server)
        answers = []
        for turn in plan(NUM_TURNS, num_conversations=12):
            if setting.forgets:
                server.forget_device()
            answers += client.one_by_one([turn])
        metrics = server.metrics()
        exported = server.exported()
        assert server.stop() == 0, server.log()[-4000:]
    return Served(setting, answers, metrics, exported, list(Trace(trace)))


def test_the_recording_tells_each_prompt_s_blocks_and_whether_it_goes_on_behind_them(served):
    size = served.block_tokens
    assert [(len(request.hash_ids), request.input_length) for request in served.trace] == [
        (blocks, blocks * size + (answer.prompt_tokens % size > 0))
        for answer in served.answers
        if (blocks := answer.prompt_tokens // size)
    ]


def test_the_recording_replays_by_the_rule_to_the_engine_s_own_hits(served):
    result = replay(
        served.trace, Configuration(host=served.setting.num_slots, groups=served.chunks)
    )
    assert result.offloaded_tokens == served.metrics.loaded_tokens
    assert result.offloaded_tokens == sum(answer.cached_tokens for answer in served.answers)
    assert result.stored == served.exported.value("vllm:kvoffload_stored_blocks_total")
    assert result.evicted == served.exported.value("vllm:kvoffload_evicted_blocks_total")
    assert result.offloaded_tokens > 20 * served.block_tokens
    assert result.evicted > served.setting.num_slots


def test_the_watch_counts_what_windows_and_states_kept_from_being_loaded(served):
    manager, size = served.new_manager(), served.block_tokens
    server, trace = GroupServer(served.chunks, manager), DecodedTrace.of(served.trace)
    keys = trace.keys()
    full = len(served.setting.layout.groups) - 1
    has_states = any(group.kind == "state" for group in served.setting.layout.groups)
    kept = hits = asked = 0
    for request, row in zip(served.trace, trace.rows(), strict=True):
        hashes = [keys[block] for block in row]
        # A token is left to compute, and with states the chunk that it is in.
        asks = (request.input_length - 1) // size if has_states else len(hashes)
        had = manager.lookup([group_key(block_hash, full) for block_hash in hashes[:asks]])
        one = server.serve(hashes, request.input_length)
        one.complete()
        asked += len(hashes)
        hits += one.hit_tokens // size
        kept += had * size - one.hit_tokens
    assert kept > 10 * size
    assert served.exported.value("vllm:kvoffload_tail_missed_tokens_total") == kept
    assert served.exported.value("vllm:kvoffload_asked_blocks_total") == asked
    assert served.exported.value("vllm:kvoffload_missed_blocks_total") == asked - hits
