"""Statistics of a replay, in constant memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from .counts import tokens_ratio

_STEP_BITS = 6


class DurationHistogram:
    """A histogram of durations in steps of at most 1/64 of the duration.

    Percentiles need no list of the durations.

    Below 64 ns each nanosecond has a step of its own; above, each power of two is divided into 64
    steps. `max` and `total` are exact.

    Attributes
    ----------
    count : int
        Durations so far.
    total : int
        Their sum, nanoseconds.
    max : int
        The longest, nanoseconds.

    Notes
    -----
    After HdrHistogram (Gil Tene).
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.max = 0
        self._counts: dict[int, int] = {}

    def add(self, nanoseconds: int) -> None:
        """Add one duration, nanoseconds. Complexity: O(1)."""
        shift = max(0, nanoseconds.bit_length() - _STEP_BITS - 1)
        step = (shift << _STEP_BITS) + (nanoseconds >> shift)
        self._counts[step] = self._counts.get(step, 0) + 1
        self.count += 1
        self.total += nanoseconds
        self.max = max(self.max, nanoseconds)

    def percentile(self, percent: float) -> int:
        """Return the duration, nanoseconds, that `percent` of all do not exceed.

        It is the upper end of the step: at most 1/64 more than the exact one and never more than
        `max`. 0 if there are none.
        """
        wanted = self.count * percent / 100
        seen = 0
        for step in sorted(self._counts):
            seen += self._counts[step]
            if seen >= wanted:
                return min(self.max, _upper_end(step))
        return self.max


def _upper_end(step: int) -> int:
    shift = max(0, (step >> _STEP_BITS) - 1)
    return ((step - (shift << _STEP_BITS) + 1) << shift) - 1


@dataclass(slots=True)
class ReplayResult:
    """The result of a replay.

    With several KV groups `asked` and `hits` are tokens, `stored` and `evicted` are slots.

    Attributes
    ----------
    requests, blocks, tokens : int
        Requests replayed, and the blocks and prompt tokens of all of them.
    asked : int
        Blocks that the manager was asked for: those from the first one of each request that the
        accelerator's own cache did not have. Without one, `blocks`.
    hits : int
        Blocks found by `lookup`: the sum of its results.
    hit_tokens : int or None
        Prompt tokens that those blocks hold; None if the block size is not known.
    stored, evicted : int
        Blocks that `prepare_store` gave a slot, and blocks that it evicted for them.
    refused : int
        Calls of `prepare_store` that returned None.
    not_admitted : int
        Blocks that the policy did not admit, as counted by the manager's `stats()`; 0 for a manager
        without that counter.
    times : DurationHistogram
        Time spent in the manager, one duration per request.
    """

    requests: int = 0
    blocks: int = 0
    asked: int = 0
    tokens: int = 0
    hits: int = 0
    hit_tokens: int | None = None
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    not_admitted: int = 0
    times: DurationHistogram = field(default_factory=DurationHistogram)

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked for that were hits; 0 if there are none."""
        return self.hits / self.asked if self.asked else 0.0

    @property
    def token_hit_ratio(self) -> float | None:
        """Share of the prompt tokens that lay in hit blocks.

        None without a block size, or where the lengths of the prompts are not known.
        """
        return tokens_ratio(self.hit_tokens, self.tokens)

    @property
    def manager_seconds(self) -> float:
        """Time spent in the manager, seconds."""
        return self.times.total / 1e9

    @property
    def seconds(self) -> float:
        """The earlier name of `manager_seconds`, deprecated: elsewhere it is a trace's span."""
        text = "ReplayResult.seconds is called manager_seconds; the name goes in 0.4"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.manager_seconds

    @property
    def blocks_per_second(self) -> float:
        """Blocks per second of manager time; 0 if no time passed."""
        return self.blocks / self.manager_seconds if self.times.total else 0.0
