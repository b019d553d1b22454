"""Bytes as the ``config.json`` of a model: a shape whose figures are right, or one error.

If the first byte is even, the rest is the file. If it is odd, the file is a description that has a
layer count, heads and a size, and each two bytes that follow set a field: one picks its name among
those that are read, one its value. So bytes made up at random reach what lies behind the JSON.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kvoffload.advise import model_config, model_fields, model_shape, model_states
from kvoffload.advise.model_groups import DTYPE_BYTES
from kvoffload.advise.model_shape import ModelShape

from .scratch import scratch

WORKERS = (1, 2, 3, 8, 1024)
LONGEST = 600
"""Characters that a message has at most, the path aside."""

FIELDS = [
    *model_config._LAYERS,
    *model_config._HEADS,
    *model_config._KV_HEADS,
    *model_fields.HIDDEN,
    *model_config._HEAD_SIZES,
    *model_config._OTHER_SIZES,
    *[name for names in model_config._REFUSED.values() for name in names],
    *model_states.STATE_FIELDS,
    *("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "linear_head_dim", "mamba_ssm_dtype", "mamba_expand"),
    *("mamba_d_conv", "mamba_d_head", "mamba_d_ssm", "mamba_n_groups", "mamba_head_dim"),
    *("ssm_state_size", "n_groups", "conv_kernel", "mamba_ssm_cache_dtype", "conv_dim"),
    *("layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern", "full_attn_idxs"),
    *("full_attention_interval", "attn_layer_period", "attn_layer_offset", "attn_layer_indices"),
    *("no_rope_layers", "no_rope_layer_interval", "attention_chunk_size", "max_window_layers"),
    *("sliding_window_pattern", "num_kv_shared_layers", "index_topk", "index_head_dim"),
    *("index_topk_freq", "v_head_dim", "swa_head_dim", "swa_v_head_dim"),
    "model_type",
    "text_config",
    "llm_config",
    "multi_query",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "is_encoder_decoder",
    "attention_k_eq_v",
]
VALUES: list[Any] = [
    *(None, False, True, 0, 1, 2, 3, 7, 32, 128, 4096, 2**20, 2**20 + 1, 2**63, 10**400, -1),
    *(0.5, 1e308, -0.0, math.inf, math.nan, "", "llama", "4096", "\n\x1b[31m", "\ud800", "x" * 700),
    *([], {}, [0], [None], ["full_attention"] * 4, ["sliding_attention"] * 40, ["\n\x00" * 60]),
    ["full_attention", "chunked_attention"],
    ["mamba"],
    *(
        ["mamba", "hybrid", "moe", "full_attention"],
        ["linear_attention"] * 4095 + ["full_attention"],
    ),
    *("M-M*E", "*" * 5000, "auto", "float32", "gemma4_text", "mimo_v2", "qwen3_5", "cohere2"),
    *("falcon_h1", "qwen3_next", "llama4"),
    *([0, 1, 1, 1], [3], {"num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4}),
    {"num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4, "full_attn_layers": [2, 4]},
    {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64},
    {"sliding_window": "\n" * 700},
    [[[[[[[[[]]]]]]]]],
]
START = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


def config_of(data: bytes) -> bytes:
    """Return the file that the bytes stand for."""
    if not data or data[0] % 2 == 0:
        return data[1:]
    fields: dict[str, Any] = dict(START)
    for name, value in zip(data[1::2], data[2::2], strict=False):
        fields[FIELDS[name % len(FIELDS)]] = VALUES[value % len(VALUES)]
    return json.dumps(fields).encode()


def check_text(text: str, path: str) -> None:
    """Raise unless a message is one line that a terminal can show."""
    said = text.replace(path, "")
    if not said.isprintable() or len(said) > LONGEST:
        raise AssertionError(f"no message for one line: {said[:1000]!r}")


def check_shape(shape: ModelShape, path: str) -> None:
    """Raise unless every figure of a shape is a finite number above 0."""
    counts = [one.count for one in shape.kinds]
    if not 1 <= sum(counts) <= 2 * model_fields.MOST_LAYERS or min(counts) < 1:
        raise AssertionError(f"no shape: {shape}")
    for dtype in DTYPE_BYTES:
        for workers in WORKERS:
            check_layout(shape, dtype, workers, path)
            try:
                figure = shape.bytes_per_token(dtype, workers)
            except ValueError as error:
                check_text(str(error), path)
                continue
            if type(figure) is not int or figure <= 0:
                raise AssertionError(f"{figure} bytes per token of {shape}")


def check_layout(shape: ModelShape, dtype: str, workers: int, path: str) -> None:
    """Raise unless the groups have all layers, and a slot a size above 0."""
    try:
        layout = shape.layout(dtype, workers)
    except ValueError as error:
        check_text(str(error), path)
        return
    if sum(group.layers for group in layout.groups) != sum(one.count for one in shape.kinds):
        raise AssertionError(f"layers of {layout} are not those of {shape}")
    figures = [layout.block_bytes, *(group.block_tokens for group in layout.groups)]
    if not all(type(figure) is int and figure > 0 for figure in figures):
        raise AssertionError(f"{layout} of {shape}")


def run_config(data: bytes) -> int:
    """Read the description that the bytes stand for; return 1 if it has a shape, 0 if not."""
    with scratch() as folder:
        file = Path(folder, "config.json")
        file.write_bytes(config_of(data))
        try:
            shape = model_shape(str(file))
        except ValueError as error:
            check_text(str(error), folder)
            return 0
        check_shape(shape, folder)
        if model_shape(folder).kinds != shape.kinds:
            raise AssertionError(f"the folder has another shape than its file: {shape}")
    return 1
