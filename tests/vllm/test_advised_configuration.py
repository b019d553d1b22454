"""The configuration of `kvoffload advise` in vLLM's own loader: it holds the stated blocks."""

import json
import re
from pathlib import Path
from types import MappingProxyType

import pytest

from kvoffload.advise import Setup, model_shape
from kvoffload.advise.configuration import vllm_arguments
from kvoffload.policies import registry

pytest.importorskip("vllm.v1.kv_offload.config", reason="needs a supported vLLM")

from vllm.v1.kv_offload import config
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

ENGINE_BLOCK = 16  # tokens


def offloading_config(extra, worker_bytes, workers=1, *, one_copy=False):
    """Return what vLLM tells a spec; `worker_bytes` are those of a token on one worker."""
    return config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(ENGINE_BLOCK, ("layer",), 0),),
        worker_kv_bytes_per_block=ENGINE_BLOCK * worker_bytes,
        enable_kv_cache_events=False,
        extra_config=MappingProxyType(extra),
        engine_id="test",
        model=config.OffloadingModelConfig("model", "bfloat16"),
        cache=config.OffloadingCacheConfig(ENGINE_BLOCK, extra["block_size"] // ENGINE_BLOCK),
        parallel=config.OffloadingParallelConfig(0, workers, workers, 1, 1, 1, 0, 1, None, False),
        replicated_layout=one_copy,
    )


@pytest.mark.parametrize("policy", registry.names())
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3"])
def test_vllm_loads_the_spec_with_as_many_chunks_as_were_replayed(policy, model):
    setup = Setup(8 * 2**30, 512, model_shape(model).bytes_per_token())
    advised = vllm_arguments(policy, setup.memory, setup.chunks)
    assert advised["kv_connector"] == "OffloadingConnector"
    extra = advised["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    offloading = offloading_config(extra, setup.token_bytes)
    spec = OffloadingSpecFactory.get_spec_cls(extra)(offloading)
    assert type(spec).__name__ == "KVOffloadSpec"
    assert spec.num_chunks == setup.capacity(setup.memory)
    assert type(spec.get_manager()).__name__ == "KVOffloadManager"


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("one_copy", [False, True])
def test_cpu_bytes_to_use_is_the_memory_of_all_workers_together(workers, one_copy, monkeypatch):
    """vLLM's own spec: where each has a part of a block, and where all have the same bytes."""
    monkeypatch.setattr(CPUOffloadingSpec, "_uses_shared_region", lambda _: one_copy)
    setup = Setup(8 * 2**30, 512, 2**17)
    extra = vllm_arguments("lru", setup.memory, setup.chunks)["kv_connector_extra_config"]
    of_one = setup.token_bytes if one_copy else setup.token_bytes // workers
    spec = CPUOffloadingSpec(offloading_config(extra, of_one, workers, one_copy=one_copy))
    assert spec.num_chunks == setup.capacity(setup.memory) == 128
    assert spec.num_chunks * spec.kv_bytes_per_chunk == setup.memory


def test_the_example_for_kubernetes_is_taken_with_a_small_disk(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "kubernetes" / "vllm.yaml"
    (text,) = re.findall(r"kv-transfer\.json: \|\n(.*?)\n---", path.read_text("utf-8"), re.DOTALL)
    settings = json.loads(text)
    assert settings["kv_connector"] == "OffloadingConnector"
    extra = settings["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    tier |= {"path": str(tmp_path), "capacity_bytes": "16MiB"}
    extra["cpu_bytes_to_use"] = 16 * 2**20
    offloading = offloading_config(extra, 2**10)
    spec = OffloadingSpecFactory.get_spec_cls(extra)(offloading)
    assert type(spec).__name__ == "KVOffloadTieringSpec"
    manager = spec.get_manager()
    try:
        assert any(tmp_path.rglob("*"))  # the slab
    finally:
        manager.shutdown()
