"""The engine's own recording after each way to stop, and the hits predicted from it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from kvoffload.traces import Trace
from tests.engine.metrics import TIER
from tests.engine.offline import run_offline
from tests.engine.predictions import kvoffload
from tests.engine.runs import CHUNK_BYTES, NUM_CHUNKS, NUM_CHUNKS_ABOVE_DISK, file_tier, tiering
from tests.engine.server import BLOCK_TOKENS, DEVICE_BLOCKS


def recorded_blocks(path):
    return [len(request.hash_ids) for request in Trace(path)]


@pytest.mark.engine_runs("lru")
@pytest.mark.every_release
def test_a_server_that_was_stopped_by_default_left_every_request(runs):
    """vLLM kills its engine core then; a moment after the last request all are on the disk."""
    run = runs["lru"]
    assert "force killing remaining process" in run.log
    assert run.report is None
    blocks = [answer.prompt_tokens // BLOCK_TOKENS for answer in run.answers]
    assert recorded_blocks(run.trace) == blocks


@pytest.mark.engine_runs("lru")
def test_advise_reads_it_and_foretells_what_was_saved(runs):
    """With the device's cache in front, which is not quite the LRU that advise takes it for."""
    said = kvoffload(
        *("advise", runs["lru"].trace, "--capacity", f"{NUM_CHUNKS * CHUNK_BYTES}B"),
        *("--device-memory", f"{DEVICE_BLOCKS * CHUNK_BYTES}B"),
        *("--kv-bytes-per-token", CHUNK_BYTES // BLOCK_TOKENS, "--json"),
    )
    advice = json.loads(said)
    (memory,) = [one for one in advice["memories"] if one["capacity"] == NUM_CHUNKS]
    saved = memory["policies"]["lru"]["saved_tokens"]
    assert saved == pytest.approx(runs["lru"].metrics.loaded_tokens, rel=0.05)
    assert advice["recommendation"] in memory["policies"]


@pytest.mark.nightly
def test_a_second_engine_of_a_program_finds_the_first_one_s_disk_and_leaves_its_last_batch(
    model, tmp_path
):
    """With every metric that the configuration can turn on: vLLM declares them a second time.

    `vllm.LLM` makes no step after the last batch, so that nothing ever says that it has finished.
    """
    trace, tier = tmp_path / "requests.jsonl.gz", file_tier(tmp_path / "disk", 2**30)
    extra = tiering(NUM_CHUNKS_ABOVE_DISK * CHUNK_BYTES, tier)
    extra |= {"kvoffload_watch": True, "kvoffload_record": str(trace)}
    outcome = run_offline(model, tmp_path, extra)
    first, second = outcome.metrics
    assert outcome.answers[0] == outcome.answers[1]
    assert first[f"{TIER}blocks"] > 0  # stored
    assert second[f"{TIER}hits"] > 0
    assert second[f"{TIER}bytes"] > 0
    assert first.keys() >= {f"{TIER}capacity_bytes", "vllm:kvoffload_watch_info"}
    blocks = [length // BLOCK_TOKENS for length in outcome.lengths]
    assert sorted(recorded_blocks(trace)) == sorted(blocks)
