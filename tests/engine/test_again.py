"""A second engine in the process of the first, as in a notebook or where a program restarts one."""

from __future__ import annotations

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from tests.engine.metrics import TIER
from tests.engine.offline import run_offline
from tests.engine.runs import CHUNK_BYTES, NUM_CHUNKS_ABOVE_DISK, NUM_SLOTS, file_tier, tiering


@pytest.mark.nightly
def test_a_second_engine_starts_and_finds_the_first_one_s_disk(model, tmp_path):
    """With every metric that the configuration can turn on: vLLM declares them a second time."""
    tier = file_tier(tmp_path / "disk", NUM_SLOTS * CHUNK_BYTES)
    extra = tiering(NUM_CHUNKS_ABOVE_DISK * CHUNK_BYTES, tier) | {"kvoffload_watch": True}
    outcome = run_offline(model, tmp_path, extra, batches=1, engines=2)
    first, second = outcome.metrics
    assert outcome.answers[0] == outcome.answers[1]
    assert first[f"{TIER}blocks"] > 0  # stored
    assert second[f"{TIER}hits"] > 0
    assert second[f"{TIER}bytes"] > 0
    assert first.keys() >= {f"{TIER}capacity_bytes", "vllm:kvoffload_watch_info"}
