"""Read-only views of a compiled policy's rings, in the form of the Python twin's mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from kvoffload.types import BlockHash, BlockStatus


class BlocksView(Mapping[BlockHash, BlockStatus]):
    """Show the blocks of one ring with their live statuses, least recent first.

    Parameters
    ----------
    policy : CachePolicy
        A compiled policy.
    number : int
        Its ring, from 0.
    """

    __slots__ = ("_number", "_policy")

    def __init__(self, policy: Any, number: int) -> None:
        self._policy = policy
        self._number = number

    def __len__(self) -> int:
        length: int = self._policy._ring_length(self._number)
        return length

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._policy._ring_keys(self._number))

    def __contains__(self, block_hash: object) -> bool:
        holds: bool = self._policy._ring_holds(self._number, block_hash)
        return holds

    def __getitem__(self, block_hash: BlockHash) -> BlockStatus:
        if block_hash not in self:
            raise KeyError(block_hash)
        status: BlockStatus = self._policy.get(block_hash)
        return status

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


class GhostsView(AbstractSet[BlockHash]):
    """Show the ghosts of one ring, least recent first.

    Parameters
    ----------
    policy : CachePolicy
        A compiled policy.
    number : int
        Its ring, from 0.
    """

    __slots__ = ("_number", "_policy")

    def __init__(self, policy: Any, number: int) -> None:
        self._policy = policy
        self._number = number

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return set(it)

    def __len__(self) -> int:
        length: int = self._policy._ring_length(self._number)
        return length

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._policy._ring_keys(self._number))

    def __contains__(self, block_hash: object) -> bool:
        holds: bool = self._policy._ring_holds(self._number, block_hash)
        return holds

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"
