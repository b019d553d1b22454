"""A disk below the engine's host memory: filled, killed, started again, damaged, asked the same."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from tests.engine.load import Client, plan
from tests.engine.runs import CHUNK_BYTES, PACKAGE
from tests.engine.server import Server

NUM_TURNS = 60
NUM_CHUNKS = 40  # in host memory: some 1,280 tokens
NUM_SLOTS = 4000  # on the disk: all that is asked
DAMAGED_EVERY = 7  # chunks


def tiers(folder: Path) -> dict:
    return {
        "spec_name": "KVOffloadTieringSpec",
        "spec_module_path": PACKAGE,
        "cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES,
        "secondary_tiers": [
            {
                "type": "KVOffloadFileTier",
                "module_path": PACKAGE,
                "path": str(folder),
                "capacity_bytes": NUM_SLOTS * CHUNK_BYTES,
            }
        ],
    }


def ask(model: Path, folder: Path, extra: dict | None):
    """Ask everything of a new server, then kill it with SIGKILL; return tokens and metrics."""
    with Server(model, folder, extra) as server:
        answers = Client(server).one_by_one(plan(NUM_TURNS))
        server.settle()
        metrics = server.metrics()
        log = server.log()
    return [answer.token_ids for answer in answers], metrics, log


def tier_value(metrics, name: str, **labels: str) -> float:
    return metrics.value(f"kvoffload:tier_{name}", tier="disk", **labels)


def test_after_kill_9_the_same_prompts_hit_the_disk_and_get_the_same_tokens(model, tmp_path):
    expected, without, _ = ask(model, tmp_path / "none", None)
    extra = tiers(tmp_path / "slab")

    tokens, first, log = ask(model, tmp_path / "run", extra)
    assert tokens == expected
    assert "kvoffload: tier 'disk' (KVOffloadFileTier) active" in log
    stored = tier_value(first, "blocks_total", op="put", status="ok")
    assert stored > NUM_CHUNKS

    tokens, second, log = ask(model, tmp_path / "run", extra)
    assert tokens == expected
    assert tier_value(second, "bytes_total", op="get") > 0
    # What the first had to compute, and the disk had before the second began.
    assert second.computed_tokens < 0.5 * first.computed_tokens
    assert second.loaded_tokens > first.loaded_tokens
    assert second.computed_tokens + second.loaded_tokens + second.device_tokens == (
        without.computed_tokens + without.device_tokens
    )
    assert tier_value(second, "evicted_total", reason="corrupt") == 0

    (path,) = (tmp_path / "slab").rglob("blocks.dat")
    with path.open("r+b") as file:
        for slot in range(0, int(stored), DAMAGED_EVERY):
            file.seek(slot * CHUNK_BYTES + slot % CHUNK_BYTES)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1 << slot % 8]))
    tokens, third, log = ask(model, tmp_path / "run", extra)
    assert tokens == expected
    assert tier_value(third, "evicted_total", reason="corrupt") > 0
    assert tier_value(third, "bytes_total", op="get") > 0
