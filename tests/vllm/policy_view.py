"""A view of the policy of a manager of this package, with the names of vLLM's own policies.

vLLM's own tests find it where vLLM's manager has its policy: `upstream/kvoffload_managers.py` loads
this file by its path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

ARC_LISTS = ("t1", "t2", "b1", "b2")


class PolicyView:
    """The state of a manager's policy; the statuses are copies.

    ``chunks`` (LRU), ``t1``, ``t2``, ``b1``, ``b2`` (ARC) are ordered dicts, least to most recent.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._own = manager._rules.policy

    @property
    def cache_capacity(self) -> int:
        return self._manager._num_chunks

    @property
    def target_t1_size(self) -> float:
        return self._own.target_t1_size

    @target_t1_size.setter
    def target_t1_size(self, value: float) -> None:
        self._own._target = float(value)

    def get(self, key: bytes) -> ChunkStatus | None:
        found = self._manager._chunk(key)
        if found is None:
            return None
        status = ChunkStatus(found[1])
        status.ref_cnt = found[0]
        return status

    def evict(self, n: int, protected: Collection[bytes]) -> list[tuple[bytes, None]] | None:
        """Evict exactly `n` idle, unprotected chunks, or evict none and return None.

        A store of unknown chunks evicts them, and fails; protected ones are pinned meanwhile.
        """
        manager = self._manager
        held = [key for key in protected if (found := manager._chunk(key)) and found[0] >= 0]
        free = manager._num_chunks - len(manager.block_table)
        new = [b"evict %d" % number for number in range(free + n)]
        manager._pin(held)
        try:
            output = manager.prepare_store(new, ReqContext("evict"))
        finally:
            manager._unpin(held)
        if output is None:
            return None
        manager.complete_store(output.keys_to_store, ReqContext("evict"), False)
        return [(key, None) for key in output.evicted_keys]

    def __getattr__(self, name: str) -> OrderedDict[bytes, Any]:
        own = self._own
        if name == "chunks" and hasattr(own, "_keys"):
            keys = own._keys()
        elif name in ARC_LISTS and hasattr(own, "target_t1_size"):
            keys = own._ring_keys(ARC_LISTS.index(name))
        else:
            raise AttributeError(name)
        if name in ("b1", "b2"):
            return OrderedDict.fromkeys(keys)
        return OrderedDict((key, self.get(key)) for key in keys)


def policy_of(manager: Any) -> Any:
    """Return the policy of vLLM's manager, or the view of one of this package."""
    return PolicyView(manager) if hasattr(manager, "_rules") else manager._policy
