"""The built-in pool: slots of host memory, allocated by index.

Structure
    ``_num_fresh`` counts the ids that were allocated at least once; ``_freed`` holds freed ids,
    last freed last (a dict: a stack with membership).
Invariants
    Every freed id is below ``_num_fresh``, and ``_num_fresh <= num_blocks``. ``_lent`` holds the
    ids that `allocate_blocks` allocated and `free` may free; it omits the slots of managers.
Cost
    O(1) per block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn

import numpy as np

from kvoffload._checks import as_batch, check_block_size, check_num_blocks, check_status
from kvoffload.errors import backend_in_use, cannot_pickle, not_initialised
from kvoffload.types import BlockHash, BlockStatus, CPULoadStoreSpec

from .base import Backend

_SLOT: Final = "_slot"  # attribute of a status


class CPUBackend(Backend[CPULoadStoreSpec]):
    """A host memory pool of fixed size, whose slots are allocated by index.

    Fresh ids first, counting up from 0, even when blocks were freed; then the freed ids, last
    freed first.

    Parameters
    ----------
    block_size : int
        Tokens per block, >= 1.
    num_blocks : int
        Number of slots, ``0 ... 2**31 - 1``.
    """

    _num_blocks: int
    _num_fresh: int
    _freed: dict[int, None]
    _lent: set[int]

    def __init__(self, block_size: int, num_blocks: int) -> None:
        block_size = check_block_size(block_size)
        num_blocks = check_num_blocks(num_blocks)
        self._require_unused()
        super().__init__(block_size, "CPU")
        self._num_fresh = 0
        self._freed = {}
        self._lent = set()
        # Set last: no method works without it.
        self._num_blocks = num_blocks

    def _require_unused(self) -> None:
        """Raise RuntimeError while slots are allocated: their holders would lose them."""
        if "_num_blocks" in vars(self) and self._num_free() < self._num_blocks:
            raise backend_in_use(self._num_blocks - self._num_free())

    def _require_open(self) -> None:
        """Raise RuntimeError if the constructor has not completed."""
        _ = self._num_blocks

    def __getattr__(self, name: str) -> Any:
        if name in CPUBackend.__annotations__:
            raise not_initialised("backend")
        return super().__getattr__(name)

    def __reduce__(self) -> NoReturn:
        raise cannot_pickle(self)

    @property
    def num_blocks(self) -> int:
        """Number of slots, free or not."""
        return self._num_blocks

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that `allocate_blocks` can allocate now."""
        return self._num_free()

    def allocate_blocks(self, hashes: Iterable[bytes]) -> list[BlockStatus]:
        """Give each hash a slot; ValueError, with nothing changed, if too few are free."""
        self._require_open()
        batch = as_batch(hashes)
        num_free = self._num_free()
        if len(batch) > num_free:
            raise ValueError(
                f"hashes must not outnumber the {num_free} free blocks, got {len(batch)}"
            )
        statuses = self._allocate(batch)
        self._lent.update(status.block_id for status in statuses)
        return statuses

    def free(self, block: BlockStatus) -> None:
        """Free a slot; ValueError if `allocate_blocks` did not allocate it."""
        self._require_open()
        block_id = check_status(block, "block").block_id
        if block_id not in self._lent:
            raise ValueError(f"block must have a slot that allocate_blocks gave, got {block_id}")
        self._lent.remove(block_id)
        self._freed[block_id] = None

    def get_load_store_spec(
        self,
        hashes: Iterable[bytes],  # noqa: ARG002
        blocks: Iterable[BlockStatus],
    ) -> CPULoadStoreSpec:
        """Return the slots of `blocks`, in their order; `hashes` is ignored."""
        self._require_open()
        return new_spec([check_status(block, "each of blocks").block_id for block in blocks])

    # -- the trusted protocol of the Python manager skeleton --------------------------------

    def _num_free(self) -> int:
        return self._num_blocks - self._num_fresh + len(self._freed)

    def _allocate(self, batch: list[BlockHash]) -> list[BlockStatus]:
        num_fresh = min(len(batch), self._num_blocks - self._num_fresh)
        slots = list(range(self._num_fresh, self._num_fresh + num_fresh))
        self._num_fresh += num_fresh
        for _ in range(len(batch) - num_fresh):
            slot, _ = self._freed.popitem()
            slots.append(slot)
        return [_pooled_status(slot) for slot in slots]

    def _free(self, statuses: Iterable[BlockStatus]) -> None:
        self._freed.update(dict.fromkeys(_slots_of(statuses)))

    def _give_up(self, statuses: list[BlockStatus]) -> None:
        """Free the slots of a failed store; the first is allocated again first."""
        self._free(reversed(statuses))

    def _load_store_spec(
        self,
        batch: list[BlockHash],  # noqa: ARG002
        statuses: list[BlockStatus],
    ) -> CPULoadStoreSpec:
        return new_spec(_slots_of(statuses))

    def _release_all(self, statuses: list[BlockStatus]) -> None:
        """Free all slots of one manager; ids start at 0 again if no others are allocated."""
        if self._num_fresh - len(self._freed) == len(statuses):
            self._freed.clear()  # first: an interrupt loses slots, but allocates none twice
            self._num_fresh = 0
        else:
            self._free(statuses)

    def _free_all_but(self, statuses: Iterable[BlockStatus]) -> None:
        """Free every slot that is neither lent nor one of `statuses`; O(slots)."""
        used = self._lent.union(_slots_of(statuses))
        self._freed = {slot: None for slot in range(self._num_fresh) if slot not in used}

    def _check(self) -> None:
        if not 0 <= self._num_fresh <= self._num_blocks:
            raise AssertionError("0 <= fresh ids <= num_blocks")
        if not all(0 <= block_id < self._num_fresh for block_id in self._freed):
            raise AssertionError("freed ids were given out before")
        if not self._lent.isdisjoint(self._freed):
            raise AssertionError("what is lent is not free")


def new_spec(block_ids: list[int]) -> CPULoadStoreSpec:
    """Return the spec of slots that need no check."""
    spec = CPULoadStoreSpec.__new__(CPULoadStoreSpec)
    spec.block_ids = np.array(block_ids, dtype=np.int64)
    return spec


def _pooled_status(slot: int) -> BlockStatus:
    """Return a status that keeps its slot even if its ``block_id`` is overwritten."""
    status = BlockStatus(slot)
    vars(status)[_SLOT] = slot
    return status


def _slots_of(statuses: Iterable[BlockStatus]) -> list[int]:
    return [vars(status)[_SLOT] for status in statuses]


def keep_slot(live: BlockStatus, given: BlockStatus) -> None:
    """Copy the slot of a pool's status to the status that a user's policy derived from it."""
    if _SLOT in vars(given):
        vars(live)[_SLOT] = vars(given)[_SLOT]
