"""The shape of a model's KV cache, and its bytes per token.

Attention with KV heads keeps a key and a value per head and layer: ``2 x layers x KV heads x head
size`` elements per token (Ainslie et al., "GQA", 2023). Multi-head latent attention keeps one
compressed vector and one rotary key per layer, whatever the number of heads: ``layers x (latent +
rotary)`` (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import describe

__all__ = ["DTYPE_BYTES", "WINDOWED", "ModelShape"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes that an element of the KV cache takes."""

WINDOWED = "{} only; counted as if they kept all, so the memory holds more than is said here"
"""Remark on models some of whose layers attend to a window of the tokens."""

_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a model's configuration that determines the size of its KV cache.

    Attributes
    ----------
    name : str
        The name that users type.
    repository : str
        Repository on the Hugging Face Hub that publishes the configuration.
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
        Remark on what the formula leaves out for this model; may be empty.
    parameters : float
        Number of parameters; 0 if not known.
    active : float
        Parameters active per token; 0: all.
    weights : float
        Bytes of the weights as published; 0: 2 per parameter.
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
        """Parameters active per token; 0 if not known."""
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
