"""The ARC manager over a pluggable backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

from kvoffload.backends.base import Backend
from kvoffload.policies.builtin import ARCCachePolicy
from kvoffload.types import BlockHash, BlockStatus, Spec_co

from ._manager import BackendManager


class ARCOffloadingManager(BackendManager[Spec_co]):
    """A manager over a pluggable backend, with vLLM's variant of adaptive replacement.

    Parameters
    ----------
    backend : Backend
        The backend that holds the blocks. Its present number of free blocks is the
        ``cache_capacity``.
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

    References
    ----------
    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
    """

    __module__ = "kvoffload"

    def __init__(self, backend: Backend[Spec_co], enable_events: bool = False) -> None:
        self._open("arc", backend, enable_events)

    @property
    def _arc(self) -> ARCCachePolicy:
        return cast("ARCCachePolicy", self.policy)

    @property
    def t1(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen once and their live statuses, least recent first; read-only."""
        return self._arc.t1

    @property
    def t2(self) -> Mapping[BlockHash, BlockStatus]:
        """Blocks seen again and their live statuses, least recent first; read-only."""
        return self._arc.t2

    @property
    def b1(self) -> Collection[BlockHash]:
        """Ghosts of T1, least recent first; read-only."""
        return self._arc.b1

    @property
    def b2(self) -> Collection[BlockHash]:
        """Ghosts of T2, least recent first; read-only."""
        return self._arc.b2

    @property
    def target_t1_size(self) -> float:
        """Target size of T1 in blocks, ``0.0 ... cache_capacity``; adapts."""
        return self._arc.target_t1_size

    @property
    def cache_capacity(self) -> int:
        """Number of blocks that were free at construction."""
        return self._arc.cache_capacity
