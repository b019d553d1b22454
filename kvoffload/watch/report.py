"""The findings of a watch."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.managers._watching import CAUSES
from kvoffload.types import HintGain

from .estimate import Point
from .hints import HeardHints
from .overdue import Overdue


@dataclass(frozen=True, slots=True)
class Explanation:
    """The state of a block and the history that a watch has of it.

    Attributes
    ----------
    state : str
        ``"absent"``, ``"pending"``, ``"idle"`` or ``"pinned"``.
    sampled : bool
        Whether the block is in the sample. If not, or if the watch has forgotten the block, the
        fields below are None.
    cause : str or None
        Why the block is absent or pending: one of ``broken_prefix``, ``pending``, ``evicted``,
        ``declined``, ``refused``, ``failed``, ``reset``, ``never_or_long_ago``.
    used : bool or None
        Whether it was hit since it was last stored.
    since_use, since_stored, since_evicted : float or None
        Seconds. Only the later of the last two events is given.
    """

    state: str
    sampled: bool
    cause: str | None = None
    used: bool | None = None
    since_use: float | None = None
    since_stored: float | None = None
    since_evicted: float | None = None


@dataclass(frozen=True, slots=True)
class WatchReport:
    """The findings of a watch, in its window unless said otherwise.

    Attributes
    ----------
    policy : str or None
        The policy of the manager; None if it is a user's own, or an instance with options or a
        capacity of its own: give these as a string.
    capacity : int
        Blocks that the manager has room for.
    sampling_rate : float
        Share of the blocks that are in the sample.
    seconds : float
        Length of the window so far.
    requests, asked, missed : int
        Lookups, their blocks, and the blocks that missed, since the window began. Exact, like the
        next seven.
    stored, evicted, declined, refused, failed : int
        Blocks that got a slot, were evicted, or were not admitted; calls that were refused; blocks
        whose store failed.
    resets : int
        Resets of the manager's cache, which also empty the shadows.
    tail_missed_tokens : int
        Tokens that the engine's full KV groups had but that a window or a state kept from being
        loaded: a part of the misses. 0 if the manager does not know the groups.
    points : tuple of Point
        Hit ratios at other sizes and under other policies.
    sampled_missed : dict of str to int
        Sampled blocks that missed, by cause.
    sampled_evicted, sampled_unused : int
        Sampled blocks that were evicted, and those of them that were never hit since stored.
    since_use, since_stored : float or None
        Median age at eviction in seconds over the whole run: since the last use, since the store.
    overdue : tuple of Overdue
        Transfers past their deadline.
    hints : tuple of HeardHints
        The hints of each source, in order of first appearance; 16 are told apart, and a last entry
        sums all others.
    hint_gain : HintGain or None
        The recent gain from hints of returns; None if the policy does not rank by them, has no
        guard, or has served too few requests since the first report after a hint.
    """

    policy: str | None
    capacity: int
    sampling_rate: float
    seconds: float
    requests: int
    asked: int
    missed: int
    stored: int
    evicted: int
    declined: int
    refused: int
    failed: int
    resets: int
    tail_missed_tokens: int
    points: tuple[Point, ...]
    sampled_missed: dict[str, int]
    sampled_evicted: int
    sampled_unused: int
    since_use: float | None
    since_stored: float | None
    overdue: tuple[Overdue, ...]
    hints: tuple[HeardHints, ...]
    hint_gain: HintGain | None

    @property
    def hit_ratio(self) -> float:
        """Share of the requested blocks that were hits; 0 before the first lookup."""
        return 1 - self.missed / self.asked if self.asked else 0.0

    @property
    def waste(self) -> float | None:
        """Share of the evicted blocks never hit since they were stored; None before an eviction."""
        return self.sampled_unused / self.sampled_evicted if self.sampled_evicted else None


def explanation(
    ref_cnt: int | None,
    cause: int | None,
    record: tuple[bool, int, int | None, int | None] | None,
) -> Explanation:
    """Return the explanation of the facts that a watch's core gives."""
    state = "absent"
    if ref_cnt is not None:
        state = "pending" if ref_cnt < 0 else "pinned" if ref_cnt else "idle"
    if cause is None:
        return Explanation(state, sampled=False)
    causes = {"absent": CAUSES[cause], "pending": "pending"}
    used, *ages = record or (None,) * 4
    seconds = [None if age is None else age / 1000 for age in ages]
    return Explanation(state, True, causes.get(state), used, *seconds)
