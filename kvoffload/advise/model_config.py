"""The shape of a model's KV cache from its ``config.json``, or why it is not counted.

The file is that of Hugging Face's transformers. A model that keeps anything but keys and
values of every token, such as a state that does not grow, is refused rather than counted wrongly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload._printable import printable
from kvoffload.errors import describe
from kvoffload.traces.request import MAX_TOKENS

from .model_shape import WINDOWED, ModelShape

__all__ = ["shape_of_config"]

MAX_BYTES = 2**20  # published ones are some kilobytes
MOST = 2**20  # of anything that is counted

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "multi_query_group_num", "num_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_SIZES = ("head_dim", "kv_channels", "attention_head_dim")

_WITH_KEYS = {"full_attention", "attention", "global", "global_attention"}
_WITH_WINDOW = {"sliding_attention", "sliding_window", "chunked_attention", "local_attention"}

_REFUSED = {
    "recurrent layers keep a state, not keys and values of each token": (
        "mamba_d_state",
        "ssm_state_size",
        "ssm_cfg",
        "mamba_num_heads",
        "linear_num_value_heads",
        "linear_attn_config",
        "hybrid_override_pattern",
        "full_attention_interval",
        "attn_layer_period",
        "attn_layer_indices",
        "block_types",
        "layers_block_type",
        "attn_type_list",
        "rwkv_hidden_size",
        "state_size",
    ),
    "its layers have attention of different sizes": (
        "block_configs",
        "global_head_dim",
        "num_global_key_value_heads",
        "swa_num_key_value_heads",
        "num_key_value_heads_per_layer",
        "attention_other_setting",
    ),
    "several layers share one cache": ("num_kv_shared_layers", "cla_share_factor", "num_kv_share"),
    "its sparse attention keeps an index beside the cache": ("index_topk", "index_head_dim"),
    "its cross attention keeps what another encoder saw": ("cross_attention_layers",),
}


def shape_of_config(path: str | os.PathLike[str]) -> ModelShape:
    """Read the shape of a model from a ``config.json``, or from the folder that it lies in.

    Raises
    ------
    OSError
        If the file cannot be read; it names the file.
    ValueError
        If it is no such configuration, or of a model that cannot be counted; the message says why.
    """
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    with file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"model configuration must be at most {MAX_BYTES} bytes, got a larger one")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"model configuration must be JSON, got {describe(data[:40])}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model configuration must be a JSON object, got {describe(config)}")
    return _Config(os.fspath(path), config).shape()


class _Config:
    """A configuration; of a multimodal model, its text part."""

    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
        self.path = printable(path)
        self.model_type = describe(config.get("model_type", "model"))
        inner = config.get("text_config", config.get("llm_config"))
        self.config = inner if isinstance(inner, dict) else config

    def shape(self) -> ModelShape:
        """Return the shape."""
        self._refuse_what_is_not_counted()
        layers = self._integer(*_LAYERS)
        remark = self._windows()
        if self.config.get("kv_lora_rank") is not None:
            latent, rotary = self._integer("kv_lora_rank"), self._integer("qk_rope_head_dim")
            return ModelShape(self.path, "", layers, latent=latent, rotary=rotary, remark=remark)
        heads = self._integer(*_HEADS)
        kv_heads = 1 if self.config.get("multi_query") is True else heads
        if self._given(*_KV_HEADS):
            kv_heads = self._integer(*_KV_HEADS)
        if self._given(*_HEAD_SIZES):
            head_size = self._integer(*_HEAD_SIZES)
        else:
            head_size = self._integer(*_HIDDEN) // heads
        if head_size < 1:
            raise ValueError(f"{self.path}: hidden_size must be >= the heads, got less")
        return ModelShape(self.path, "", layers, kv_heads, head_size, remark=remark)

    def _refuse_what_is_not_counted(self) -> None:
        for reason, names in _REFUSED.items():
            found = self._given(*names)
            if found:
                self._refuse(f"{reason} ({found})")
        for name in ("is_encoder_decoder", "attention_k_eq_v"):
            if self.config.get(name) is True:
                self._refuse(f"it has {name}")

    def _windows(self) -> str:
        """Return a remark on layers that attend to a window; empty if there are none."""
        types = self.config.get("layer_types")
        if types is None:
            if (
                self._given("sliding_window") is None
                or self.config.get("use_sliding_window", True) is False
            ):
                return ""
            window = self._integer("sliding_window", most=MAX_TOKENS)
            return WINDOWED.format(f"all or some layers attend to {window} tokens")
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise ValueError(f"{self.path}: layer_types must be a list of strings")
        other = sorted(set(types) - _WITH_KEYS - _WITH_WINDOW)
        if other:
            self._refuse(f"it has layers of type {printable(other[0])[:80]}")
        windowed = sum(kind in _WITH_WINDOW for kind in types)
        if not windowed:
            return ""
        return WINDOWED.format(f"{windowed} of {len(types)} layers attend to a window")

    def _refuse(self, reason: str) -> None:
        raise ValueError(
            f"model {self.model_type} is not counted: {reason}; measure the bytes per token and "
            "give them with --kv-bytes-per-token"
        )

    def _given(self, *names: str) -> str | None:
        """Return the first of these fields that is set."""
        return next((n for n in names if self.config.get(n) not in (None, 0, False, [])), None)

    def _integer(self, *names: str, most: int = MOST) -> int:
        name = self._given(*names)
        if name is None:
            raise ValueError(f"{self.path}: must have the field {names[0]}, got none")
        value = self.config[name]
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{self.path}: {name} must be 1 ... {most}, got {describe(value)}")
        return value
