"""Documentation, constructors and views of the policies on lists, for both twins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus

from . import registry
from ._views import BlocksView, GhostsView

# Lists of SLRU and of ARC, from 0.
PROBATION, PROTECTED = range(2)
T1, T2, B1, B2 = range(4)


class _OnLists:
    """The public part of a policy, before its twin's ``Lists`` in the order of the bases."""

    __slots__ = ()

    _open: Callable[..., None]
    _require_ready: Callable[[], None]

    def __init__(self, cache_capacity: int) -> None:
        self._open(cache_capacity)


class LRU(_OnLists):
    """A policy that evicts the least recently used idle block.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.
    """

    __slots__ = ()

    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]:
        """Resident blocks and their live statuses, least recent first; read-only."""
        return BlocksView(self, 0)


class SLRU(_OnLists):
    """A policy that evicts the least recently used block that was not seen again.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    protected : float
        Share of the capacity for blocks that were seen again, ``0.0 ... 1.0``; 0 is LRU.

    References
    ----------
    Karedla, Love & Wherry, "Caching Strategies to Improve Disk System Performance", IEEE Computer
    27(3), 1994.
    """

    __slots__ = ()

    _protected_size: int

    def __init__(self, cache_capacity: int, *, protected: float = 0.5) -> None:
        capacity = check_cache_capacity(cache_capacity)
        share = registry.entry("slru").option("protected").check(protected)
        self._open(capacity, int(share * capacity))

    @property
    def probation(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once or demoted and their live statuses, least recent first; read-only."""
        return BlocksView(self, PROBATION)

    @property
    def protected(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        return BlocksView(self, PROTECTED)

    @property
    def protected_size(self) -> int:
        """Number of blocks that protected should hold at most."""
        self._require_ready()
        return self._protected_size


class LFU(_OnLists):
    """A policy that evicts the least frequently used block; old counts fade as the cache ages.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.

    References
    ----------
    Arlitt, Cherkasova, Dilley, Friedrich & Jin, "Evaluating Content Management Techniques for Web
    Proxy Caches", Workshop on Internet Server Performance, 1999.
    """

    __slots__ = ()

    _age: int

    @property
    def age(self) -> int:
        """The least priority that a block can have."""
        self._require_ready()
        return self._age


class ARC(_OnLists):
    """A policy that balances recency and frequency by adaptive replacement, in vLLM's variant.

    Parameters
    ----------
    cache_capacity : int
        Upper bound of the target size of T1, and of each ghost list.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ()

    _target: float

    @property
    def t1(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once and their live statuses, least recent first; read-only."""
        return BlocksView(self, T1)

    @property
    def t2(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        return BlocksView(self, T2)

    @property
    def b1(self) -> AbstractSet[BlockHash]:
        """Ghosts of T1, least recent first; read-only."""
        return GhostsView(self, B1)

    @property
    def b2(self) -> AbstractSet[BlockHash]:
        """Ghosts of T2, least recent first; read-only."""
        return GhostsView(self, B2)

    @property
    def target_t1_size(self) -> float:
        """Target size of T1 in blocks, ``0.0 ... cache_capacity``; adapts."""
        self._require_ready()
        return self._target


class ARCClassic(ARC):
    """A policy that balances recency and frequency by adaptive replacement, as published.

    Parameters
    ----------
    cache_capacity : int
        The paper's c: upper bound of the target size of T1, and of T1 and its ghosts together.

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
    """

    __slots__ = ()


def set_target(policy: Any, size: float) -> None:
    """Set the target size of T1, in blocks, as vLLM's own policy allows."""
    policy._target = size
