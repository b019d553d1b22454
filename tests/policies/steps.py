"""Steps that the tests of policies take."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from kvoffload import BlockStatus, Hints
from kvoffload.testing.policies import check_invariants
from tests.blocks import block_hashes, names


def idle(block_id: int = 0) -> BlockStatus:
    """Return the status of a block that may leave."""
    status = BlockStatus(block_id)
    status.ref_cnt = 0
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


def request(
    manager: Any, hashes: list[bytes], hints: Hints | None = None, now: float | None = None
) -> Any:
    """Serve one request by the protocol of a connector; return what `prepare_store` gave."""
    served = manager.begin(hashes, hints=hints, now=now)
    found = served.lookup()
    if found:
        served.prepare_load(0, found)
        served.complete_load(0, found)
    output = served.prepare_store()
    served.finish()
    served.complete_store()
    return output


def announced(seed: int, requests: int) -> list[tuple[list[bytes], float, Hints]]:
    """Return the requests of sessions that return when they say, those of two kinds."""
    draw = random.Random(seed)
    times: list[tuple[float, int]] = [(draw.uniform(0, 50), number) for number in range(60)]
    lengths = dict.fromkeys(range(60), 4)
    rows = []
    for _ in range(requests):
        times.sort()
        now, number = times.pop(0)
        lengths[number] += draw.randrange(1, 3)
        gap = draw.choice([3.0, 300.0])
        blocks = [1, 2, *range(number * 10_000, number * 10_000 + lengths[number])]
        rows.append((block_hashes(*blocks), now, Hints(expect_s=gap)))
        times.append((now + gap * draw.uniform(0.9, 1.1), number))
    return rows
