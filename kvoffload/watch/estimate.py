"""From the misses of shadows to hit ratios, each with an error bar or the reason why there is none.

The manager counts exactly what it was asked for and what it missed. A shadow only says how many
times as often another policy, or another size, would have missed; what it gets wrong for both
cancels. The error is 3.18 (Student's t, 3 degrees of freedom, 95 %) times the delete-one jackknife
over four disjoint quarters of the sample, each with shadows of its own; and, as quarters with few
misses may agree by chance, what one standard deviation of the number of misses that differ shifts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LEAST_MISSES", "LEAST_SLOTS", "WIDEST", "Point", "estimate", "make_point"]

LEAST_SLOTS = 256
"""Sampled slots that a size needs for a point."""
LEAST_MISSES = 32
"""Sampled misses in the window that any point needs: below, no error can be told."""
WIDEST = 0.03
"""Error beyond which a point is withheld."""
STUDENT_T = 3.182


@dataclass(frozen=True, slots=True)
class Point:
    """The hit ratio that a policy would have with a memory.

    Attributes
    ----------
    policy : str
        The policy.
    memory : float
        Times the memory that there is.
    hit_ratio, error : float or None
        The estimate and the half-width of its 95 % interval; None where `reason` says why.
    stores_per_block : float or None
        Blocks that it would store for each block asked for.
    reason : str or None
        ``"few_slots"``, ``"few_misses"``, ``"wide"`` or ``"own_policy"`` (of the live policy there
        is no shadow).
    marks : tuple of str
        What may shift the point: ``"filling"``, ``"long_requests"``, ``"in_flight"``,
        ``"learning"``, ``"biased"``.
    """

    policy: str
    memory: float
    hit_ratio: float | None = None
    error: float | None = None
    stores_per_block: float | None = None
    reason: str | None = None
    marks: tuple[str, ...] = ()


def estimate(
    miss_ratio: float,
    base: Sequence[float],
    shadow: Sequence[float],
    bias: float = 0.0,
) -> tuple[float, float]:
    """Return a hit ratio and its error.

    Parameters
    ----------
    miss_ratio : float
        Missed of asked blocks of the manager, counted.
    base, shadow : sequence of float
        By quarter: misses of the shadow of what there is, and of what is asked about; the same
        object where that is asked about, whose hit ratio is counted.
    bias : float
        What a shadow of another kind may be off by, which its quarters do not tell.

    Returns
    -------
    (float, float)
        The error is infinite where the quarters do not tell, as where there is one alone.
    """
    total, found = sum(base), sum(shadow)
    if total <= 0:
        return math.nan, math.inf
    if shadow is base:
        return 1 - miss_ratio, 0.0
    ratio = found / total
    number = len(base)
    rests = [(found - s, total - b) for b, s in zip(base, shadow, strict=True)]
    if number < 2 or any(rest <= 0 for _, rest in rests):
        return 1 - miss_ratio * ratio, math.inf
    left_out = [part / rest for part, rest in rests]
    mean = sum(left_out) / number
    variance = (number - 1) / number * sum((each - mean) ** 2 for each in left_out)
    counting = math.sqrt(abs(total - found) + 1) / total
    error = math.hypot(STUDENT_T * math.sqrt(variance) * miss_ratio, counting * miss_ratio, bias)
    hit_ratio = min(1.0, max(0.0, 1 - miss_ratio * ratio))
    return hit_ratio, error


def make_point(
    policy: str,
    memory: float,
    *,
    slots: float,
    asked: int,
    missed: int,
    base: Sequence[float],
    shadow: Sequence[float],
    stored: Sequence[float],
    bias: float = 0.0,
    marks: tuple[str, ...] = (),
) -> Point:
    """Give a point, or withhold it and say why.

    Parameters
    ----------
    policy : str
        The policy asked about.
    memory : float
        Times the memory that there is.
    slots : float
        Its sampled slots.
    asked, missed : int
        Blocks of the manager, in the window.
    base, shadow, stored : sequence of float
        By quarter, in the window: misses of what there is; misses and stores of this policy.
    bias : float
        As `estimate` has it.
    marks : tuple of str
        What may shift it.

    Returns
    -------
    Point
    """
    if slots < LEAST_SLOTS:
        return Point(policy, memory, reason="few_slots", marks=marks)
    if asked == 0 or sum(base) < LEAST_MISSES:
        return Point(policy, memory, reason="few_misses", marks=marks)
    hit_ratio, error = estimate(missed / asked, base, shadow, bias)
    if error > WIDEST:
        return Point(policy, memory, reason="wide", marks=marks)
    stores = missed / asked * sum(stored) / sum(base)
    return Point(policy, memory, hit_ratio, error, stores, None, marks)
