"""How many bytes of KV cache a token takes, from a model's published shape.

Attention with KV heads keeps a key and a value a head and layer: ``2 x layers x KV heads x head
size`` elements a token (Ainslie et al., "GQA", 2023). Multi-head latent attention keeps one
compressed vector and one rotary key a layer, whatever the number of heads: ``layers x (latent +
rotary)`` (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from kvoffload.errors import describe

__all__ = ["DTYPE_BYTES", "ModelShape", "model_names", "model_shape"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes an element of the KV cache takes."""

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
        KV heads a layer; 0 with latent attention.
    head_size : int
        Elements of a head's key, and of its value; 0 with latent attention.
    latent : int
        Elements of the compressed vector a layer; 0 without latent attention.
    rotary : int
        Elements of the rotary key a layer; 0 without latent attention.
    remark : str
        What the formula leaves out for this model; empty if nothing.
    """

    name: str
    repository: str
    layers: int
    kv_heads: int = 0
    head_size: int = 0
    latent: int = 0
    rotary: int = 0
    remark: str = ""

    @property
    def source(self) -> str:
        """Address of the published configuration."""
        return f"{_HUB}/{self.repository}/blob/main/config.json"

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


_WINDOWS = (
    "every second layer attends to 128 tokens only; counted as if it kept all, so the memory holds "
    "more than is said here"
)

# layers, KV heads and head size (or latent and rotary size) as in config.json of each repository
_SHAPES = (
    ModelShape("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 32, 8, 128),
    ModelShape("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 80, 8, 128),
    ModelShape("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 80, 8, 128),
    ModelShape("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 126, 8, 128),
    ModelShape("qwen2.5-7b", "Qwen/Qwen2.5-7B", 28, 4, 128),
    ModelShape("qwen2.5-72b", "Qwen/Qwen2.5-72B", 80, 8, 128),
    ModelShape("qwen3-8b", "Qwen/Qwen3-8B", 36, 8, 128),
    ModelShape("qwen3-14b", "Qwen/Qwen3-14B", 40, 8, 128),
    ModelShape("qwen3-32b", "Qwen/Qwen3-32B", 64, 8, 128),
    ModelShape("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 48, 4, 128),
    ModelShape("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 94, 4, 128),
    ModelShape("mistral-7b", "mistralai/Mistral-7B-v0.3", 32, 8, 128),
    ModelShape("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", 40, 8, 128),
    ModelShape("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 32, 8, 128),
    ModelShape("glm-4.5", "zai-org/GLM-4.5", 92, 8, 128),
    ModelShape("gpt-oss-20b", "openai/gpt-oss-20b", 24, 8, 64, remark=_WINDOWS),
    ModelShape("gpt-oss-120b", "openai/gpt-oss-120b", 36, 8, 64, remark=_WINDOWS),
    ModelShape("deepseek-v3", "deepseek-ai/DeepSeek-V3", 61, latent=512, rotary=64),
    ModelShape("deepseek-r1", "deepseek-ai/DeepSeek-R1", 61, latent=512, rotary=64),
    ModelShape("kimi-k2", "moonshotai/Kimi-K2-Instruct", 61, latent=512, rotary=64),
)
_BY_NAME = {shape.name: shape for shape in _SHAPES}


def model_names() -> tuple[str, ...]:
    """Return the names of the models whose shape is known."""
    return tuple(_BY_NAME)


def model_shape(name: str) -> ModelShape:
    """Return the shape of a model; case does not matter, nor does the organisation before a slash.

    Raises
    ------
    ValueError
        If it is not known; the message lists those that are and the nearest.
    """
    wanted = name.rpartition("/")[2].lower()
    found = _BY_NAME.get(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, _BY_NAME, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(_BY_NAME)
        raise ValueError(f"model must be one of {known}, got {describe(name)}{hint}")
    return found
