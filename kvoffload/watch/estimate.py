"""Hit ratios from the misses of shadows, each with an error bar or a reason why it is withheld.

The manager counts its requested and missed blocks exactly. A shadow gives only the ratio between
its own misses and those of the shadow of the present configuration; errors common to both cancel.
The error is 3.18 (Student's t, 3 degrees of freedom, 95 %) times the delete-one jackknife over four
disjoint quarters of the sample, each with shadows of its own. Quarters with few misses may agree by
chance, so the error also includes a shift by one standard deviation of the number of misses that
differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SLOTS = 256
"""Least number of sampled slots at a size for a point."""
LEAST_MISSES = 32
"""Least number of sampled misses in the window for a point; below it the error is unknown."""
WIDEST = 0.03
"""Largest error of a point that is not withheld."""
STUDENT_T = 3.182


@dataclass(frozen=True, slots=True)
class Point:
    """The estimated hit ratio of a policy with a memory.

    Attributes
    ----------
    policy : str
        The policy.
    memory : float
        Multiple of the present memory.
    hit_ratio, error : float or None
        The estimate and the half-width of its 95 % interval; None if there is a `reason`.
    stores_per_block : float or None
        Blocks that the policy would store per requested block.
    reason : str or None
        ``"few_slots"``, ``"few_misses"``, ``"wide"``, ``"own_policy"`` (the live policy has no
        shadow) or ``"no_full_group"`` (no KV group of the engine needs every block).
    marks : tuple of str
        Conditions that may shift the point: ``"filling"``, ``"long_requests"``, ``"in_flight"``,
        ``"learning"``, ``"biased"``, ``"tails"``, ``"hints"``.
    resets : int
        Resets of the cache in the window; the estimate is for a memory that is reset as often.
    """

    policy: str
    memory: float
    hit_ratio: float | None = None
    error: float | None = None
    stores_per_block: float | None = None
    reason: str | None = None
    marks: tuple[str, ...] = ()
    resets: int = 0


def estimate(
    miss_ratio: float, base: Sequence[float], shadow: Sequence[float], bias: float = 0.0
) -> tuple[float, float]:
    """Return a hit ratio and its error, which is infinite if unknown, as with one quarter.

    `miss_ratio` is the one that the manager counted. `base` and `shadow` are misses by quarter, of
    the shadow of the present configuration, which has some, and of the one to estimate. If the two
    are the same
    object, the hit ratio is the counted one. `bias` is the possible error of a shadow of another
    kind, which its quarters do not show.
    """
    total, found = sum(base), sum(shadow)
    if shadow is base:
        return 1 - miss_ratio, 0.0
    ratio = found / total
    count = len(base)
    rests = [(found - s, total - b) for b, s in zip(base, shadow, strict=True)]
    if count < 2 or any(rest <= 0 for _, rest in rests):
        return 1 - miss_ratio * ratio, math.inf
    left_out = [part / rest for part, rest in rests]
    mean = sum(left_out) / count
    variance = (count - 1) / count * sum((each - mean) ** 2 for each in left_out)
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
    resets: int = 0,
) -> Point:
    """Return a point, or withhold it with a reason if there is not enough data.

    `slots` is the number of sampled slots. All counts are of the window: the manager's `asked` and
    `missed` blocks, and by quarter the misses of the present configuration, `base`, and the misses
    and stores of this policy. `bias` is as in `estimate`.
    """
    if slots < LEAST_SLOTS:
        reason = "few_slots"
    elif asked == 0 or sum(base) < LEAST_MISSES:
        reason = "few_misses"
    else:
        hit_ratio, error = estimate(missed / asked, base, shadow, bias)
        if error <= WIDEST:
            stores = missed / asked * sum(stored) / sum(base)
            return Point(policy, memory, hit_ratio, error, stores, None, marks, resets)
        reason = "wide"
    return Point(policy, memory, reason=reason, marks=marks, resets=resets)
