"""The built-in pool: slots of host memory, given out by index.

Structure
    ``_num_fresh`` counts the ids that were given out at least once; ``_freed`` holds those that
    came back, last freed last (a dict: a stack with membership).
Invariants
    Every freed id is below ``_num_fresh``, and ``_num_fresh <= num_blocks``.
Cost
    O(1) a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from kvoffload._checks import as_batch, check_num_blocks, check_status
from kvoffload.errors import cannot_pickle
from kvoffload.types import BlockHash, BlockStatus, CPULoadStoreSpec

from .base import Backend


class CPUBackend(Backend[CPULoadStoreSpec]):
    """Give out the slots of a host memory pool of fixed size.

    Fresh ids first, counting up from 0, even when blocks were freed; then the freed ids, last
    freed first.

    Parameters
    ----------
    block_size : int
        Tokens a block, >= 1.
    num_blocks : int
        Number of slots, ``0 ... 2**31 - 1``.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, "CPU")
        self._num_blocks = check_num_blocks(num_blocks)
        self._num_fresh = 0
        self._freed: dict[int, None] = {}

    def __reduce__(self) -> NoReturn:
        raise cannot_pickle(self)

    @property
    def num_blocks(self) -> int:
        """Number of slots, free or not."""
        return self._num_blocks

    def get_num_free_blocks(self) -> int:
        """Return how many blocks `allocate_blocks` can give now."""
        return self._num_blocks - self._num_fresh + len(self._freed)

    def allocate_blocks(self, hashes: Iterable[bytes]) -> list[BlockStatus]:
        """Give each hash a slot; ValueError, with nothing changed, if too few are free."""
        batch = as_batch(hashes)
        num_free = self.get_num_free_blocks()
        if len(batch) > num_free:
            raise ValueError(
                f"hashes must not outnumber the {num_free} free blocks, got {len(batch)}"
            )
        return self._allocate(batch)

    def free(self, block: BlockStatus) -> None:
        """Take back a slot; ValueError if it is not given out."""
        block_id = check_status(block).block_id
        if not 0 <= block_id < self._num_fresh or block_id in self._freed:
            raise ValueError(f"block must have a slot that is given out, got {block_id}")
        self._freed[block_id] = None

    def get_load_store_spec(
        self,
        hashes: Iterable[bytes],  # noqa: ARG002
        blocks: Iterable[BlockStatus],
    ) -> CPULoadStoreSpec:
        """Return the slots of `blocks`, in their order; `hashes` is not looked at."""
        return self._load_store_spec([], [check_status(block) for block in blocks])

    # -- the trusted protocol of the Python manager skeleton --------------------------------

    def _num_free(self) -> int:
        return self._num_blocks - self._num_fresh + len(self._freed)

    def _allocate(self, batch: list[BlockHash]) -> list[BlockStatus]:
        num_fresh = min(len(batch), self._num_blocks - self._num_fresh)
        statuses = [BlockStatus(self._num_fresh + i) for i in range(num_fresh)]
        self._num_fresh += num_fresh
        num_reused = len(batch) - num_fresh
        statuses.extend(BlockStatus(self._freed.popitem()[0]) for _ in range(num_reused))
        return statuses

    def _free(self, status: BlockStatus) -> None:
        # An id that is not given out is ignored: somebody freed it behind the manager's back.
        if 0 <= status.block_id < self._num_fresh:
            self._freed[status.block_id] = None

    def _load_store_spec(
        self,
        batch: list[BlockHash],  # noqa: ARG002
        statuses: list[BlockStatus],
    ) -> CPULoadStoreSpec:
        spec = CPULoadStoreSpec.__new__(CPULoadStoreSpec)
        spec.block_ids = np.array([status.block_id for status in statuses], dtype=np.int64)
        return spec

    def _release_all(self, statuses: Iterable[BlockStatus]) -> None:
        """Take back all slots of one manager: from id 0 again if nobody else holds any."""
        statuses = list(statuses)
        if self._num_fresh - len(self._freed) == len(statuses):
            self._num_fresh = 0
            self._freed.clear()
        else:
            for status in statuses:
                self._free(status)

    def _check(self) -> None:
        if not 0 <= self._num_fresh <= self._num_blocks:
            raise AssertionError("0 <= fresh ids <= num_blocks")
        if not all(0 <= block_id < self._num_fresh for block_id in self._freed):
            raise AssertionError("freed ids were given out before")
