"""Whole replays: time, and whether both implementations still decide the same."""

import hashlib
import random
from typing import Any

from .common import IMPLEMENTATIONS, LARGEST, block_hashes, new_manager, policy_names


def make_requests(count: int, seed: int = 1) -> list[list[bytes]]:
    """Make requests over 200 shared prefixes with tails of their own: some hits, many misses."""
    rng = random.Random(seed)
    prefixes = [block_hashes(1_000 * number, rng.randrange(4, 64)) for number in range(200)]
    return [
        prefixes[min(int(rng.expovariate(0.05)), 199)]
        + block_hashes(1_000_000 + 100 * number, rng.randrange(1, 32))
        for number in range(count)
    ]


def replay(manager: Any, requests: list[list[bytes]]) -> str:
    """Make an engine's calls for each request; return a digest of every decision."""
    digest = hashlib.sha256()
    for request in requests:
        manager.touch(request)
        hits = manager.lookup(request)
        if hits:
            manager.prepare_load(request[:hits])
            manager.complete_load(request[:hits])
        output = manager.prepare_store(request)
        manager.touch(request)
        if output is not None:
            manager.complete_store(output.block_hashes_to_store)
            digest.update(b"".join(output.block_hashes_evicted))
        digest.update(b"%d" % hits)
    return digest.hexdigest()


class Replay:
    """A whole generated trace of 2,000 requests."""

    params = (IMPLEMENTATIONS, policy_names(), sorted({min(1_000, LARGEST), min(10_000, LARGEST)}))
    param_names = ("implementation", "policy", "capacity")
    timeout = 300

    def setup(self, name: str, policy: str, capacity: int) -> None:
        """Make the trace."""
        new_manager(name, policy, capacity)
        self.requests = make_requests(2_000)

    def time_replay(self, name: str, policy: str, capacity: int) -> None:
        replay(new_manager(name, policy, capacity), self.requests)


class Equality:
    """Whether the implementations decide the same: 1, or 0 if they ever do not."""

    params = (policy_names(), [100, 1_000])
    param_names = ("policy", "capacity")

    def track_equal_results(self, policy: str, capacity: int) -> int:
        requests = make_requests(500)
        decisions = {
            replay(new_manager(name, policy, capacity), requests) for name in IMPLEMENTATIONS
        }
        return int(len(decisions) == 1)


Equality.track_equal_results.unit = "equal"  # type: ignore[attr-defined]
