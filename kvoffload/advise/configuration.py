"""A recommendation as configuration that can be pasted."""

from __future__ import annotations

import json

from kvoffload.replay.groups import GroupChunks
from kvoffload.replay.policies import is_own

DISK_PATH = "/nvme/kv"
"""Folder of a disk, for the user to replace."""

VLLM_BLOCK_TOKENS = 16  # a chunk of vLLM's connector is a multiple of its blocks, 16 tokens each


def python_text(policy: str, capacity: int, block_tokens: int) -> str:
    """Return Python code that builds the manager."""
    imported, argument = "", json.dumps(policy)
    if is_own(policy):
        path, _, options = policy.partition("?")
        module, _, argument = path.partition(":")
        imported = f"from {module} import {argument}\n"
        if options:
            given = options.replace("&", ", ")
            argument = f"{argument}(cache_capacity={capacity}, {given})"
    return (
        f"from kvoffload import CPUOffloadingManager\n{imported}\n"
        "manager = CPUOffloadingManager(\n"
        f"    block_size={block_tokens}, num_blocks={capacity}, cache_policy={argument}\n"
        ")"
    )


def vllm_arguments(
    policy: str, memory: int, groups: GroupChunks, disk: tuple[int, str] | None = None
) -> dict[str, object] | None:
    """Return the value of vLLM's ``--kv-transfer-config``; None for a class of the user's.

    `disk` are the bytes and the policy of a slab behind host memory, in the folder `DISK_PATH`.
    ``block_size``, the tokens per chunk, is given where it is a multiple of vLLM's blocks; with
    groups, whose blocks may differ in size, ``blocks_per_chunk``, for which slots are counted.
    """
    if is_own(policy):
        return None
    extra: dict[str, object] = {
        "spec_name": "KVOffloadSpec",
        "spec_module_path": "kvoffload.integrations.vllm",
        "eviction_policy": policy,
        "cpu_bytes_to_use": memory,
    }
    if not groups.is_plain:
        extra["blocks_per_chunk"] = groups.blocks_per_chunk
    elif groups.block_tokens % VLLM_BLOCK_TOKENS == 0:
        extra["block_size"] = groups.block_tokens
    if disk is not None and not is_own(disk[1]):
        extra["spec_name"] = "KVOffloadTieringSpec"
        extra["secondary_tiers"] = [
            {
                "type": "KVOffloadFileTier",
                "module_path": "kvoffload.integrations.vllm",
                "path": DISK_PATH,
                "capacity_bytes": disk[0],
                "policy": disk[1],
            }
        ]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
