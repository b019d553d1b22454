"""Miniatures: the deployed policies at a fraction of the size, fed the sampled keys.

Source
    Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", ATC 2017.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

from kvoffload.managers._watching import RELEASED, SampledRequest
from kvoffload.policies import registry

Key = tuple[str, float]
"""The policy and the memory of a shadow."""

AT_ONCE = -1.0
"""The lag of stores that do not overlap."""

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

    def since(self, before: Totals | None) -> Totals:
        """Return the change of each; None is nothing."""
        if before is None:
            return self
        pairs = zip(self, before, strict=True)
        return Totals(*(tuple(map(operator.sub, new, old)) for new, old in pairs))


class Miniatures:
    """One policy at one size: a miniature for each quarter of the sample.

    `memory` is a multiple of the present memory, `slots` the number of sampled slots of all
    quarters. If it began later than the manager, `before` are the misses and stores that another
    shadow counted until then, and `lacking` is the number of blocks that it did not have.
    """

    def __init__(self, policy: str, memory: float, slots: float, quarters: int) -> None:
        self.policy = policy
        self.memory = memory
        self.slots = slots
        self.key = policy, memory
        self.before = (0, 0)
        self.lacking = 0.0
        self._spec = registry.parse(policy)
        self.quarters = [
            self._spec.new_miniature("c", round(slots / quarters)) for _ in range(quarters)
        ]
        self._reset_at = [0] * quarters  # blocks requested until then

    def feed(
        self,
        quarter: int,
        request: SampledRequest,
        position: float,
        lag: float,
        *,
        waits: bool,
        early: bool,
    ) -> None:
        """Serve a request with the miniature of a quarter, as an engine would.

        `position` is the request's among all. A store ends after `lag` more requests, or with its
        own if `lag` is negative; until then a lookup misses its blocks or, with `waits`, ends the
        store. The request finishes after that if its store ends `early`.
        """
        miniature = self.quarters[quarter]
        hashes, first, _, hints = request
        before = position - lag
        if first >= 0:
            miniature.serve(*request, position=position, before=before, waits=waits, early=early)
            return
        miniature.end_stores(before)
        if first == RELEASED:  # whatever this miniature would release
            miniature.release(hashes)
        elif self._spec.entry.ranks_by_return:
            miniature.finish(hashes, hints)

    def set_declining(self, *, allowed: bool) -> None:
        """Allow or forbid the policies to decline blocks that they could make room for."""
        for each in self.quarters:
            each.policy.set_declining(allowed)

    def reset(self, quarter: int) -> None:
        """Reset the miniature of a quarter, including its stores under way."""
        miniature = self.quarters[quarter]
        miniature.clear()
        self._reset_at[quarter] = miniature.asked

    def totals(self) -> Totals:
        """Return the counts and the present size of each quarter."""
        return Totals(
            missed=tuple(each.asked - each.hits for each in self.quarters),
            stored=tuple(each.stored for each in self.quarters),
            asked=tuple(each.asked for each in self.quarters),
            resident=tuple(len(each.policy) for each in self.quarters),
        )

    def marks(self, window: Totals, resets: int) -> tuple[str, ...]:
        """Return the marks that its points have besides those common to all points.

        A policy starts learning again after each of the `resets` in the `window`.
        """
        entry = self._spec.entry
        if not entry.scales:
            return ("biased",)
        if resets:
            least = min(window.asked) / (LEARNT * (1 + resets))
        else:
            asked = self.totals().asked
            least = min(now - then for now, then in zip(asked, self._reset_at, strict=True))
        return ("learning",) if least < entry.warm_up_blocks else ()
