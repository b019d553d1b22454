"""How many bytes of KV cache a token takes, from a model's published shape.

Attention with KV heads keeps a key and a value per head and layer: ``2 x layers x KV heads x head
size`` elements per token (Ainslie et al., "GQA", 2023). Multi-head latent attention keeps one
compressed vector and one rotary key per layer, whatever the number of heads: ``layers x (latent +
rotary)`` (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from kvoffload.errors import describe

__all__ = ["DTYPE_BYTES", "WINDOWED", "ModelShape", "model_names", "model_shape"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes that an element of the KV cache takes."""

_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's configuration decides the size of its KV cache.

    Attributes
    ----------
    name : str
        What users write.
    repository : str
        Where the configuration is published, on the Hugging Face Hub.
    layers : int
        Layers with attention.
    kv_heads : int
        KV heads per layer; 0 with latent attention.
    head_size : int
        Elements of a head's key, and of its value; 0 with latent attention.
    latent : int
        Elements of the compressed vector per layer; 0 without latent attention.
    rotary : int
        Elements of the rotary key per layer; 0 without latent attention.
    remark : str
        What the formula leaves out for this model; empty if nothing.
    parameters : float
        Its parameters; 0 if not known.
    active : float
        Parameters that take part in the computation of a token; 0: all.
    weights : float
        Bytes of its weights as published; 0: 2 per parameter.
    """

    name: str
    repository: str
    layers: int
    kv_heads: int = 0
    head_size: int = 0
    latent: int = 0
    rotary: int = 0
    remark: str = ""
    parameters: float = 0.0
    active: float = 0.0
    weights: float = 0.0

    @property
    def source(self) -> str:
        """Address of the published configuration."""
        if not self.repository:
            return self.name
        return f"{_HUB}/{self.repository}/blob/main/config.json"

    @property
    def active_parameters(self) -> float:
        """Parameters that take part in the computation of a token; 0 if not known."""
        return self.active or self.parameters

    @property
    def weight_bytes(self) -> float:
        """Bytes of its weights; 0 if not known."""
        return self.weights or 2 * self.parameters

    def bytes_per_token(self, dtype: str = "bfloat16", tensor_parallel: int = 1) -> int:
        """Return the bytes of host memory that a token's keys and values take.

        Parameters
        ----------
        dtype : str
            Element type of the KV cache, a key of `DTYPE_BYTES`.
        tensor_parallel : int
            Workers that a layer is divided among. A worker keeps at least one KV head, so with
            more workers than heads each head is kept several times; a latent vector is kept once.

        Raises
        ------
        ValueError
            If there is no such type, or if the heads cannot be divided evenly.
        """
        if dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ValueError(f"dtype must be one of {known}, got {describe(dtype)}")
        if tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be >= 1, got {tensor_parallel}")
        if self.latent:
            return self.layers * (self.latent + self.rotary) * DTYPE_BYTES[dtype]
        more, fewer = max(tensor_parallel, self.kv_heads), min(tensor_parallel, self.kv_heads)
        if more % fewer:
            raise ValueError(
                f"tensor_parallel must divide the {self.kv_heads} KV heads of {self.name} or be "
                f"a multiple of them, got {tensor_parallel}"
            )
        return 2 * self.layers * more * self.head_size * DTYPE_BYTES[dtype]


WINDOWED = "{} only; counted as if they kept all, so the memory holds more than is said here"
"""What is said of models some of whose layers see a window of the tokens."""

_WINDOWS = WINDOWED.format("every second layer attends to 128 tokens")

# As in config.json of each repository: layers, KV heads and head size (or latent and rotary size).
# Parameters, all of them, are counted from the same files, and agree with the model cards; those of
# GLM-4.5, and those active for a token, are of the cards. Weights take one byte per parameter where
# they are published in FP8; in MXFP4 17 bytes per 32 of the experts' parameters, 2 per other one.
_SHAPES = (
    ModelShape("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 32, 8, 128, parameters=8.03e9),
    ModelShape("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 80, 8, 128, parameters=70.6e9),
    ModelShape("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 80, 8, 128, parameters=70.6e9),
    ModelShape("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 126, 8, 128, parameters=406e9),
    ModelShape("qwen2.5-7b", "Qwen/Qwen2.5-7B", 28, 4, 128, parameters=7.62e9),
    ModelShape("qwen2.5-72b", "Qwen/Qwen2.5-72B", 80, 8, 128, parameters=72.7e9),
    ModelShape("qwen3-8b", "Qwen/Qwen3-8B", 36, 8, 128, parameters=8.19e9),
    ModelShape("qwen3-14b", "Qwen/Qwen3-14B", 40, 8, 128, parameters=14.8e9),
    ModelShape("qwen3-32b", "Qwen/Qwen3-32B", 64, 8, 128, parameters=32.8e9),
    ModelShape("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 48, 4, 128, parameters=30.5e9, active=3.3e9),
    ModelShape(
        "qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 94, 4, 128, parameters=235e9, active=22e9
    ),
    ModelShape("mistral-7b", "mistralai/Mistral-7B-v0.3", 32, 8, 128, parameters=7.25e9),
    ModelShape(
        "mistral-small-24b",
        "mistralai/Mistral-Small-24B-Instruct-2501",
        40,
        8,
        128,
        parameters=23.6e9,
    ),
    ModelShape(
        "mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 32, 8, 128, parameters=46.7e9, active=12.9e9
    ),
    ModelShape("glm-4.5", "zai-org/GLM-4.5", 92, 8, 128, parameters=355e9, active=32e9),
    ModelShape(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        24,
        8,
        64,
        remark=_WINDOWS,
        parameters=20.9e9,
        active=3.6e9,
        weights=13.7e9,
    ),
    ModelShape(
        "gpt-oss-120b",
        "openai/gpt-oss-120b",
        36,
        8,
        64,
        remark=_WINDOWS,
        parameters=116.8e9,
        active=5.1e9,
        weights=65.3e9,
    ),
    ModelShape(
        "deepseek-v3",
        "deepseek-ai/DeepSeek-V3",
        61,
        latent=512,
        rotary=64,
        parameters=671e9,
        active=37e9,
        weights=671e9,
    ),
    ModelShape(
        "deepseek-r1",
        "deepseek-ai/DeepSeek-R1",
        61,
        latent=512,
        rotary=64,
        parameters=671e9,
        active=37e9,
        weights=671e9,
    ),
    ModelShape(
        "kimi-k2",
        "moonshotai/Kimi-K2-Instruct",
        61,
        latent=512,
        rotary=64,
        parameters=1.026e12,
        active=32e9,
        weights=1.026e12,
    ),
)
_BY_NAME = {shape.name: shape for shape in _SHAPES}

# What repositories add to the name of a model without changing the shape of its cache.
_VARIANTS = re.compile(
    r"-(instruct|chat|base|it|hf|bf16|fp8|fp8-dynamic|awq|awq-int4|gptq|gptq-int4|int4|int8|w8a8"
    r"|w4a16|thinking|unsloth|bnb-4bit|v0\.[23]|0324|0528|0905|2501|2507)$"
)
_WITHOUT_WINDOWS = {
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x7b-instruct-v0.1": "mixtral-8x7b",
}


def model_names() -> tuple[str, ...]:
    """Return the names of the models whose shape is known."""
    return tuple(_BY_NAME)


def model_shape(name: str) -> ModelShape:
    """Return the shape of a model by its name, as it is typed at ``vllm serve``, or by its file.

    Case does not matter, nor does the organisation before a slash, nor what a repository's name
    adds for a variant with the same cache, such as ``-Instruct`` or ``-FP8``. A path to a
    ``config.json``, or to the folder that it lies in, is read instead (see ``model_config``).

    Raises
    ------
    ValueError
        If it is not known or not counted right; the message lists the known ones and the nearest.
    OSError
        If it is a file that cannot be read.
    """
    wanted = _plain(name)
    found = _BY_NAME.get(wanted)
    if found is not None:
        return found
    if name.endswith(".json") or (name and Path(name).is_dir()):
        from .model_config import shape_of_config

        return shape_of_config(name)
    near = difflib.get_close_matches(wanted, _BY_NAME, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(_BY_NAME)
    raise ValueError(
        f"model must be a path to its config.json or one of {known}, got {describe(name)}{hint}"
    )


def _plain(name: str) -> str:
    """Return what the table calls a repository's model."""
    plain = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    plain = _WITHOUT_WINDOWS.get(plain, plain)
    while plain not in _BY_NAME:
        shorter = _VARIANTS.sub("", plain)
        if shorter == plain:
            break
        plain = shorter
    return plain
