"""The LRU manager over a pluggable backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from kvoffload.backends.base import Backend
from kvoffload.policies.builtin import LRUCachePolicy
from kvoffload.types import BlockHash, BlockStatus, Spec_co

from ._manager import BackendManager


class LRUOffloadingManager(BackendManager[Spec_co]):
    """A manager over a pluggable backend that evicts the least recently used blocks first.

    Parameters
    ----------
    backend : Backend
        The backend that holds the blocks: a ``CPUBackend`` or a user's own.
    enable_events : bool
        Collect events for `take_events`.

    Raises
    ------
    TypeError
        If `backend` is not a ``Backend``, or `enable_events` neither True nor False.
    RuntimeError
        If the constructor of `backend` has not run.
    BackendError
        If `backend` does not return the number of its free blocks.
    """

    __module__ = "kvoffload"

    def __init__(self, backend: Backend[Spec_co], enable_events: bool = False) -> None:
        self._open("lru", backend, enable_events)

    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]:
        """Resident blocks and their live statuses, least recent first; read-only."""
        return cast("LRUCachePolicy", self.policy).blocks
