"""A recommendation as configuration that can be pasted."""

from __future__ import annotations

import json

__all__ = ["python_text", "vllm_arguments", "vllm_text"]

VLLM_BLOCK_TOKENS = 16  # a chunk of vLLM's connector is a multiple of its blocks, 16 tokens each


def python_text(policy: str, capacity: int, block_tokens: int) -> str:
    """Return the Python that makes the manager."""
    return (
        "from kvoffload import CPUOffloadingManager\n\n"
        "manager = CPUOffloadingManager(\n"
        f"    block_size={block_tokens}, num_blocks={capacity}, cache_policy={json.dumps(policy)}\n"
        ")"
    )


def vllm_arguments(policy: str, memory: int, block_tokens: int) -> dict[str, object]:
    """Return the value of vLLM's ``--kv-transfer-config``.

    ``block_size``, the tokens a chunk, is given where vLLM's blocks can make it up.
    """
    extra: dict[str, object] = {
        "spec_name": "KVOffloadSpec",
        "spec_module_path": "kvoffload.integrations.vllm",
        "eviction_policy": policy,
        "cpu_bytes_to_use": memory,
    }
    if block_tokens % VLLM_BLOCK_TOKENS == 0:
        extra["block_size"] = block_tokens
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def vllm_text(policy: str, memory: int, block_tokens: int) -> str:
    """Return the value of vLLM's ``--kv-transfer-config`` as JSON."""
    return json.dumps(vllm_arguments(policy, memory, block_tokens), indent=2)
