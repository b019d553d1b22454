"""Retention intervals of windows and states, compared under one policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvoffload.replay import simulate
from kvoffload.replay.groups import GroupChunks, Retention

from .advice import Advice, Demand, RecordedTrace

__all__ = ["RetentionCell", "interval_text", "retentions", "vllm_flag", "worth"]

LEAST_INTERVAL = 512
"""Least interval that is compared, tokens."""

LEAST_GAIN = 0.01
"""Gain, as a share of the prompts' tokens, from which another interval is worth its flag."""


@dataclass(frozen=True, slots=True)
class RetentionCell:
    """One retention interval under the policy that was chosen, in the memory asked for.

    Attributes
    ----------
    interval : int or None
        The interval, tokens: 0 for the last resume point alone, None for all.
    hit_ratio : float
        Share of the tokens asked for that are hits.
    served : float
        Share of all prompt tokens that host memory or the accelerator's own cache has.
    stored : int
        Slots stored.
    """

    interval: Retention
    hit_ratio: float
    served: float
    stored: int


def interval_text(interval: Retention) -> str:
    """Return an interval as ``--retention`` takes it."""
    return "none" if interval is None else str(interval)


def _least_interval(groups: GroupChunks) -> int:
    """Return the least interval that the groups allow, of at least `LEAST_INTERVAL` tokens."""
    step = groups.retention_multiple
    return step * math.ceil(LEAST_INTERVAL / step)


def retentions(recorded: RecordedTrace, advice: Advice) -> list[RetentionCell]:
    """Compare 0, the least interval and all under the policy chosen, and the interval given.

    Empty where there are no windows or states, for which alone it makes a difference.
    """
    setup = advice.setup
    groups = setup.groups
    if groups is None or not any(g.kind in ("window", "state") for g in groups.layout.groups):
        return []
    policy = advice.policy or advice.choices[advice.place].best
    intervals = dict.fromkeys((0, _least_interval(groups), None, groups.retention))
    trace, keys = recorded.trace, recorded.trace.keys()
    cells = []
    for interval in intervals:
        bound = GroupChunks.of(
            groups.layout, groups.block_tokens, interval, step_tokens=groups.step_tokens
        )
        demand = Demand.of(trace, replace(setup, groups=bound))
        counts = simulate(
            trace,
            keys,
            policy,
            setup.capped(setup.memory, trace.unique_blocks),
            device_hits=demand.device_hits,
            groups=bound,
        )
        whole = int(demand.whole.sum())
        served = (counts.hits + whole - counts.asked) / (whole or 1)
        cells.append(RetentionCell(interval, counts.hit_ratio, served, counts.stored))
    return cells


def worth(cells: Sequence[RetentionCell], interval: Retention) -> RetentionCell | None:
    """Return the best cell where it serves a point more than that of `interval`, else None."""
    given = next((cell for cell in cells if cell.interval == interval), None)
    if given is None:
        return None
    best = max(cells, key=lambda cell: cell.served)
    return best if best.served - given.served >= LEAST_GAIN else None


def vllm_flag(interval: Retention) -> str:
    """Return the argument of ``vllm serve`` that sets an interval."""
    return f"--prefix-cache-retention-interval {interval}"  # vLLM reads None as such
