"""Steps that the tests of policies take."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from kvoffload import BlockStatus
from kvoffload.testing.policies import check_invariants
from tests.blocks import names


def idle(block_id: int = 0) -> BlockStatus:
    """Return the status of a block that may leave."""
    status = BlockStatus(block_id)
    status.ref_cnt = 0
    return status


def pinned(block_id: int = 0) -> BlockStatus:
    """Return the status of a block that a load reads."""
    status = BlockStatus(block_id)
    status.ref_cnt = 1
    return status


def policy_of(
    twin: ModuleType, name: str, capacity: int, blocks: Iterable[bytes] = (), **options: Any
) -> Any:
    """Return a policy with `blocks` idle, inserted in this order."""
    policy = twin.policy_class(name)(capacity, **options)
    for block_id, block in enumerate(blocks):
        policy.insert(block, idle(block_id))
    return policy


def evict(policy: Any, n: int, *protected: bytes) -> str | None:
    """Evict, verify the invariants, and return the victims as letters."""
    evicted = policy.evict(n, set(protected))
    check_invariants(policy)
    return None if evicted is None else names(block for block, _ in evicted)


def request(manager: Any, hashes: list[bytes]) -> Any:
    """Serve one request by the protocol of a connector; return what `prepare_store` gave."""
    served = manager.begin(hashes)
    found = served.lookup()
    if found:
        served.prepare_load(0, found)
        served.complete_load(0, found)
    output = served.prepare_store()
    served.finish()
    served.complete_store()
    return output
