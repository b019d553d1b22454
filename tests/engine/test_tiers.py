"""A disk below the engine's host memory: filled, killed, started again, damaged, asked the same."""

from __future__ import annotations

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from tests.engine.runs import NUM_CHUNKS_ABOVE_DISK, NUM_SLOTS, NUM_TURNS_DISK

DISKS = ("disk", "disk after kill -9", "disk that is damaged")


@pytest.mark.engine_runs("none", *DISKS)
@pytest.mark.parametrize("name", DISKS)
def test_every_answer_is_that_of_an_engine_without_a_disk(runs, name):
    run = runs[name]
    expected = runs["none"].answers[:NUM_TURNS_DISK]
    assert [one.token_ids for one in run.answers] == [one.token_ids for one in expected]
    assert len(run.answers) == NUM_TURNS_DISK
    asked = sum(answer.prompt_tokens for answer in expected)
    metrics = run.metrics
    assert metrics.computed_tokens + metrics.loaded_tokens + metrics.device_tokens == asked


@pytest.mark.engine_runs("disk")
def test_what_leaves_host_memory_goes_to_the_disk(runs):
    run = runs["disk"]
    assert "kvoffload: tier 'disk' (KVOffloadFileTier) active" in run.log
    assert run.metrics.disk("blocks_total", op="put", status="ok") > NUM_CHUNKS_ABOVE_DISK
    assert run.metrics.disk("blocks_total", op="put", status="ok") < NUM_SLOTS


@pytest.mark.engine_runs("disk", "disk after kill -9")
def test_after_kill_9_the_same_prompts_hit_the_disk(runs):
    """The second engine hits what the first had to compute, and the disk had before it began."""
    first, second = runs["disk"].metrics, runs["disk after kill -9"].metrics
    assert second.disk("bytes_total", op="get") > 0
    assert second.computed_tokens < 0.5 * first.computed_tokens
    assert second.loaded_tokens > first.loaded_tokens
    assert second.disk("evicted_total", reason="corrupt") == 0


@pytest.mark.nightly
@pytest.mark.engine_runs("disk that is damaged")
def test_chunks_that_are_damaged_are_computed(runs):
    metrics = runs["disk that is damaged"].metrics
    assert metrics.disk("evicted_total", reason="corrupt") > 0
    assert metrics.disk("bytes_total", op="get") > 0
