"""Read-only views of a policy's rings, for both twins.

For each ring, by its index from 0, a policy provides its length, its keys least recent first, and
whether a key is on it. A view holds no data of its own, so it always shows the present state.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any

from kvoffload.types import BlockHash, BlockStatus


class _RingView:
    """The keys of a ring of a built-in policy, by its index from 0; base of both views."""

    __slots__ = ("__weakref__", "_policy", "_ring_index")

    def __init__(self, policy: Any, ring_index: int) -> None:
        self._policy = policy
        self._ring_index = ring_index
        len(self)  # raises RuntimeError if the policy's constructor has not completed

    def __len__(self) -> int:
        return int(self._policy._ring_length(self._ring_index))

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._policy._ring_keys(self._ring_index))

    def __reversed__(self) -> Iterator[BlockHash]:
        return reversed(list(self))

    def __contains__(self, block_hash: object) -> bool:
        return bool(self._policy._ring_holds(self._ring_index, block_hash))


class BlocksView(_RingView, Mapping[BlockHash, BlockStatus]):
    """The blocks of one ring with their live statuses, least recent first.

    Iteration covers the blocks present when it began; `items` and `values` skip blocks that have
    left since. Two views are equal if they hold the same blocks.
    """

    __slots__ = ()

    def __getitem__(self, block_hash: BlockHash) -> BlockStatus:
        status: BlockStatus | None = self._policy.get(block_hash) if block_hash in self else None
        if status is None:
            raise KeyError(block_hash)
        return status

    def items(self) -> ItemsView[BlockHash, BlockStatus]:
        """Return a view of the pairs of block and status."""
        return _Items(self)

    def values(self) -> ValuesView[BlockStatus]:
        """Return a view of the statuses."""
        return _Values(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.items())!r})"


class _Items(ItemsView[BlockHash, BlockStatus]):
    """The pairs of a view; a block that leaves during iteration is skipped."""

    __slots__ = ()

    _mapping: BlocksView

    def __iter__(self) -> Iterator[tuple[BlockHash, BlockStatus]]:
        for block_hash in self._mapping:
            status = self._mapping.get(block_hash)
            if status is not None:
                yield block_hash, status


class _Values(ValuesView[BlockStatus]):
    """The statuses of a view; a block that leaves during iteration is skipped."""

    __slots__ = ()

    _mapping: BlocksView

    def __iter__(self) -> Iterator[BlockStatus]:
        return (status for _, status in _Items(self._mapping))


class GhostsView(_RingView, AbstractSet[BlockHash]):
    """The ghosts of one ring, least recent first.

    Iteration covers the ghosts present when it began. Two views are equal if they hold the same
    ghosts.
    """

    __slots__ = ()

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return set(it)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"
