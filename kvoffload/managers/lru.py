"""The LRU manager over a pluggable backend."""

from __future__ import annotations

from collections.abc import Mapping

from kvoffload.backends.base import Backend
from kvoffload.types import BlockHash, BlockStatus, Spec_co

from ._over_backend import OverBackend


class LRUConstruction(OverBackend[Spec_co]):
    """Build ``LRUOffloadingManager`` and show its policy's order, in both twins."""

    __slots__ = ()

    _policy_name = "lru"

    def __init__(self, backend: Backend[Spec_co], enable_events: bool = False) -> None:
        self._build(backend, enable_events)

    # Python names it where an argument is missing or unknown.
    __init__.__qualname__ = "LRUOffloadingManager.__init__"

    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]:
        """Resident blocks and their live statuses, least recent first; read-only."""
        blocks: Mapping[BlockHash, BlockStatus] = self.policy.blocks
        return blocks
