"""The ARC manager over a pluggable backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvoffload.backends.base import Backend
from kvoffload.types import BlockHash, BlockStatus, Spec_co

from ._over_backend import OverBackend


class ARCConstruction(OverBackend[Spec_co]):
    """Build ``ARCOffloadingManager`` and show its policy's lists, in both twins."""

    __slots__ = ()

    _policy_name = "arc"

    def __init__(self, backend: Backend[Spec_co], enable_events: bool = False) -> None:
        self._build(backend, enable_events)

    # Python names it where an argument is missing or unknown.
    __init__.__qualname__ = "ARCOffloadingManager.__init__"

    @property
    def t1(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once and their live statuses, least recent first; read-only."""
        t1: Mapping[BlockHash, BlockStatus] = self.policy.t1
        return t1

    @property
    def t2(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        t2: Mapping[BlockHash, BlockStatus] = self.policy.t2
        return t2

    @property
    def b1(self) -> Collection[BlockHash]:
        """Ghosts of T1, least recent first; read-only."""
        b1: Collection[BlockHash] = self.policy.b1
        return b1

    @property
    def b2(self) -> Collection[BlockHash]:
        """Ghosts of T2, least recent first; read-only."""
        b2: Collection[BlockHash] = self.policy.b2
        return b2

    @property
    def target_t1_size(self) -> float:
        """Size that T1 should have, in blocks, ``0.0 ... cache_capacity``; adapts."""
        target: float = self.policy.target_t1_size
        return target

    @property
    def cache_capacity(self) -> int:
        """Number of blocks that were free at construction."""
        capacity: int = self.policy.cache_capacity
        return capacity
