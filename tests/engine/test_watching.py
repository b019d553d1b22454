"""A real engine that is watched: what it exports is what a sweep of its own recording finds."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from kvoffload.traces import Trace
from tests.engine.load import Client, plan
from tests.engine.predictions import kvoffload
from tests.engine.runs import CHUNK_BYTES, NO_DEVICE_CACHE, NUM_TURNS, ORDERLY, OURS
from tests.engine.server import Server

NUM_CHUNKS = 300
SIZES = (0.5, 1, 2, 4)


@pytest.fixture(scope="module")
def watched(model, tmp_path_factory):
    """Return what a watched engine exported after its last request, and the trace of all."""
    folder = tmp_path_factory.mktemp("watched")
    trace = folder / "requests.jsonl.gz"
    extra = {
        **OURS,
        "cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES,
        "kvoffload_record": str(trace),
        "kvoffload_watch": {
            "memory": list(SIZES),
            "policies": ["arc"],
            "max_rate": 1.0,
            "slots": NUM_CHUNKS * 2,
            "policy_slots": NUM_CHUNKS * 2,
            "window": 1e6,
            "interval": 0.5,
        },
    }
    with Server(model, folder, extra, arguments=(*NO_DEVICE_CACHE, *ORDERLY)) as server:
        Client(server).one_by_one(plan(NUM_TURNS))
        metrics = server.exported()
        assert server.stop() == 0, server.log()[-4000:]
        log = server.log()
    return metrics, trace, log


def sweep(trace):
    """Return the hit ratios of LRU by size, as the command prints them."""
    capacities = ", ".join(str(int(size * NUM_CHUNKS)) for size in SIZES)
    options = ("--policy", "lru", "--capacity", capacities, "--jobs", 1, "--json")
    return json.loads(kvoffload("sweep", trace, *options))


def test_the_exported_curve_is_that_of_a_sweep_of_the_recording(watched):
    metrics, trace, _ = watched
    cells = {cell["capacity"]: cell for cell in sweep(trace)["results"]}
    asked = metrics.value("vllm:kvoffload_asked_blocks_total")
    missed = metrics.value("vllm:kvoffload_missed_blocks_total")
    recorded = sum(len(request.hash_ids) for request in Trace(trace))
    assert asked == recorded
    assert 1 - missed / asked == pytest.approx(cells[NUM_CHUNKS]["hit_ratio"], abs=1e-9)
    given = 0
    for size in SIZES:
        labels = {"policy": "lru", "memory": f"{size:g}"}
        exact = cells[int(size * NUM_CHUNKS)]["hit_ratio"]
        shadow = metrics.value("vllm:kvoffload_shadow_missed_blocks_total", **labels)
        base = metrics.value("vllm:kvoffload_shadow_missed_blocks_total", policy="lru", memory="1")
        assert 1 - missed / asked * shadow / base == pytest.approx(exact, abs=0.03)
        error = metrics.value("vllm:kvoffload_shadow_error", **labels)
        for (name, own), ratio in metrics.samples.items():
            its = dict(own)
            marks = its.pop("marks", "none")
            is_point = name == "vllm:kvoffload_shadow_hit_ratio" and labels.items() <= its.items()
            if is_point and not math.isnan(ratio):
                given += 1
                if marks == "none":
                    assert ratio == pytest.approx(exact, abs=max(error, 0.02))
    assert given >= 1  # with more, the errors of so few blocks may be too wide


def test_causes_stores_and_loads_are_those_of_the_engine(watched):
    metrics, _, log = watched
    assert "no longer exported" not in log
    stored = metrics.value("vllm:kvoffload_stored_blocks_total")
    assert stored * CHUNK_BYTES == metrics.value("vllm:kv_offload_store_bytes_total")
    asked = metrics.value("vllm:kvoffload_asked_blocks_total")
    missed = metrics.value("vllm:kvoffload_missed_blocks_total")
    assert (asked - missed) * CHUNK_BYTES == metrics.value("vllm:kv_offload_load_bytes_total")
    causes = {
        dict(labels)["cause"]: value
        for (name, labels), value in metrics.samples.items()
        if name == "vllm:kvoffload_sampled_missed_blocks_total"
    }
    assert sum(causes.values()) == missed
    assert causes["never_or_long_ago"] > 100
    assert causes["evicted"] > 100
    assert not metrics.value("vllm:kvoffload_overdue_blocks", kind="load")
    assert not metrics.value("vllm:kvoffload_overdue_blocks", kind="store")
