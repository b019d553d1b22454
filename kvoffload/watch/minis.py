"""Miniature managers: the deployed classes at a fraction of the size, fed the sampled keys.

Source
    Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", ATC 2017.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvoffload import CPUOffloadingManager, Request
from kvoffload.managers._watching import FINISHED, SampledRequest
from kvoffload.policies import registry
from kvoffload.types import Hints

__all__ = ["Miniature", "Totals", "miniature_bias"]

BIAS = 0.0075
"""Possible error of a miniature of 512 slots that its quarters do not show; with n slots it is
proportional to 1 / sqrt(n). Measured with `asv_benchmarks/watch.py policies`."""
LEARNT = 4
"""A policy's points are marked if the requested blocks per reset are fewer than this multiple of
the blocks that it learns from."""


def miniature_bias(slots: float) -> float:
    """Return the possible error of a miniature with `slots` slots in four quarters."""
    return BIAS * math.sqrt(512 / slots) if slots else math.inf


class Totals(NamedTuple):
    """Counts of a miniature, each by quarter."""

    missed: tuple[int, ...]
    stored: tuple[int, ...]
    asked: tuple[int, ...]
    resident: tuple[int, ...]  # at present

    def since(self, before: Totals) -> Totals:
        """Return the change of each."""
        pairs = zip(self, before, strict=True)
        return Totals(*(tuple(map(operator.sub, new, old)) for new, old in pairs))


class Miniature:
    """One policy at one size: a miniature manager for each quarter of the sample.

    `memory` is a multiple of the present memory, `slots` the number of sampled slots of all
    quarters.
    """

    def __init__(self, policy: str, memory: float, slots: float, quarters: int) -> None:
        self.policy = policy
        self.memory = memory
        self.slots = slots
        self.managers = [
            CPUOffloadingManager(1, round(slots / quarters), policy) for _ in range(quarters)
        ]
        self._heeds = hasattr(self.managers[0].policy, "hint_sources")  # of returns
        self._pending: list[deque[tuple[float, Request[Any]]]] = [deque() for _ in range(quarters)]
        self._reset_at = [0] * quarters  # blocks requested until then

    def feed(self, quarter: int, requests: Sequence[SampledRequest]) -> None:
        """Serve requests with the manager of a quarter, as an engine would."""
        if self._pending[quarter]:
            self._complete(quarter, math.inf)
        if not self._heeds:
            requests = [each for each in requests if each[1] != FINISHED]
        self.managers[quarter]._serve_requests(requests)

    def feed_overlapping(
        self,
        quarter: int,
        requests: Sequence[SampledRequest],
        positions: Sequence[float],
        lag: float,
        *,
        waits: bool,
    ) -> None:
        """Serve requests with stores that take a while.

        `positions` are the requests' positions among all. A store ends after `lag` more requests;
        until then a lookup misses its blocks or, with `waits`, ends the store.
        """
        manager = self.managers[quarter]
        for each, position in zip(requests, positions, strict=True):
            self._complete(quarter, position - lag)
            hashes, first, end, hints, now = each
            if first < 0:
                if first != FINISHED or self._heeds:
                    manager._serve_requests([each])
                continue
            if waits:
                manager.complete_store(hashes)
            request = manager.begin(hashes, hints=hints, now=now)
            manager.lookup(hashes[first:end])
            output = request.prepare_store()
            # The blocks of a session that ends are released by an event of their own.
            request.finish(hints=Hints() if hints is not None and hints.ends else hints)
            if output is not None and output.block_hashes_to_store:
                self._pending[quarter].append((position, request))

    def reset(self, quarter: int) -> None:
        """Reset the manager of a quarter, including its stores under way."""
        manager = self.managers[quarter]
        manager.reset_cache()
        self._pending[quarter].clear()
        self._reset_at[quarter] = manager.stats()["lookup_blocks"]

    def _complete(self, quarter: int, before: float) -> None:
        """Complete the stores of the requests before a position."""
        pending = self._pending[quarter]
        while pending and pending[0][0] < before:
            pending.popleft()[1].complete_store()

    def totals(self) -> Totals:
        """Return the counts and the present size of each quarter."""
        stats = [manager.stats() for manager in self.managers]
        return Totals(
            missed=tuple(each["lookup_blocks"] - each["hit_blocks"] for each in stats),
            stored=tuple(each["stored_blocks"] for each in stats),
            asked=tuple(each["lookup_blocks"] for each in stats),
            resident=tuple(each["resident"] for each in stats),
        )

    def marks(self, window: Totals, resets: int) -> tuple[str, ...]:
        """Return the marks that its points have besides those common to all points.

        A policy starts learning again after each of the `resets` in the `window`.
        """
        entry = registry.parse(self.policy).entry
        if not entry.scales:
            return ("biased",)
        if resets:
            least = min(window.asked) / (LEARNT * (1 + resets))
        else:
            asked = self.totals().asked
            least = min(now - then for now, then in zip(asked, self._reset_at, strict=True))
        return ("learning",) if least < entry.warm_up_blocks else ()
