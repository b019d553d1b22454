"""Predictions of advise and of a replay against the engine's hits, equal to the block.

The requests of the trace are those of `kvoffload workload`, the configuration is the one that
advise recommends. What makes both equal: the device keeps nothing, or the offload cache would be
asked only for what the device has not; and a request comes when the engine is at rest, because a
replay ends each store at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from kvoffload.traces import Request, Workload, write_trace
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

    trace: list[Request]  # what the prompts were made of
    replayed: dict[str, Any]  # what the commands print as JSON
    advised: dict[str, Any]
    cached_tokens: list[int]  # of each prompt, as the server says in its answer
    metrics: Metrics  # when all had been answered
    cached_when_whole: int  # tokens of a prompt that ends with a block and had been asked before


@contextmanager
def configured(model: Path, folder: Path, advised: dict[str, Any]) -> Iterator[Server]:
    """Start an engine with the configuration that advise gave."""
    extra = advised["configuration"]["vllm"]["kv_connector_extra_config"]
    with Server(model, folder, extra, arguments=(*NO_DEVICE_CACHE, *ORDERLY)) as server:
        yield server
        assert server.stop() == 0


def cached_tokens(server: Server, prompt: str, answer_tokens: int) -> int:
    """Ask as `vllm bench serve` does, when the engine is at rest."""
    body = {"prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True, "temperature": 0}
    usage = server.post("/v1/completions", model=server.name, **body).json()["usage"]
    server.settle()
    assert usage["prompt_tokens"] == len(prompt.split())
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def measured(runs, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Foretell, then measure; the runs of the other tests go on meanwhile."""
    folder = tmp_path_factory.mktemp("prediction")
    trace, prompts = folder / "trace.jsonl", folder / "prompts.jsonl"
    write_trace(requests(), trace)
    capacity = ("--policy", "lru", "--capacity", CAPACITY)
    replayed = json.loads(kvoffload("replay", trace, *capacity, "--full-blocks", "--json"))
    advised = json.loads(
        kvoffload("advise", trace, *capacity, "--kv-bytes-per-token", token_bytes(), "--json")
    )
    kvoffload("workload", trace, "--output", prompts)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    with configured(model, folder, advised) as server:
        cached = [cached_tokens(server, row["prompt"], row["output_tokens"]) for row in rows]
        metrics = server.metrics()
        whole = " ".join(rows[-1]["prompt"].split()[: 2 * BLOCK_TOKENS])
        cached_tokens(server, whole, 1)
        return Measured(
            requests(), replayed, advised, cached, metrics, cached_tokens(server, whole, 1)
        )


def test_the_trace_has_what_a_prediction_could_get_wrong(measured):
    (result,) = measured.replayed["results"]
    assert result["requests"] == len(measured.trace) > 200
    assert len(set(measured.trace)) < len(measured.trace)
    assert result["evicted"] > 10 * CAPACITY
    assert result["hits"] > 5 * CAPACITY


def test_the_metrics_of_time_that_the_page_names_are_counted(measured):
    """In docs/how-to/vllm.md, "See whether it pays"."""
    metrics = measured.metrics
    loaded = metrics.value("vllm:prompt_tokens_cached_by_source_total", source="host")
    assert loaded == metrics.loaded_tokens > 0
    computed = metrics.value("vllm:request_prefill_kv_computed_tokens_sum")
    assert computed == metrics.computed_tokens > 0
    assert metrics.value("vllm:request_prefill_time_seconds_sum") > 0
    assert metrics.value("vllm:kv_offload_load_time_total") > 0


def test_the_size_of_the_accelerator_s_cache_is_a_metric(measured):
    """In docs/how-to/advise.md, "Behind the accelerator's own cache"."""
    (labels,) = [
        dict(labels)
        for name, labels in measured.metrics.samples
        if name == "vllm:cache_config_info"
    ]
    assert int(labels["block_size"]) == BLOCK_TOKENS
    assert int(labels["num_gpu_blocks"]) > 0


def test_the_engine_hits_and_stores_what_the_replay_foretold_to_the_block(measured):
    (result,) = measured.replayed["results"]
    assert measured.metrics.loaded_tokens == result["hits"] * BLOCK_TOKENS
    stored = measured.metrics.value("vllm:kv_offload_store_bytes_total")
    assert stored == result["stored"] * CHUNK_BYTES
    assert sum(measured.cached_tokens) == measured.metrics.loaded_tokens


def test_it_saves_the_tokens_that_advise_said(measured):
    (memory,) = [one for one in measured.advised["memories"] if one["capacity"] == CAPACITY]
    assert measured.metrics.loaded_tokens == memory["policies"]["lru"]["saved_tokens"]
    prompts = sum(request.input_length for request in measured.trace)
    assert measured.metrics.computed_tokens == prompts - measured.metrics.loaded_tokens


def test_the_last_block_of_a_prompt_that_ends_with_it_is_computed(measured):
    """Why no prompt of the trace does: there a replay counts a hit that an engine has not."""
    assert measured.cached_when_whole == BLOCK_TOKENS
