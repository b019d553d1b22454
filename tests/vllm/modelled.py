"""What vLLM's own models keep: run as a program of its own, since it replaces parts of vLLM.

It reads a JSON object of names and, for each, the fields of a ``config.json`` and numbers of
workers; it writes one of names and, for each type of cache and number of workers, the groups and
chunks.

Real are the configuration classes of transformers and vLLM, the model classes, their attention and
recurrent layers, the specs of these layers, the rule for blocks that hold a state, the groups, the
configuration of the connector, and the size of a chunk. Models are built on torch's ``meta``
device, without weights. In place of the others stand:

- a platform that has the block sizes of an NVIDIA accelerator, with Triton's attention, Triton's
  latent attention, and FlashMLA for an index;
- groups of workers that know their number alone;
- nothing for experts, streams and images, which keep no cache.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm import platforms
from vllm.platforms.interface import DeviceCapability

from tests.vllm.engine import HostPlatform

MEMORY = 64 * 2**30
WORKERS = (1, 2, 4, 8)
VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_KIMI_K3_GEMM_AR": "0",
    "VLLM_ENABLE_GEMM_RS": "0",
}
"""Variables that the program needs before vLLM is imported."""
ATTENTION = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
LATENT = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
INDEXED = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"

ARCHITECTURES = {
    "cohere2": "Cohere2ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mimo_v2": "MiMoV2FlashForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}
#: Kinds of models that the library's configuration classes know by another name.
KINDS = {"mimo_v2": "mimo_v2_flash", "kimi_k2": "deepseek_v3"}
#: What the classes of the models need beside the fields that determine the cache.
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_n_heads": 64},
    "lfm2": {"block_dim": 2048},
    "kimi_linear": {"hidden_size": 7168, "q_lora_rank": 1536, "mla_use_nope": True},
    "mimo_v2": {
        "moe_layer_freq": [0] * 128,
        "layernorm_epsilon": 1e-5,
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "sliding_window_size": 128,
    },
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid"},
}


class Platform(HostPlatform):
    """A platform whose layers keep blocks as on an NVIDIA accelerator."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None, **more):
        if not attn_selector_config.use_mla:
            return ATTENTION
        return INDEXED if attn_selector_config.use_sparse else LATENT

    @classmethod
    def get_mla_prefill_backend_cls(cls, *arguments, **more):
        from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

        return CPUSDPAMLAPrefillBackend

    @classmethod
    def check_if_supports_dtype(cls, dtype):
        pass

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

    @classmethod
    def supports_fp8(cls):
        return True

    @classmethod
    def num_compute_units(cls, device_id=0):
        return 1


class Workers:
    """A group of workers of which this is the first."""

    rank = rank_in_group = local_rank = first_rank = 0
    is_first_rank = True
    use_device_communicator = False
    device = torch.device("cpu")

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks = list(range(world_size))
        self.last_rank = world_size - 1
        self.is_last_rank = world_size == 1
        self.device_group = self.cpu_group = self

    def size(self) -> int:
        return self.world_size


class Nothing(torch.nn.Module):
    """A part of a model that keeps no cache."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return MagicMock()


def replace_parts() -> None:
    """Put the stand-ins in place, before the models are imported."""
    platforms._current_platform = Platform()
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2"):
        replaced = types.ModuleType(f"torchvision{name}")
        replaced.__getattr__ = lambda _: MagicMock()  # type: ignore[method-assign]
        replaced.__path__ = []
        replaced.__spec__ = importlib.machinery.ModuleSpec(replaced.__name__, None, is_package=True)
        sys.modules[replaced.__name__] = replaced
    torch.accelerator.empty_cache = lambda: None
    torch.cuda.Stream = torch.cuda.Event = MagicMock()

    import vllm.model_executor.layers.fused_moe as experts
    import vllm.model_executor.layers.fused_moe.layer as layer
    from vllm.model_executor.models import registry
    from vllm.triton_utils import triton
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.worker.workspace import init_workspace_manager

    experts.FusedMoEFactory = layer.FusedMoEFactory = lambda *_, **__: Nothing()
    registry._run_in_subprocess = lambda function: function()
    triton.set_allocator = lambda *_: None
    CPUOffloadingSpec._uses_shared_region = lambda _: True  # as on an accelerator
    init_workspace_manager(torch.device("cpu"))


def set_workers(number: int) -> None:
    """Have vLLM divide layers among so many workers."""
    from vllm.distributed import parallel_state

    for name in ("_PP", "_DP", "_EP", "_DCP", "_PCP", "_EPLB"):
        setattr(parallel_state, name, Workers(1))
    parallel_state._TP = parallel_state._WORLD = Workers(number)


def whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with all that the class of the model needs."""
    from transformers import AutoConfig

    kind = config["model_type"]
    fields = {**MORE.get(kind, {}), **config}
    del fields["model_type"]
    found = AutoConfig.for_model(KINDS.get(kind, kind), **fields).to_dict()
    return found | {"architectures": [ARCHITECTURES[kind]]}


def results_of(
    config: Mapping[str, Any], workers: int, dtype: str
) -> tuple[list[list[Any]], dict[str, list[int]]]:
    """Return the groups of a model, and by blocks per chunk its bytes and those in `MEMORY`."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
        get_layers_from_vllm_config,
        set_current_vllm_config,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core import kv_cache_planning
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    set_workers(workers)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, enforce_eager=True,
            max_model_len=4096,
        )  # fmt: skip
        # As `vllm serve` does: a window of all layers is told by the configuration of the cache.
        types = getattr(model.hf_text_config, "layer_types", None)
        alike = types is None or all(one == "sliding_attention" for one in types)
        vllm = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(
                enable_prefix_caching=True,
                cache_dtype=dtype,
                sliding_window=model.get_sliding_window() if alike else None,
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=128, max_model_len=4096,
                enable_chunked_prefill=True, is_encoder_decoder=False,
            ),
            parallel_config=ParallelConfig(
                tensor_parallel_size=workers,
                distributed_executor_backend="mp" if workers > 1 else None,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both",
                kv_connector_extra_config={"cpu_bytes_to_use": MEMORY},
            ),
            device_config=DeviceConfig("cpu"),
        )  # fmt: skip
        on_meta = torch.device("meta")
        with set_current_vllm_config(vllm), set_default_torch_dtype(torch.bfloat16), on_meta:
            initialize_model(vllm, model_config=model)
    platforms.current_platform.update_block_size_for_backend(vllm)
    specs = {}
    for name, layer in get_layers_from_vllm_config(vllm, AttentionLayerBase).items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is None:
            specs[name] = layer.get_kv_cache_spec(vllm)
    vllm.cache_config.kv_cache_layout = "LBHNC"  # what vLLM's connector asks for
    groups = kv_cache_planning.get_kv_cache_groups(vllm, specs)
    # Blocks are more where a layer takes more memory; all groups share them.
    layout = kv_cache_planning.get_kv_cache_config_from_groups(vllm, groups, 2**40)
    layout.kv_tp_replicas = kv_cache_planning.kv_cache_groups_tp_replicas(groups, workers)
    offloading = build_offloading_config(vllm, layout)
    sizes = {}
    for blocks in (1, 4):
        extra = vllm.kv_transfer_config.kv_connector_extra_config
        extra["blocks_per_chunk"] = blocks
        spec = CPUOffloadingSpec(build_offloading_config(vllm, layout))
        sizes[str(blocks)] = [spec.kv_bytes_per_chunk, spec.num_chunks]
    described = [
        [*description(group), one.tokens_per_block]
        for group, one in zip(groups, offloading.groups, strict=True)
    ]
    return described, sizes


def description(group: Any) -> tuple[str, int, int]:
    """Return the kind of a group, its layers without those of an index, and its window."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
        SparseCacheRole,
        UniformTypeKVCacheSpecs,
        iter_layer_specs,
    )

    layers = len(group.layer_names)
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        roles = [getattr(one, "cache_role", None) for one in iter_layer_specs(group.kv_cache_spec)]
        layers -= roles.count(SparseCacheRole.INDEXER)
    if isinstance(spec, MambaSpec):
        return "state", layers, 0
    if isinstance(spec, SlidingWindowSpec):
        return "window", layers, spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked", layers, spec.attention_chunk_size
    return "full", layers, 0


def all_of(config: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """Return the results of a model by type of cache and number of workers."""
    complete = whole(config)
    found = {"fp8 1": results_of(complete, 1, "fp8")}
    for workers in numbers:
        if config["num_attention_heads"] % workers == 0:
            found[f"bfloat16 {workers}"] = results_of(complete, workers, "auto")
    return found


def main() -> None:
    """Read configurations from standard input, write results to standard output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no result
    replace_parts()
    json.dump({name: all_of(*asked) for name, asked in json.load(sys.stdin).items()}, out)
