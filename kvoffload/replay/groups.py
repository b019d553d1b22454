"""Groups of layers that keep their cache alike, and the pool of slots that they share.

An engine divides the layers of a model into groups. A block of any group fills one slot of one
pool, so a slot is as wide as the widest group. A prefix of a prompt has a key per group and chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Group", "GroupKind", "GroupLayout"]

GroupKind = Literal["full", "window", "state", "chunked"]

_SLOT_ALIGNMENT = 4096  # bytes; pools begin a slot at a multiple


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep their cache alike and are stored together.

    Attributes
    ----------
    kind : {"full", "window", "state", "chunked"}
        What a hit needs of the group: every chunk; those with the last ``window - 1`` tokens; the
        state at its end; or those of the last, not whole, part of `window` tokens.
    layers : int
        Number of layers.
    block_tokens : int
        Tokens that a block holds; of a state, tokens from one state to the next.
    window : int
        Tokens that a layer attends to, for ``"window"`` and ``"chunked"``; else 0.
    """

    kind: GroupKind
    layers: int
    block_tokens: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The groups of a model's cache in an engine's order, and the bytes of a block.

    Attributes
    ----------
    groups : tuple of Group
        The groups; at least one.
    block_bytes : int
        Bytes of a block of the widest group, over all of its layers and workers.
    """

    groups: tuple[Group, ...]
    block_bytes: int

    def slot_bytes(self, blocks_per_chunk: int = 1) -> int:
        """Return the bytes of a slot, which holds a chunk of `blocks_per_chunk` blocks."""
        size = self.block_bytes * blocks_per_chunk
        return -(-size // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
