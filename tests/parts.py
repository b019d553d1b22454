"""A user's own policy and backend: correct, plain, and unlike the built-in ones inside."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from kvoffload import (
    Backend,
    BlockHash,
    BlockNotFoundError,
    BlockStatus,
    CachePolicy,
    CPULoadStoreSpec,
)


class ListPolicy(CachePolicy):
    """Least recently used, on one list of pairs; copies each status it is given."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.order: list[tuple[BlockHash, BlockStatus]] = []

    def __len__(self) -> int:
        return len(self.order)

    def clear(self) -> None:
        self.order = []

    def get(self, block_hash: BlockHash) -> BlockStatus | None:
        return next((status for block, status in self.order if block == block_hash), None)

    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        if self.get(block_hash) is not None:
            raise ValueError(f"block {block_hash.hex()} is resident")
        self.order.append((block_hash, self.own(status)))

    def own(self, status: BlockStatus) -> BlockStatus:
        """Return the status to keep."""
        own = BlockStatus(status.block_id)
        own.ref_cnt = status.ref_cnt
        return own

    def remove(self, block_hash: BlockHash) -> None:
        if self.get(block_hash) is None:
            raise BlockNotFoundError(f"block {block_hash.hex()} is not resident")
        self.order = [pair for pair in self.order if pair[0] != block_hash]

    def touch(self, hashes: Iterable[bytes]) -> None:
        for block_hash in reversed(list(hashes)):
            found = [pair for pair in self.order if pair[0] == block_hash]
            self.order = [pair for pair in self.order if pair[0] != block_hash] + found

    def evict(
        self, n: int, protected: Collection[bytes]
    ) -> list[tuple[BlockHash, BlockStatus]] | None:
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        idle = [pair for pair in self.order if pair[1].ref_cnt == 0 and pair[0] not in protected]
        if len(idle) < n:
            return None
        for block_hash, _ in idle[:n]:
            self.remove(block_hash)
        return idle[:n]


class KeepingListPolicy(ListPolicy):
    """The same, keeping the status objects it is given."""

    def own(self, status: BlockStatus) -> BlockStatus:
        return status


class RebuiltListPolicy(ListPolicy):
    """A policy without `clear`, which a reset of its manager builds anew."""

    clear = CachePolicy.clear


class OwnStatus(BlockStatus):
    """A status that a user's backend makes, with something of its own on it."""

    label: str = ""


class ListBackend(Backend):
    """A pool that hands out the lowest free id and remembers every call."""

    def __init__(self, block_size: int, num_blocks: int, medium: str = "SHELF") -> None:
        super().__init__(block_size, medium)
        self.unused = list(range(num_blocks))
        self.allocated: list[BlockStatus] = []
        self.freed: list[BlockStatus] = []
        self.asked: list[list[bytes]] = []

    def get_num_free_blocks(self) -> int:
        return len(self.unused)

    def allocate_blocks(self, hashes: list[BlockHash]) -> list[BlockStatus]:
        self.asked.append(list(hashes))
        made: list[BlockStatus] = []
        for block_hash in hashes:
            status = OwnStatus(self.unused.pop(0))
            status.label = block_hash.hex()
            made.append(status)
        self.allocated.extend(made)
        return made

    def free(self, block: BlockStatus) -> None:
        self.freed.append(block)
        self.unused = sorted([*self.unused, block.block_id])

    def get_load_store_spec(self, hashes: Iterable[bytes], blocks: Iterable[Any]) -> Any:
        return CPULoadStoreSpec([block.block_id for block in blocks])
