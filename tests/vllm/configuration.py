"""Offloading configurations, as vLLM's connector would build them, without a model."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

CHUNK_BYTES = 4096
PACKAGE = "kvoffload.integrations.vllm"
MODEL = {"name": "a/model", "dtype": "float16", "max_model_len": 1024}


def create(num_chunks: int = 8, **extra: Any) -> OffloadingSpec:
    """Return vLLM's or our spec for a configuration."""
    return OffloadingSpecFactory.create_spec(configuration(num_chunks, **extra))


def configuration(num_chunks: int, *, events: bool = True, **extra: Any) -> OffloadingConfig:
    """Return a configuration with `extra` in ``kv_connector_extra_config``."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": num_chunks * CHUNK_BYTES, **extra},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(
            **{one.name: MODEL[one.name] for one in dataclasses.fields(OffloadingModelConfig)}
        ),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
