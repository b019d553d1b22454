"""The shape of a model's KV cache from its ``config.json``, or why it is not counted.

The file is that of Hugging Face's transformers. Fields are read as vLLM 0.33 reads them. A model
whose cache these fields do not describe is refused rather than counted wrongly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvoffload._printable import printable
from kvoffload.errors import describe
from kvoffload.traces.request import MAX_TOKENS

from .model_fields import HIDDEN, MOST_LAYERS, Fields
from .model_groups import Layers
from .model_shape import ModelShape
from .model_states import has_states, state_of

MAX_BYTES = 2**20  # published files take some kilobytes

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = (
    *("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "n_head_kv"),
    "num_attention_groups",
)
_HEAD_SIZES = ("head_dim", "kv_channels", "attention_head_dim")

# What a layer of each type keeps; "both" is attention beside a state, "" nothing.
_TYPES = {
    **dict.fromkeys(("full_attention", "attention", "global", "global_attention", "*"), "full"),
    **dict.fromkeys(("sliding_attention", "sliding_window", "local_attention"), "window"),
    "deepseek_sparse_attention": "full",
    "chunked_attention": "chunked",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "M"), "state"),
    "hybrid": "both",
    **dict.fromkeys(("mlp", "moe", "-", "E"), ""),
}
# The interval of layers with full attention, if the configuration does not give it.
_INTERVALS = {
    "gpt_oss": 2,
    "gemma2": 2,
    "cohere2": 4,
    "cohere2_moe": 4,
    "olmo3": 4,
    "gemma3n": 5,
    "gemma3n_text": 5,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma4": 6,
    "gemma4_text": 6,
    "gemma4_unified_text": 6,
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
    "llama4": 4,
    "llama4_text": 4,
}

# Other sizes of some layers, which are read of `_WITH_OTHER_SIZES`.
_OTHER_SIZES = ("global_head_dim", "num_global_key_value_heads", "swa_num_key_value_heads")
_WITH_OTHER_SIZES = ("gemma4", "mimo_v2")
_REFUSED = {
    "its attention is compressed": ("compress_ratios",),
    "several layers share one cache": ("cla_share_factor", "num_kv_share"),
    "several layers share one index": ("index_topk_pattern", "indexer_types"),
    "its layers have attention of different sizes": (
        "block_configs",
        "num_key_value_heads_per_layer",
        "attention_other_setting",
        "per_layer_config",
        "sliding_windows",
        "swa_kv_lora_rank",
        *_OTHER_SIZES,
    ),
    "its recurrent layers are of a kind that is not known": (
        "ssm_cfg",
        "block_types",
        "attn_type_list",
        "rwkv_hidden_size",
        "state_size",
        "layer_group_size",
    ),
    "its cross attention keeps what another encoder saw": ("cross_attention_layers",),
}
# Kinds of models whose layers keep more than their fields tell.
_REFUSED_TYPES = {
    "minicpm3": "it keeps keys and values, not its latent vector",
    "minimax_m3": "its sparse attention keeps an index beside keys and values",
    "qwen4_exp": "its states have several shapes",
    "glm5_next": "its index and its states have several shapes",
    "inkling": "its states have several shapes",
    "deepseek_v4": "its attention is compressed",
    "alice_ai": "its recurrent layers are of a kind that is not known",
    "longcat_flash": "its layers have attention twice",
}


def shape_of_config(path: str | os.PathLike[str]) -> ModelShape:
    """Read the shape of a model from a ``config.json``, or from its folder.

    Raises
    ------
    OSError
        If the file cannot be read; it names the file.
    ValueError
        If it is no configuration, or one of a model that is not counted; the message says why.
    """
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    with file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    name = printable(os.fspath(file))
    if len(data) > MAX_BYTES:
        raise ValueError(f"{name}: must be at most {MAX_BYTES} bytes, got a larger file")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{name}: must be JSON, got {describe(data[:40])}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{name}: must be a JSON object, got {describe(config)}")
    return shape_of_fields(os.fspath(path), config)


def shape_of_fields(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model from the fields of its configuration; ValueError says why not."""
    return _Config(name, config).shape()


class _Config(Fields):
    """A configuration; of a multimodal model, its text part."""

    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config", config.get("llm_config"))
        fields = inner if isinstance(inner, dict) else config
        kind = fields.get("model_type", config.get("model_type", "model"))
        super().__init__(printable(path), kind if isinstance(kind, str) else describe(kind), fields)

    def shape(self) -> ModelShape:
        """Return the shape."""
        self._refuse_what_is_not_counted()
        kinds = self._kinds(self._types())
        if all(one.state is not None for one in kinds):
            self.refuse("none of its layers has attention")
        return ModelShape(self.path, "", kinds)

    def _refuse_what_is_not_counted(self) -> None:
        for prefix, reason in _REFUSED_TYPES.items():
            if self.model_type.startswith(prefix):
                self.refuse(reason)
        read = [*_OTHER_SIZES] if self.model_type.startswith(_WITH_OTHER_SIZES) else []
        read += ["cla_share_factor"] * (self.config.get("use_cla") is False)
        if self.given("attn_type_list") and {*self.integers("attn_type_list")} == {1}:
            read.append("attn_type_list")  # every layer has attention
        for reason, names in _REFUSED.items():
            found = self.given(*(name for name in names if name not in read))
            if found:
                self.refuse(f"{reason} ({found})")
        if self.is_true("is_encoder_decoder"):
            self.refuse("it has is_encoder_decoder")
        if self.optional("index_topk_freq", default=1) > 1:
            self.refuse("several layers share one index (index_topk_freq)")
        if self.given("index_topk") and not self.given("kv_lora_rank"):
            self.refuse("its sparse attention keeps an index beside keys and values (index_topk)")

    def _types(self) -> list[str]:
        """Return what each layer keeps, a value of `_TYPES`; layers that share a cache once."""
        types = self._listed()
        if types is None:
            types = self._by_counts(self.integer(*_LAYERS, most=MOST_LAYERS))
        if self.given("num_kv_shared_layers"):
            shared = self.integer("num_kv_shared_layers", most=MOST_LAYERS)
            if shared >= len(types):
                raise ValueError(
                    f"{self.path}: num_kv_shared_layers must be < {len(types)} layers, got {shared}"
                )
            types = types[: len(types) - shared]
        return types

    def _listed(self) -> list[str] | None:
        """Return the types from the field that lists them, if there is one."""
        name = self.given("layers_block_type", "layer_types", "hybrid_override_pattern")
        if name is None:
            return None
        listed = self.config[name]
        if name == "hybrid_override_pattern":
            if not isinstance(listed, str):
                raise ValueError(f"{self.path}: {name} must be text, got {describe(listed)}")
        elif not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ValueError(f"{self.path}: {name} must be a list of strings")
        other = sorted(set(listed) - _TYPES.keys())
        if other:
            self.refuse(f"it has layers of type {printable(other[0])[:80]}")
        if len(listed) > MOST_LAYERS:
            raise ValueError(f"{self.path}: {name} must have at most {MOST_LAYERS} layers")
        layers = len(listed)
        if self.given(*_LAYERS) and self.model_type != "nemotron_h":
            layers = self.integer(*_LAYERS, most=MOST_LAYERS)
        if len(listed) < layers:
            raise ValueError(f"{self.path}: {name} must have {layers} layers, got {len(listed)}")
        return [_TYPES[one] for one in listed[:layers]]

    def _by_counts(self, layers: int) -> list[str]:
        """Return the types from the fields that give the numbers of layers of one type."""
        if self.model_type == "falcon_h1":
            return ["both"] * layers
        every = range(layers)
        other = "window"
        full: Iterable[int] | None = None
        if self.given("hybrid_layer_pattern"):
            listed = self.integers("hybrid_layer_pattern", least=layers)
            full = [layer for layer in every if listed[layer] == 0]
        elif (delta := self.part("linear_attn_config")) is not None:
            other, full = "state", [one - 1 for one in delta.integers("full_attn_layers")]
        elif (indexes := self.given("full_attn_idxs", "attn_layer_indices")) is not None:
            other, full = "state", self.integers(indexes)
        elif self.given("attn_layer_period"):
            offset = self.optional("attn_layer_offset", default=0)
            other, full = "state", range(offset, layers, self.integer("attn_layer_period"))
        elif self.given("attention_chunk_size"):
            other, full = "chunked", self._without_rotary(layers)
        elif has_states(self):
            other, full = "state", self._every("full_attention_interval", layers)
            if full is None:
                self.refuse("it does not say which of its layers are recurrent")
        elif self.given("sliding_window") and self.config.get("use_sliding_window") is not False:
            # The first layers of Qwen 2 and 3 attend to all tokens.
            is_qwen = self.model_type.startswith("qwen")
            first = self.optional("max_window_layers", default=0) if is_qwen else 0
            full = self._every("sliding_window_pattern", layers) or range(min(layers, first))
        if full is None:
            return ["full"] * layers
        kept = set(full)
        return ["full" if layer in kept else other for layer in every]

    def _without_rotary(self, layers: int) -> list[int]:
        """Return the layers of Llama 4 that attend to all tokens: those without rotary keys."""
        if self.given("no_rope_layers"):
            listed = self.integers("no_rope_layers", least=layers)
            return [layer for layer in range(layers) if listed[layer] == 0]
        return list(self._every("no_rope_layer_interval", layers) or ())

    def _every(self, name: str, layers: int) -> range | None:
        """Return layers at an interval, given by a field or else by the kind of model."""
        interval = self.optional(name, default=_INTERVALS.get(self.model_type, 0))
        return range(interval - 1, layers, interval) if interval else None

    def _kinds(self, types: Sequence[str]) -> tuple[Layers, ...]:
        """Return the layers by kind, in order of each kind's first layer."""
        counts: dict[str, int] = {}
        if "both" in types:  # attention that several layers share is made before the layers
            counts["full"] = 0
        for one in types:
            for kind in ("full", "state") if one == "both" else (one,):
                counts[kind] = counts.get(kind, 0) + 1
        counts.pop("", None)  # layers that keep nothing
        if "state" in counts and self.given("index_topk"):
            self.refuse("its sparse attention keeps an index beside states (index_topk)")
        return tuple(replace(self._layers_of(kind), count=count) for kind, count in counts.items())

    def _layers_of(self, kind: str) -> Layers:
        """Return one layer that keeps its cache in this way."""
        if kind == "state":
            return Layers("state", 1, state=state_of(self))
        if self.given("kv_lora_rank"):
            if kind != "full":
                self.refuse(f"its latent attention attends to a {kind}")
            latent = self.integer("kv_lora_rank")
            rotary = self.optional("qk_rope_head_dim", default=0)
            size = self.integer("index_head_dim") if self.given("index_topk") else 0
            index = size + size // 128 * 4  # elements in 8 bits, scales in 32 for 128 of them
            return Layers("full", 1, latent=latent, rotary=rotary, index_bytes=index)
        heads, key, value = self._heads(kind)
        if kind == "full":
            return Layers("full", 1, heads, key, value)
        if kind == "chunked":
            window = self.integer("attention_chunk_size", most=MAX_TOKENS)
            return Layers("chunked", 1, heads, key, value, window=window)
        window = self.integer("sliding_window", "sliding_window_size", most=MAX_TOKENS)
        if self.model_type.startswith("cohere2"):
            window += 1  # the token itself is not counted in Cohere's configurations
        return Layers("window", 1, heads, key, value, window=window)

    def _heads(self, kind: str) -> tuple[int, int, int]:
        """Return the KV heads, and the elements of a key and of a value."""
        heads = self.integer(*_HEADS)
        kv_heads = self.optional(*_KV_HEADS, default=heads)
        if attention := self.part("attn_config"):  # of DBRX and MPT
            kv_heads = attention.optional("kv_n_heads", default=kv_heads)
        if self.is_true("multi_query") and not self.given("new_decoder_architecture", "n_head_kv"):
            kv_heads = 1  # though configurations of Falcon may list every head
        given = self.given(*_HEAD_SIZES)
        key = self.integer(given) if given else self.integer(*HIDDEN) // heads
        if key < 1:
            raise ValueError(f"{self.path}: hidden_size must be >= the heads, got less")
        value = key
        if kind == "full" and self.model_type.startswith("gemma4"):
            key = value = self.optional("global_head_dim", default=512)
            if self.is_true("attention_k_eq_v"):
                kv_heads = self.optional("num_global_key_value_heads", default=kv_heads)
        if self.model_type.startswith("mimo_v2"):
            before = "swa_" if kind == "window" else ""
            kv_heads = self.optional(f"{before}num_key_value_heads", default=kv_heads)
            key = self.optional(f"{before}head_dim", default=key)
            value = self.optional(f"{before}v_head_dim", default=key)
        return kv_heads, key, value
