"""Retention intervals of windows and states, compared under one policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvoffload.replay import GroupChunks, Result, replay_all
from kvoffload.replay.groups import Retention
from kvoffload.replay.processes import Elsewhere

from .advice import Advice, RecordedTrace

LEAST_INTERVAL = 512
"""Least interval that is compared, tokens."""

LEAST_GAIN = 0.01
"""Gain, as a share of the prompts' tokens, from which another interval is worth its flag."""


@dataclass(frozen=True, slots=True)
class RetentionCell:
    """One retention interval under the policy that was chosen, in the memory asked for."""

    interval: Retention  # tokens: 0 for only the last resume point, None for all
    hit_ratio: float  # share of the tokens asked for that are hits
    served: float  # share of all prompt tokens that host memory or the accelerator's own cache has
    stored: int  # slots stored


def or_none(interval: Retention) -> int | str:
    """Return an interval as ``--retention`` takes it."""
    return "none" if interval is None else interval


def compared(groups: GroupChunks) -> tuple[Retention, ...]:
    """Return the intervals to compare: 0, the least one, all, and the one given.

    Empty without windows or states: the interval affects nothing else.
    """
    if not groups.layout.is_sparse:
        return ()
    step = groups.retention_multiple
    least = step * math.ceil(LEAST_INTERVAL / step)
    return tuple(dict.fromkeys((0, least, None, groups.retention)))


def retentions(
    recorded: RecordedTrace,
    advice: Advice,
    *,
    jobs: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[RetentionCell]:
    """Compare the intervals that `compared` returns under the policy chosen.

    The advice, made from the same trace, has the results at the interval given. `jobs` processes
    share the replays, or other machines compute them; `progress` is called with the number of
    intervals done.
    """
    setup, groups, case = advice.setup, advice.setup.chunks, advice.offloading
    intervals = compared(groups)
    if not intervals:
        return []
    found = {groups.retention: advice.rows[case]}
    wanted = []
    for interval in intervals:
        if interval not in found:
            other = GroupChunks.of(
                groups.layout, groups.block_tokens, interval, step_tokens=groups.step_tokens
            )
            of_other = replace(setup, groups=other)
            wanted.append(of_other.configuration(case, recorded.trace.unique_blocks))
    for result in replay_all(recorded.trace, wanted, jobs=jobs, elsewhere=elsewhere):
        found[result.configuration.groups.retention] = result
        if progress is not None:
            progress(len(found))
    return [_cell(interval, found[interval]) for interval in intervals]


def _cell(interval: Retention, result: Result) -> RetentionCell:
    whole = result.asked_tokens + result.device_tokens
    served = (result.offloaded_tokens + result.device_tokens) / (whole or 1)
    return RetentionCell(interval, result.hit_ratio, served, result.stored)


def worth(cells: Sequence[RetentionCell], interval: Retention) -> RetentionCell | None:
    """Return the best cell if it serves a point more than that of `interval`, else None."""
    given = next((cell for cell in cells if cell.interval == interval), None)
    if given is None:
        return None
    best = max(cells, key=lambda cell: cell.served)
    return best if best.served - given.served >= LEAST_GAIN else None


def vllm_flag(interval: Retention) -> str:
    """Return the argument of ``vllm serve`` that sets an interval."""
    return f"--prefix-cache-retention-interval {interval}"  # vLLM reads None as such
