"""What every Python policy shares: the public methods, as checks before the trusted ones.

Invariants
    ``_resident`` maps the hash of every resident block to its live status, and is the object that
    the manager skeleton looks hashes up in; it is emptied, never replaced.
Trusted protocol
    Methods with a leading underscore take what is already checked: a list of hashes that are
    ``bytes``, ``protected`` as a set. The Python manager skeleton calls these.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvoffload._checks import as_batch, check_cache_capacity, check_hash, check_int, check_status
from kvoffload.errors import (
    block_already_resident,
    block_not_found,
    cannot_pickle,
    policy_not_initialised,
)
from kvoffload.types import BlockHash, BlockStatus

from .base import CachePolicy

#: Who leaves, in eviction order.
Victims = list[tuple[BlockHash, BlockStatus]]

#: Rows of ``block_table``, laid out as ``BlockStatus``.
BLOCK_DTYPE = np.dtype(
    {"names": ["ref_cnt", "block_id"], "formats": [np.int32, np.int64], "offsets": [0, 8]}
)


def block_table(statuses: Iterable[BlockStatus]) -> npt.NDArray[np.void]:
    """Copy statuses into a read-only structured array, rows in no order."""
    table = np.array([(s.ref_cnt, s.block_id) for s in statuses], dtype=BLOCK_DTYPE)
    table.flags.writeable = False
    return table


class PythonPolicy(CachePolicy):
    """Turn the trusted methods of a Python twin into the public contract."""

    __slots__ = ("_cache_capacity", "_resident")

    _cache_capacity: int
    _resident: dict[BlockHash, BlockStatus]

    def __init__(self, cache_capacity: int) -> None:
        # The base would assign the attribute, which is read-only here.
        self._cache_capacity = check_cache_capacity(cache_capacity)
        self._resident = {}

    def __getattr__(self, name: str) -> Any:
        # Reached only where an attribute is missing: before __init__ has run, or unknown at all.
        if any(name in getattr(base, "__slots__", ()) for base in type(self).__mro__):
            raise policy_not_initialised()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> NoReturn:
        raise cannot_pickle(self)

    @property
    def cache_capacity(self) -> int:  # type: ignore[override]  # read-only in the built-in ones
        """Number of blocks that the manager has room for."""
        return self._cache_capacity

    # -- the public contract ---------------------------------------------------------------

    def get(self, block_hash: bytes) -> BlockStatus | None:
        """Return the live status of a resident block, or None."""
        return self._resident.get(check_hash(block_hash))

    def insert(self, block_hash: bytes, status: BlockStatus) -> None:
        """Make a block resident, as the most recent of those inserted."""
        key = check_hash(block_hash)
        live = BlockStatus(check_status(status).block_id)
        live.ref_cnt = status.ref_cnt
        if key in self._resident:
            raise block_already_resident("insert", key)
        self._insert(key, live)

    def remove(self, block_hash: bytes) -> None:
        """Drop a resident block without remembering it."""
        key = check_hash(block_hash)
        if key not in self._resident:
            raise block_not_found("remove", key)
        self._remove(key)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as recently used, last hash first."""
        self._touch(as_batch(hashes))

    def evict(
        self, n: int, protected: Iterable[bytes]
    ) -> list[tuple[BlockHash, BlockStatus]] | None:
        """Evict exactly `n` idle blocks that are not protected, or none."""
        n = check_int("n", n, 0)
        return self._evict(n, set(as_batch(protected, "protected")))

    def clear(self) -> None:
        """Drop every block, ghost and adaptive state."""
        self._clear()

    def __len__(self) -> int:
        """Return the number of resident blocks."""
        return len(self._resident)

    @property
    def block_table(self) -> npt.NDArray[np.void]:
        """Statuses as a read-only structured array, rows in no order; zero-copy where compiled."""
        return block_table(self._resident.values())

    # -- the trusted protocol --------------------------------------------------------------

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return 0

    @abstractmethod
    def _insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Make an absent block resident, keeping the status object itself."""

    @abstractmethod
    def _remove(self, block_hash: BlockHash) -> None:
        """Drop a resident block."""

    @abstractmethod
    def _touch(self, batch: list[BlockHash]) -> None:
        """Mark blocks as recently used, last hash first."""

    @abstractmethod
    def _evict(
        self, n: int, protected: Collection[BlockHash]
    ) -> list[tuple[BlockHash, BlockStatus]] | None:
        """Evict `n` idle blocks or none."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        """Yield every resident status in the order in which a reset frees them."""

    def _make_room(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, Victims] | None:
        """Decide how many of `hashes` to store, and evict for them."""
        shortfall = len(hashes) - num_free
        if shortfall <= 0:
            return len(hashes), []
        victims = self._evict(shortfall, protected)
        return None if victims is None else (len(hashes), victims)

    def _check(self) -> None:
        """Verify every invariant; raise AssertionError with the broken one."""
        for block_hash, status in self._resident.items():
            require(type(block_hash) is bytes and len(block_hash) > 0, "hashes are bytes")
            require(status.ref_cnt >= -1, f"ref_cnt of {block_hash!r} is {status.ref_cnt}")


def evictable(
    ring: Mapping[BlockHash, BlockStatus], protected: Collection[BlockHash]
) -> Iterator[tuple[BlockHash, BlockStatus]]:
    """Yield the blocks of a ring that may leave, least recent first."""
    for block_hash, status in ring.items():
        if status.ref_cnt == 0 and block_hash not in protected:
            yield block_hash, status


def require(holds: bool, invariant: str) -> None:
    """Raise AssertionError naming the invariant unless it holds; for ``_check`` alone."""
    if not holds:
        raise AssertionError(invariant)
