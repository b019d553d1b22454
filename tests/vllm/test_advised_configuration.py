"""The configuration of `kvoffload advise` in vLLM's own loader: it holds the stated blocks."""

from types import MappingProxyType

import pytest

from kvoffload.advise import Setup, model_shape
from kvoffload.advise.configuration import vllm_arguments
from kvoffload.policies import registry

pytest.importorskip("vllm.v1.kv_offload.config", reason="needs a supported vLLM")

from vllm.v1.kv_offload import config
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

ENGINE_BLOCK = 16  # tokens


@pytest.mark.parametrize("policy", registry.names())
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3"])
def test_vllm_loads_the_spec_with_as_many_chunks_as_were_replayed(policy, model):
    setup = Setup(8 * 2**30, 512, model_shape(model).bytes_per_token())
    advised = vllm_arguments(policy, setup.memory, setup.block_tokens)
    assert advised["kv_connector"] == "OffloadingConnector"
    extra = advised["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    offloading = config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(ENGINE_BLOCK, ("layer",), 0),),
        worker_kv_bytes_per_block=ENGINE_BLOCK * setup.token_bytes,
        enable_kv_cache_events=False,
        extra_config=MappingProxyType(extra),
        engine_id="test",
        model=config.OffloadingModelConfig("model", "bfloat16"),
        cache=config.OffloadingCacheConfig(ENGINE_BLOCK, extra["block_size"] // ENGINE_BLOCK),
        parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )
    spec = OffloadingSpecFactory.get_spec_cls(extra)(offloading)
    assert type(spec).__name__ == "KVOffloadSpec"
    assert spec.num_chunks == setup.capacity(setup.memory)
    assert type(spec.get_manager()).__name__ == "KVOffloadManager"
