"""Groups that an engine divides a model's layers into, and the bytes of a block.

As vLLM 0.33 does it, with its prefix cache on and layers outside blocks in memory:

1. A *page* is what one layer keeps of a block on one worker. A block of attention is 16 tokens, 64
   with an index. With states it is the least multiple of 16 tokens, or of 128 for latent attention,
   whose page holds a state.
2. Layers that need the same tokens and blocks are one group.
3. Otherwise all pages become as large as the largest: a page that divides it takes more tokens,
   another is padded.
4. Each kind of layers is divided evenly into groups of at most as many layers as the rarest kind
   has; as the commonest, if that has less than 1.5 times as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvoffload.replay.groups import Group, GroupKind, GroupLayout

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes that an element of the KV cache takes."""

MAX_GROUPS = 256
"""Most groups of a model."""

_MODEL_BYTES = 2  # of an element of the model's own type, which states have unless they say more
_BLOCK_TOKENS = 16
_LATENT_STATE_TOKENS = 128  # with latent attention, blocks that hold states are multiples of it
_INDEX_BLOCK_TOKENS = 64  # of an index; the kernels take no other
_FP8_INDEXED = 656  # 512 of the latent, 16 of its scales, 128 of the rotary key in 16 bits


@dataclass(frozen=True, slots=True)
class State:
    """The state that a recurrent layer keeps, whatever the number of tokens.

    Attributes
    ----------
    heads : int
        Heads of the recurrent part, divided among the workers; 0 without one.
    head_elements : int
        Elements of a head's recurrent part.
    channels : int
        Channels of the convolution, divided among the workers; 0 without one.
    taps : int
        Elements per channel: one less than the kernel.
    groups : int
        Groups of channels of which each worker keeps at least one, beside `channels`.
    group_channels : int
        Channels of such a group.
    element_bytes : int
        Bytes of an element of the recurrent part.
    """

    heads: int = 0
    head_elements: int = 0
    channels: int = 0
    taps: int = 0
    groups: int = 0
    group_channels: int = 0
    element_bytes: int = _MODEL_BYTES

    def page(self, name: str, workers: int) -> int:
        """Return the bytes that one of `workers` keeps of a layer of the model `name`.

        Raises
        ------
        ValueError
            If heads or channels cannot be divided evenly.
        """
        groups = self.groups if self.groups % workers == 0 else workers
        channels = self.channels + groups * self.group_channels
        for count, what in ((self.heads, "heads"), (channels, "channels")):
            if count % workers:
                raise ValueError(
                    f"tensor_parallel must divide the {count} {what} of a state of {name}, got "
                    f"{workers}"
                )
        convolution = channels // workers * self.taps * _MODEL_BYTES
        return convolution + self.heads // workers * self.head_elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of a model that keep their cache alike.

    Attributes
    ----------
    kind : {"full", "window", "state", "chunked"}
        What a hit needs of them (see `Group`).
    count : int
        Number of layers.
    kv_heads : int
        KV heads per layer; 0 with latent attention and for a state.
    key_size : int
        Elements of a head's key.
    value_size : int
        Elements of a head's value.
    latent : int
        Elements of the compressed vector; 0 without latent attention.
    rotary : int
        Elements of the rotary key beside it.
    index_bytes : int
        Bytes per token of an index for sparse attention; 0 without one.
    window : int
        Tokens attended to, for ``"window"`` and ``"chunked"``; else 0.
    state : State or None
        The state kept in place of keys and values.
    """

    kind: GroupKind
    count: int
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    latent: int = 0
    rotary: int = 0
    index_bytes: int = 0
    window: int = 0
    state: State | None = None

    def token_bytes(self, dtype: str, workers: int = 1) -> int:
        """Return the bytes per token and layer that one of `workers` keeps; 0 for a state."""
        element = DTYPE_BYTES[dtype]
        if self.latent:
            if dtype == "fp8" and self.index_bytes:
                return _FP8_INDEXED + self.index_bytes
            return (self.latent + self.rotary) * element + self.index_bytes
        return max(1, self.kv_heads // workers) * (self.key_size + self.value_size) * element


def check_workers(name: str, kinds: Sequence[Layers], workers: int) -> None:
    """Raise ValueError unless the KV heads of a model's layers can be divided among workers."""
    for one in kinds:
        if one.kv_heads and max(one.kv_heads, workers) % min(one.kv_heads, workers):
            raise ValueError(
                f"tensor_parallel must divide the {one.kv_heads} KV heads of {name} or be a "
                f"multiple of them, got {workers}"
            )


@dataclass(frozen=True, slots=True)
class _Pages:
    """Layers with the page and the tokens that a block of theirs has on a worker."""

    layers: Layers
    page: int
    tokens: int


def group_layout(name: str, kinds: Sequence[Layers], dtype: str, workers: int) -> GroupLayout:
    """Divide the layers of a model, by kind in order of each kind's first layer, into groups.

    Raises
    ------
    ValueError
        If heads or states cannot be divided, if an engine could not make the pages equal, or if
        there are more than 256 groups.
    """
    check_workers(name, kinds, workers)
    pages = _pages_of(name, kinds, dtype, workers)
    one_copy = all(one.latent for one in kinds)  # each worker has the same: vLLM keeps it once
    copies = 1 if one_copy else workers
    if len({(one.layers.kind, one.layers.window, one.tokens) for one in pages}) == 1:
        first = pages[0]
        layers = sum(one.count for one in kinds)
        group = Group(first.layers.kind, layers, first.tokens, first.layers.window)
        size = sum(one.page * one.layers.count for one in pages)
        return GroupLayout((group,), size * copies)
    pages = _equal(name, pages)
    counts = [one.layers.count for one in pages]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    num_groups = sum(-(-count // size) for count in counts)
    if num_groups > MAX_GROUPS:
        raise ValueError(
            f"{name} is not counted: its layers must be at most {MAX_GROUPS} groups, got "
            f"{num_groups}"
        )
    groups = tuple(
        Group(one.layers.kind, layers, one.tokens, one.layers.window)
        for one in pages
        for layers in _divided(one.layers.count, size)
    )
    widest = max(group.layers for group in groups)
    return GroupLayout(groups, widest * pages[0].page * copies)


def _pages_of(name: str, kinds: Sequence[Layers], dtype: str, workers: int) -> list[_Pages]:
    """Return each kind's page and block before they are made equal."""
    indexed = any(one.index_bytes for one in kinds)
    tokens = _INDEX_BLOCK_TOKENS if indexed else _BLOCK_TOKENS
    states = (one.state.page(name, workers) for one in kinds if one.state is not None)
    largest = max(states, default=0)
    attention = next((one for one in kinds if one.state is None), None)
    if largest and attention is not None:
        per_token = attention.token_bytes(dtype, workers)
        step = _LATENT_STATE_TOKENS if attention.latent else _BLOCK_TOKENS
        tokens = step * -(-largest // (step * per_token))
        largest = tokens * per_token
    return [
        _Pages(one, largest if one.state else tokens * one.token_bytes(dtype, workers), tokens)
        for one in kinds
    ]


def _equal(name: str, pages: Sequence[_Pages]) -> list[_Pages]:
    """Return the layers with pages as large as the largest."""
    largest = max(one.page for one in pages)
    equal = []
    for one in pages:
        times, left = divmod(largest, one.page)
        if left and one.layers.latent:
            raise ValueError(
                f"{name} is not counted: a page of {one.page} bytes of latent attention does not "
                f"divide one of {largest}"
            )
        more = 1 if left or one.layers.state else times
        equal.append(replace(one, page=largest, tokens=one.tokens * more))
    return equal


def _divided(layers: int, size: int) -> list[int]:
    """Return the layers of each group when `layers` are dealt out to groups of at most `size`."""
    count = -(-layers // size)
    return [len(range(first, layers, count)) for first in range(count)]
