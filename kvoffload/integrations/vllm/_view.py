"""What a manager's policy holds, under the names that vLLM's own policies have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

__all__ = ["PolicyView"]


class PolicyView:
    """Show the state of a manager's policy; the statuses are copies.

    ``chunks`` (LRU), ``t1``, ``t2``, ``b1``, ``b2`` (ARC) are ordered dicts, least to most recent.

    Parameters
    ----------
    manager : KVOffloadManager
        Whose policy.
    rules : RequestRules
        The compiled rules over that policy.
    """

    def __init__(self, manager: Any, rules: Any) -> None:
        self._manager = manager
        self._rules = rules

    @property
    def cache_capacity(self) -> int:
        """Chunks that the manager has room for."""
        capacity: int = self._manager._num_chunks
        return capacity

    @property
    def target_t1_size(self) -> float:
        """ARC's target for the number of chunks in T1; can be set."""
        target: float = self._rules.target_t1_size
        return target

    @target_t1_size.setter
    def target_t1_size(self, value: float) -> None:
        self._rules.target_t1_size = value

    def get(self, key: bytes) -> ChunkStatus | None:
        """Return a copy of the status of a resident chunk, or None."""
        found = self._manager._chunk(key)
        return None if found is None else _status(*found)

    def evict(self, n: int, protected: Collection[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        """Evict exactly `n` idle chunks that are not protected, or none: None.

        Unlike vLLM's, it gives the chunk ids back to the manager's pool.
        """
        evicted = self._manager._evict(n, protected)
        if evicted is None:
            return None
        return [(key, _status(0, chunk_id)) for key, chunk_id in evicted]

    def __getattr__(self, name: str) -> OrderedDict[bytes, Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        keys = self._rules.keys(name)
        if name in ("b1", "b2"):
            return OrderedDict.fromkeys(keys)
        return OrderedDict((key, self.get(key)) for key in keys)


def _status(ref_cnt: int, chunk_id: int) -> ChunkStatus:
    status = ChunkStatus(chunk_id)
    status.ref_cnt = ref_cnt
    return status
