"""The base of Python policies: public methods that check arguments, then call trusted ones.

Invariants
    ``_resident`` maps the hash of every resident block to its live status, and is the object that
    in which the manager skeleton looks up hashes; it is emptied, never replaced.
    ``_released`` holds the released blocks, all of them resident, in eviction order.
    A call checks everything, then changes the state: an error of its own leaves no trace, while an
    exception from outside (KeyboardInterrupt, MemoryError) may leave an intermediate state.
Trusted protocol
    Methods with a leading underscore take checked arguments: a list of hashes that are ``bytes``,
    ``protected`` as a set. The Python manager skeleton calls these. It passes all blocks of a call
    together, while the compiled one passes them one by one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from kvoffload._checks import (
    as_batch,
    check_bool,
    check_cache_capacity,
    check_hash,
    check_int,
    check_status,
)
from kvoffload.errors import (
    block_already_resident,
    block_not_found,
    cannot_pickle,
    not_initialised,
    policy_owned,
)
from kvoffload.types import BLOCK_DTYPE, BlockHash, BlockStatus, Hints

from . import registry
from ._ownership import owner_of
from .base import CachePolicy, Room

#: Evicted blocks, in eviction order.
Victims = list[tuple[BlockHash, BlockStatus]]


def block_table(statuses: Iterable[BlockStatus]) -> npt.NDArray[np.void]:
    """Copy statuses into a read-only structured array, rows in no order."""
    # Copied first: a watch in another thread may read while the manager works.
    table = np.array([(s.ref_cnt, s.block_id) for s in list(statuses)], dtype=BLOCK_DTYPE)
    table.flags.writeable = False
    return table


class PythonPolicy(CachePolicy):
    """The public contract over the trusted methods of a Python twin."""

    __slots__ = ("__weakref__", "_cache_capacity", "_released", "_resident")

    _cache_capacity: int
    _released: dict[BlockHash, None]
    _resident: dict[BlockHash, BlockStatus]
    _blocks_type: ClassVar[type[dict[Any, Any]]] = dict

    def __init__(self, cache_capacity: int) -> None:
        # The base would assign the attribute, which is read-only here.
        capacity = check_cache_capacity(cache_capacity)
        self._require_free("__init__")
        self._cache_capacity = capacity
        self._released = {}
        self._reset()
        # Set last: no method works without it.
        self._resident = self._blocks_type()

    def _reset(self) -> None:
        """Begin with no blocks, and nothing learned."""

    def _require_ready(self) -> None:
        """Raise RuntimeError if the constructor has not completed."""
        _ = self._resident

    def _require_free(self, call: str) -> None:
        """Raise PolicyError if a manager owns the policy; managers do call a user's subclass."""
        if owner_of(self) is not None and registry.is_builtin(type(self), "py"):
            raise policy_owned(call)

    def _open_batch(self, hashes: Iterable[bytes], name: str, call: str) -> list[BlockHash]:
        """Return the checked batch of a `call` that changes the policy; PolicyError if owned."""
        self._require_ready()
        batch = as_batch(hashes, name)
        self._require_free(call)
        return batch

    def __getattr__(self, name: str) -> Any:
        # Reached only for a missing attribute: before __init__ has run, or an unknown name.
        if any(name in getattr(base, "__slots__", ()) for base in type(self).__mro__):
            raise not_initialised("policy")
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
        self._require_ready()
        key = check_hash(block_hash)
        live = BlockStatus(check_status(status).block_id)
        live.ref_cnt = status.ref_cnt
        self._require_free("insert")
        if key in self._resident:
            raise block_already_resident("insert", key)
        self._insert({key: live})

    def remove(self, block_hash: bytes) -> None:
        """Drop a resident block without remembering it."""
        self._require_ready()
        key = check_hash(block_hash)
        self._require_free("remove")
        if key not in self._resident:
            raise block_not_found("remove", key)
        self._remove([key])

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as recently used, last hash first."""
        batch = self._open_batch(hashes, "hashes", "touch")
        self._take_back(batch)
        self._touch(batch)

    def release(self, hashes: Iterable[bytes]) -> None:
        """Evict blocks before all others, until they are used again."""
        batch = self._open_batch(hashes, "hashes", "release")
        self._release(batch)

    def _extend_alone(self, hashes: Iterable[bytes]) -> None:
        """Touch blocks that extend a request, without beginning a new request."""
        batch = self._open_batch(hashes, "hashes", "touch")
        self._take_back(batch)
        self._extended(batch)

    def _finish_alone(self, hashes: Iterable[bytes], hints: Hints | None) -> None:
        """Implement `finished` for a policy that counts uses."""
        batch = self._open_batch(hashes, "hashes", "finished")
        self._take_back(batch)
        self._finished(batch, hints)

    def evict(
        self, n: int, protected: Iterable[bytes]
    ) -> list[tuple[BlockHash, BlockStatus]] | None:
        """Evict exactly `n` idle blocks that are not protected, or none."""
        self._require_ready()
        n = check_int("n", n, 0)
        guarded = self._open_batch(protected, "protected", "evict")
        if n > len(self._resident):
            return None
        return self._evict(n, set(guarded)) if n else []

    def make_room(
        self, hashes: Sequence[bytes], num_free: int, protected: Collection[bytes]
    ) -> Room | None:
        """Decide how many of `hashes` to store, and evict for them."""
        self._require_ready()
        batch = as_batch(hashes)
        num_free = check_int("num_free", num_free, 0)
        self._require_free("make_room")
        return super().make_room(batch, num_free, protected)

    def set_declining(self, allowed: bool) -> None:
        """Allow or forbid the policy to decline blocks that it could make room for."""
        self._require_ready()
        check_bool("allowed", allowed)

    def clear(self) -> None:
        """Drop every block, ghost and adaptive state."""
        self._require_ready()
        self._require_free("clear")
        self._clear()

    def __len__(self) -> int:
        """Return the number of resident blocks."""
        return len(self._resident)

    @property
    def num_released(self) -> int:
        """Number of released blocks, which leave before all others."""
        return len(self._released)

    @property
    def block_table(self) -> npt.NDArray[np.void]:
        """Statuses as a read-only structured array, ``(n,)`` for n resident blocks, in no order.

        The array is a snapshot and does not show later changes.
        """
        return block_table(self._resident.values())

    # -- for the views ---------------------------------------------------------------------

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        """Return the keys of a ring, from 0, least recent first."""
        raise IndexError(f"the policy has no ring {ring_index}")

    def _ring_length(self, ring_index: int) -> int:
        """Return the number of keys on a ring, from 0."""
        return len(self._ring(ring_index))

    def _ring_keys(self, ring_index: int) -> list[BlockHash]:
        """Return the keys of a ring, from 0, least recent first."""
        return list(self._ring(ring_index))

    def _ring_holds(self, ring_index: int, block_hash: object) -> bool:
        """Return whether a key is on a ring, from 0."""
        return type(block_hash) is bytes and block_hash in self._ring(ring_index)

    # -- the trusted protocol --------------------------------------------------------------

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        self._require_ready()
        return 0

    @abstractmethod
    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        """Make absent blocks resident, in order, keeping the status objects themselves."""

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        """Drop resident blocks without remembering them."""
        for block_hash in hashes:
            self._drop(block_hash)

    @abstractmethod
    def _touch(self, batch: list[BlockHash]) -> None:
        """Mark blocks as recently used, last hash first."""

    def _begun(self, batch: list[BlockHash], hints: Hints | None) -> None:
        """Use the blocks of a request for the first time."""
        del hints
        self._touch(batch)

    def _extended(self, batch: list[BlockHash]) -> None:
        """Use the blocks that extend a request; they do not begin a new request."""
        self._touch(batch)

    def _finished(self, batch: list[BlockHash], hints: Hints | None) -> None:
        """Use the blocks of a request for the last time; this counts as no further use."""
        del hints
        self._touch(batch)

    def _take_back(self, batch: list[BlockHash]) -> None:
        """Withdraw the release of blocks that are about to be used."""
        if self._released:
            for block_hash in batch:
                self._released.pop(block_hash, None)

    def _release(self, batch: list[BlockHash]) -> None:
        """Put blocks at the end of the released ones, last hash first."""
        for block_hash in reversed(batch):
            if block_hash in self._resident:
                self._released.setdefault(block_hash)

    def _drop(self, block_hash: BlockHash) -> BlockStatus:
        """Remove a block from the resident and from the released blocks."""
        self._released.pop(block_hash, None)
        return self._resident.pop(block_hash)

    def _choose_released(
        self, n: int, protected: Collection[BlockHash]
    ) -> dict[BlockHash, BlockStatus]:
        """Return at most `n` released blocks that may leave, in their order."""
        released = ((block_hash, self._resident[block_hash]) for block_hash in self._released)
        return dict(islice((one for one in released if may_leave(*one, protected)), n))

    def _missed(self, hashes: list[BlockHash]) -> None:
        """Handle the blocks that are about to be stored, if there is room."""

    @abstractmethod
    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        """Evict `n` idle blocks, or none."""

    def _clear(self) -> None:
        """Forget everything."""
        self._released.clear()
        self._resident.clear()
        self._reset()

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

    def _make_room_of_released(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, Victims]:
        """Admit the leading blocks that fit into free slots and slots of released blocks."""
        shortfall = max(0, len(hashes) - num_free)
        num_victims = len(self._choose_released(shortfall, protected))
        return min(len(hashes), num_free + num_victims), self._evict(num_victims, protected) or []

    def _check(self) -> None:
        """Verify every invariant; raise AssertionError with the broken one."""
        for block_hash, status in self._resident.items():
            require(type(block_hash) is bytes and len(block_hash) > 0, "hashes are bytes")
            require(status.ref_cnt >= -1, f"ref_cnt of {block_hash!r} is {status.ref_cnt}")
        require(self._released.keys() <= self._resident.keys(), "released blocks are resident")


def may_leave(block_hash: BlockHash, status: BlockStatus, protected: Collection[BlockHash]) -> bool:
    """Return whether a block is idle and not protected."""
    return status.ref_cnt == 0 and block_hash not in protected


def evictable(
    ring: Mapping[BlockHash, BlockStatus],
    protected: Collection[BlockHash],
    chosen: Collection[BlockHash] = (),
) -> Iterator[tuple[BlockHash, BlockStatus]]:
    """Yield the blocks of a ring that may leave and are not chosen, least recent first."""
    for block_hash, status in ring.items():
        if may_leave(block_hash, status, protected) and block_hash not in chosen:
            yield block_hash, status


def require(holds: bool, invariant: str) -> None:
    """Raise AssertionError naming the invariant unless it holds; only for ``_check``."""
    if not holds:
        raise AssertionError(invariant)
