"""The shape of a model's KV cache, and its bytes per token.

Attention with KV heads keeps a key and a value per head and layer: ``2 x layers x KV heads x head
size`` elements per token (Ainslie et al., "GQA", 2023). Multi-head latent attention keeps one
compressed vector and one rotary key per layer, whatever the number of heads: ``layers x (latent +
rotary)`` (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import describe
from kvoffload.replay.groups import GroupLayout

from .model_groups import DTYPE_BYTES, Layers, check_workers, group_layout

_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a model's configuration that determines its KV cache.

    Attributes
    ----------
    name : str
        The name that users type.
    repository : str
        Repository on the Hugging Face Hub that publishes the configuration.
    kinds : tuple of Layers
        Layers that keep a cache, by kind, in order of each kind's first layer; at least one has
        attention.
    parameters : float
        Number of parameters; 0 if not known.
    active : float
        Parameters active per token; 0: all.
    weights : float
        Bytes of the weights as published; 0: 2 per parameter.
    """

    name: str
    repository: str
    kinds: tuple[Layers, ...]
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
        """Return the bytes of host memory that a token's keys and values take in all layers.

        Layers that attend to a window count as if they kept every token; `layout` returns
        the groups that an engine makes of them.

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
            If the type is unknown, the heads cannot be divided evenly, or layers keep a state,
            which takes the same bytes for any number of tokens.
        """
        self._check(dtype, tensor_parallel)
        if any(one.state for one in self.kinds):
            raise ValueError(
                f"model must keep keys and values of every token to have bytes per token, got "
                f"{self.name}, some layers of which keep a state"
            )
        check_workers(self.name, self.kinds, tensor_parallel)
        copies = 1 if all(one.latent for one in self.kinds) else tensor_parallel
        return copies * sum(
            one.count * one.token_bytes(dtype, tensor_parallel) for one in self.kinds
        )

    def layout(self, dtype: str = "bfloat16", tensor_parallel: int = 1) -> GroupLayout:
        """Return the groups that an engine divides the layers into, and the bytes of a block.

        Parameters
        ----------
        dtype : str
            Element type of keys and values, a key of `DTYPE_BYTES`. States have the type that the
            configuration gives them.
        tensor_parallel : int
            Workers that a layer is divided among, as in `bytes_per_token`.

        Raises
        ------
        ValueError
            If the type is unknown, if heads or states cannot be divided evenly, or if an engine
            cannot keep blocks of all layers in one pool.
        """
        self._check(dtype, tensor_parallel)
        return group_layout(self.name, self.kinds, dtype, tensor_parallel)

    def _check(self, dtype: str, tensor_parallel: int) -> None:
        if dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ValueError(f"dtype must be one of {known}, got {describe(dtype)}")
        if tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be >= 1, got {tensor_parallel}")
