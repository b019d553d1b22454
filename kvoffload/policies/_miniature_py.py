"""A miniature: a policy of small capacity that serves the sampled part of requests.

It holds keys, no slots, and its hits estimate those of a cache that is larger by the sampling
factor (Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", USENIX
ATC'17). While a cache stores blocks, they are not hits and may not leave, so the stores of a
miniature take some requests as well: the *lag*.

Invariants
    A block that was stored in a request is pending until the lag, in requests, has passed.
Cost
    That of the policy, per sampled block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import takewhile

from kvoffload.types import BlockHash, BlockStatus, Hints

from ._twin_py import PythonPolicy


class Miniature:
    """A small cache that serves the sampled part of requests."""

    __slots__ = ("_storing", "policy")

    def __init__(self, policy: PythonPolicy) -> None:
        self.policy = policy
        # By request, oldest first.
        self._storing: deque[tuple[int, Mapping[BlockHash, BlockStatus]]] = deque()

    def serve(self, batch: list[BlockHash], hints: Hints | None, request: int, lag: int) -> int:
        """Serve a request; return the number of leading blocks that were ready.

        Stores that began `lag` requests ago or earlier have ended. If the session ends, the
        request takes only free slots and those of released blocks.
        """
        policy, resident = self.policy, self.policy._resident
        while self._storing and request - self._storing[0][0] >= lag:
            for status in self._storing.popleft()[1].values():
                status.ref_cnt = 0
        policy._take_back(batch)
        policy._begun(batch, hints, None)
        ready = takewhile(lambda key: key in resident and resident[key].ref_cnt == 0, batch)
        num_hits = sum(1 for _ in ready)
        missing = [key for key in dict.fromkeys(batch) if key not in resident]
        if missing:
            ends = hints is not None and hints.ends
            decide = policy._make_room_of_released if ends else policy._make_room
            num_free = policy.cache_capacity - len(resident)
            num_admitted, _ = decide(missing, num_free, set(batch)) or (0, [])
            stored = {key: BlockStatus(0) for key in missing[:num_admitted]}
            policy._insert(stored)
            if stored:
                self._storing.append((request, stored))
        policy._finished(batch, None, None)
        return num_hits

    def finish(self, batch: list[BlockHash], hints: Hints | None) -> None:
        """Apply a hint that came at the end of a request."""
        self.policy._take_back(batch)
        self.policy._finished(batch, hints, None)

    def clear(self) -> None:
        """Forget everything."""
        self._storing.clear()
        self.policy._clear()
