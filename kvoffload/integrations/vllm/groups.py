"""The KV groups of a model, by the chunks that a hit needs of them."""

from __future__ import annotations

from dataclasses import dataclass

from ._upstream import OffloadingConfig, installed_release


@dataclass(frozen=True)
class KVGroups:
    """The KV groups of a model: id -> tokens of a chunk, in the order of the ids."""

    full: dict[int, int]  # a hit needs all their chunks; vLLM looks them up first, in this order
    others: dict[int, int]  # windows and states, of which a hit needs the last chunks

    @classmethod
    def from_config(cls, config: OffloadingConfig) -> KVGroups | None:
        """Return the groups of a configuration; None if it does not have their kinds."""
        if not installed_release().group_kinds:
            return None
        full: dict[int, int] = {}
        others: dict[int, int] = {}
        for group in config.groups:
            kind = full if group.sliding_window_size_in_chunks is None else others
            kind[group.group_id] = group.tokens_per_block * config.cache.blocks_per_chunk
        return cls(full, others)

    @property
    def align(self) -> int:
        """Tokens at whose multiples vLLM keeps windows and states, unless it keeps all."""
        return max((self.full or self.others).values())
