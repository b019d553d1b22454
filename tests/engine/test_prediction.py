"""Predictions of advise, of replays and of a watch against an engine's hits, equal to the block.

The requests of the trace are those of `kvoffload workload`, the configuration is the one that
advise recommends, with a recording and a watch besides. What makes all equal: the device keeps
nothing, or the offload cache would be asked only for what the device has not; and a request comes
when the engine is at rest, because a replay ends each store at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from kvoffload.replay import Configuration, replay
from kvoffload.traces import Request, Trace, Workload, write_trace
from tests.engine.metrics import Metrics
from tests.engine.model import MAX_TOKENS, token_bytes
from tests.engine.predictions import kvoffload
from tests.engine.runs import CHUNK_BYTES, NO_DEVICE_CACHE, ORDERLY
from tests.engine.server import BLOCK_TOKENS, Server

NUM_REQUESTS = 300
CAPACITY = 60  # chunks; the trace has some 1,000
SMALLER = 512 // BLOCK_TOKENS  # how many times a generated request is longer than one of the trace
LONGEST_ANSWER = 20
AGAIN_EVERY = 9  # requests, of which one is made twice
SIZES = (0.5, 1, 2, 4)
WATCH = {
    "memory": list(SIZES),
    "policies": ["arc"],
    "max_rate": 1.0,
    "slots": CAPACITY * 4,
    "policy_slots": CAPACITY * 4,
    "window": 1e6,
    "interval": 0.5,
}
WATCHED = "vllm:kvoffload_"


def requests() -> list[Request]:
    """Return a generated workload with shorter blocks: what fits the model.

    No prompt ends with a block: the engine computes the last token of each prompt, and so all of
    the block that it ends, though it has it.
    """
    made: list[Request] = []
    for request in Workload(NUM_REQUESTS, seed=1):
        length = -(-request.input_length // SMALLER)
        length -= length % BLOCK_TOKENS == 0
        answer = min(max(1, request.output_length // SMALLER), LONGEST_ANSWER)
        if length + answer < MAX_TOKENS:
            made.append(replace(request, input_length=length, output_length=answer))
            if len(made) % AGAIN_EVERY == 0:
                made.append(made[-1])
    return made


@dataclass
class Measured:
    """The requests to an engine and their results."""

    trace: Path  # what the prompts were made of
    recording: Path
    advised: dict[str, Any]  # what the command prints as JSON
    cached_tokens: list[int]  # of each prompt, as the server says in its answer
    metrics: Metrics  # when all had been answered
    watched: Metrics  # when the watch had sent all
    cached_when_whole: int  # tokens of a prompt that ends with a block and had been asked before
    log: str


def cached_tokens(server: Server, prompt: str, answer_tokens: int) -> int:
    """Ask as `vllm bench serve` does, when the engine is at rest."""
    body = {"prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True, "temperature": 0}
    usage = server.post("/v1/completions", model=server.name, **body).json()["usage"]
    server.settle()
    assert usage["prompt_tokens"] == len(prompt.split())
    return usage["prompt_tokens_details"]["cached_tokens"]


def commanded(command: str, trace: Path, *options: object) -> Any:
    """Return what a command says of LRU with a trace."""
    return json.loads(kvoffload(command, trace, "--policy", "lru", *options, "--json"))


@pytest.fixture(scope="module")
def measured(runs, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Foretell, then measure; the runs of the other tests go on meanwhile."""
    folder = tmp_path_factory.mktemp("prediction")
    trace, prompts = folder / "trace.jsonl", folder / "prompts.jsonl"
    write_trace(requests(), trace)
    options = ("--capacity", CAPACITY, "--kv-bytes-per-token", token_bytes())
    advised = commanded("advise", trace, *options)
    kvoffload("workload", trace, "--output", prompts)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    whole = " ".join(rows[-1]["prompt"].split()[: 2 * BLOCK_TOKENS])
    recording = folder / "recording.jsonl.gz"
    extra = advised["configuration"]["vllm"]["kv_connector_extra_config"]
    extra = {**extra, "kvoffload_record": str(recording), "kvoffload_watch": WATCH}
    arguments, as_users = (*NO_DEVICE_CACHE, *ORDERLY), {"KVOFFLOAD_TEST_START": "spawn"}
    with Server(model, folder, extra, arguments=arguments, variables=as_users) as server:
        cached = [cached_tokens(server, row["prompt"], row["output_tokens"]) for row in rows]
        metrics, watched = server.metrics(), server.exported()
        cached_tokens(server, whole, 1)
        cached_when_whole = cached_tokens(server, whole, 1)
        assert server.stop() == 0, server.log()[-4000:]
        log = server.log()
    return Measured(trace, recording, advised, cached, metrics, watched, cached_when_whole, log)


def test_the_metrics_that_pages_name_are_counted(measured):
    """In docs/how-to/vllm.md, "See whether it pays", and in advise.md of the device's memory."""
    metrics = measured.metrics
    loaded = metrics.value("vllm:prompt_tokens_cached_by_source_total", source="host")
    assert loaded == metrics.loaded_tokens > 0
    computed = metrics.value("vllm:request_prefill_kv_computed_tokens_sum")
    assert computed == metrics.computed_tokens > 0
    assert metrics.value("vllm:request_prefill_time_seconds_sum") > 0
    assert metrics.value("vllm:kv_offload_load_time_total") > 0
    names = "vllm:cache_config_info"
    (labels,) = [dict(labels) for name, labels in metrics.samples if name == names]
    assert int(labels["block_size"]) == BLOCK_TOKENS
    assert int(labels["num_gpu_blocks"]) > 0


def test_the_engine_hits_and_stores_what_was_foretold_to_the_block(measured):
    """By a replay of the trace, one of the recording, and advise."""
    (result,) = commanded("replay", measured.trace, "--capacity", CAPACITY, "--full-blocks")[
        "results"
    ]
    assert result["requests"] == len(requests()) > 200
    assert result["evicted"] > 10 * CAPACITY
    assert result["hits"] > 5 * CAPACITY
    loaded, metrics = measured.metrics.loaded_tokens, measured.metrics
    assert loaded == result["hits"] * BLOCK_TOKENS == sum(measured.cached_tokens)
    stored = metrics.value("vllm:kv_offload_store_bytes_total")
    assert stored == result["stored"] * CHUNK_BYTES
    lengths = [request.input_length // BLOCK_TOKENS for request in requests()]
    asked = list(filter(None, lengths))  # a request without a full block is not recorded
    recorded = list(Trace(measured.recording))[: len(asked)]
    assert [len(request.hash_ids) for request in recorded] == asked
    again = replay(recorded, Configuration(policy="lru", host=CAPACITY))
    assert (again.hits, again.stored) == (result["hits"], result["stored"])
    (memory,) = [one for one in measured.advised["memories"] if one["capacity"] == CAPACITY]
    assert loaded == memory["policies"]["lru"]["saved_tokens"]
    assert metrics.computed_tokens + loaded == sum(one.input_length for one in requests())


def test_the_last_block_of_a_prompt_that_ends_with_it_is_computed(measured):
    """Why no prompt of the trace does: there a replay counts a hit that an engine has not."""
    assert measured.cached_when_whole == BLOCK_TOKENS


def test_the_exported_curve_is_that_of_a_sweep(measured):
    metrics = measured.watched
    capacities = ", ".join(str(int(size * CAPACITY)) for size in SIZES)
    options = ("--full-blocks", "--capacity", capacities, "--jobs", 1)
    swept = commanded("sweep", measured.trace, *options)["results"]
    exact = {cell["capacity"]: cell["hit_ratio"] for cell in swept}
    asked, missed = (metrics.value(f"{WATCHED}{name}_blocks_total") for name in ("asked", "missed"))
    assert asked == sum(request.input_length // BLOCK_TOKENS for request in requests())
    assert 1 - missed / asked == pytest.approx(exact[CAPACITY], abs=1e-9)
    for size in SIZES:
        labels, ratio = {"policy": "lru", "memory": f"{size:g}"}, exact[int(size * CAPACITY)]
        shadow, base = (
            metrics.value(f"{WATCHED}shadow_missed_blocks_total", **each)
            for each in (labels, labels | {"memory": "1"})
        )
        assert 1 - missed / asked * shadow / base == pytest.approx(ratio, abs=0.03)


def test_causes_stores_and_loads_are_those_of_the_engine(measured):
    metrics = measured.watched
    assert "no longer exported" not in measured.log
    stored = metrics.value(f"{WATCHED}stored_blocks_total")
    assert stored * CHUNK_BYTES == metrics.value("vllm:kv_offload_store_bytes_total")
    asked, missed = (metrics.value(f"{WATCHED}{name}_blocks_total") for name in ("asked", "missed"))
    assert (asked - missed) * CHUNK_BYTES == metrics.value("vllm:kv_offload_load_bytes_total")
    causes = {
        dict(labels)["cause"]: value
        for (name, labels), value in metrics.samples.items()
        if name == f"{WATCHED}sampled_missed_blocks_total"
    }
    assert sum(causes.values()) == missed
    assert causes["never_or_long_ago"] > 100
    assert causes["evicted"] > 100
    for kind in ("load", "store"):
        assert not metrics.value(f"{WATCHED}overdue_blocks", kind=kind)
