"""Results of a replay: its hits, stores and times, in constant memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .groups import GroupChunks

__all__ = [
    "ERROR_PARTS",
    "DurationHistogram",
    "HitRatios",
    "LoopTimes",
    "ReplayResult",
    "missed_percentiles",
    "nearest_rank",
]

ERROR_PARTS = 5
"""Parts of a trace, of equally many requests, from which the errors of results are estimated."""

_STEP_BITS = 6
_OF_HITS = (
    "asked_blocks",
    "hit_blocks",
    "asked_tokens",
    "loaded_tokens",
    "liar_asked",
    "liar_hits",
)


def nearest_rank(ordered: Sequence[int], percent: int) -> int:
    """Return a percentile of ascending values by nearest rank; 0 of none."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1] if ordered else 0


def missed_percentiles(missed: Iterable[int]) -> dict[str, int]:
    """Return the percentiles of results, by name, from the tokens missed by each request."""
    ordered = sorted(missed)
    return {f"missed_p{percent}": nearest_rank(ordered, percent) for percent in (50, 95)}


class DurationHistogram:
    """A histogram of durations in steps of at most 1/64 of the duration.

    Percentiles need no list of the durations.

    Below 64 ns each nanosecond has its own step; above, each power of two is divided into 64 steps.
    `max` and `total` are exact.

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
        """Return the duration in nanoseconds that `percent` of all durations do not exceed.

        It is the upper end of the step: at most 1/64 more than the exact one and never more than
        `max`. 0 without durations.
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


def _renamed(earlier: str, *names: str) -> Any:
    """Return a deprecated property: the first attribute that is not None."""

    def value(self: ReplayResult) -> int | None:
        text = f"ReplayResult.{earlier} is called {' or '.join(names)}; the name goes in 0.5"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return next((found for name in names if (found := getattr(self, name)) is not None), None)

    return property(value)


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """The times of a closed loop in seconds; they rank caches but do not predict an engine.

    Attributes
    ----------
    ttft_p50, ttft_p95, ttft_mean : float
        From a request's arrival to the end of its prefill; percentiles by nearest rank.
    latency_mean : float
        From its arrival to its last token.
    requests_per_second, tokens_per_second : float
        Requests, and tokens of prompts and answers, from the first arrival to the last token.
    busy : float
        Share of that time spent on computing prompts.
    """

    ttft_p50: float
    ttft_p95: float
    ttft_mean: float
    latency_mean: float
    requests_per_second: float
    tokens_per_second: float
    busy: float


class HitRatios:
    """The hit ratios of a result: of all its sessions, and of honest and lying ones apart."""

    __slots__ = ()

    liar_asked: int | None
    liar_hits: int | None

    def _counted(self) -> tuple[int, int]:
        """Return the units asked for and hit."""
        raise NotImplementedError

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks, or tokens, asked for that were hits; 0 if none were asked for."""
        return _ratio(*self._counted())

    @property
    def liar_hit_ratio(self) -> float | None:
        """The hit ratio of the sessions that give false hints; None without such sessions."""
        if self.liar_asked is None or self.liar_hits is None:
            return None
        return _ratio(self.liar_asked, self.liar_hits)

    @property
    def honest_hit_ratio(self) -> float | None:
        """The hit ratio of the other sessions; None without such that give false hints."""
        if self.liar_asked is None or self.liar_hits is None:
            return None
        asked, hits = self._counted()
        return _ratio(asked - self.liar_asked, hits - self.liar_hits)


def _ratio(asked: int, hits: int) -> float:
    return hits / asked if asked else 0.0


@dataclass(slots=True)
class ReplayResult(HitRatios):
    """The result of a replay, or of one of its parts.

    A slot holds a block of the trace, or a chunk of any group of a model with several KV groups.

    Attributes
    ----------
    requests, blocks : int
        Requests replayed, and the blocks of all of them.
    tokens : int
        Prompt tokens of the requests whose length is known.
    asked_blocks, hit_blocks : int or None
        Blocks that the manager was asked for, from the first one of each request that the
        accelerator's own cache did not have, and those of them that it had. None for a model with
        several groups, whose hits may end within a block.
    asked_tokens, loaded_tokens : int or None
        The same in tokens; a partly filled block counts as full, and a prompt of unknown length as
        long as its blocks. None if the block size is not known.
    hit_tokens : int or None
        Prompt tokens hit, of the requests whose length is known. None if the block size is not
        known, and for ``"belady"``, which hits the most blocks and not the most tokens.
    missed_p50, missed_p95 : int or None
        Median and 95th percentile, by nearest rank, of the tokens of a prompt that neither the
        accelerator's own cache nor the manager had. None where `hit_tokens` is.
    loaded_slots : int or None
        Slots loaded for the hits; None for ``"belady"`` over several groups.
    stored_slots, evicted_slots : int
        Slots that `prepare_store` filled, and those that it evicted for them. For a ceiling only
        the filled slots are known; the other counts are 0.
    refused : int
        Calls of `prepare_store` that returned None.
    not_admitted : int
        Blocks or chunks that the policy did not admit, as counted by the manager's `stats()`; 0 for
        a manager without that counter.
    times : DurationHistogram
        Time spent in the manager, one duration per request; empty if it was not measured.
    loop : LoopTimes or None
        Times of a closed loop.
    liar_asked, liar_hits : int or None
        Of what was asked for and hit, as `hit_ratio` counts it, the part of the sessions that give
        false hints; None without such sessions, and `liar_hits` for ``"belady"``.
    """

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    asked_blocks: int | None = 0
    hit_blocks: int | None = 0
    asked_tokens: int | None = None
    loaded_tokens: int | None = None
    hit_tokens: int | None = None
    missed_p50: int | None = None
    missed_p95: int | None = None
    loaded_slots: int | None = 0
    stored_slots: int = 0
    evicted_slots: int = 0
    refused: int = 0
    not_admitted: int = 0
    times: DurationHistogram = field(default_factory=DurationHistogram, compare=False)
    loop: LoopTimes | None = None
    liar_asked: int | None = None
    liar_hits: int | None = None

    @classmethod
    def of(
        cls,
        groups: GroupChunks,
        asked: int,
        hits: int,
        *,
        liars: tuple[int, int | None] | None = None,
        **counts: Any,
    ) -> ReplayResult:
        """Return a result from the tokens asked for and hit, as `groups` count tokens.

        `liars` are these numbers of the sessions that give false hints.
        """
        if liars is not None:
            counts["liar_asked"] = liars[0] // groups.hit_unit
            counts["liar_hits"] = None if liars[1] is None else liars[1] // groups.hit_unit
        result = cls(asked_blocks=None, hit_blocks=None, **counts)
        if groups.is_plain:
            result.asked_blocks = asked // groups.block_tokens
            result.hit_blocks = result.loaded_slots = hits // groups.block_tokens
        if groups.knows_tokens:
            result.asked_tokens, result.loaded_tokens = asked, hits
        return result

    @classmethod
    def of_row(cls, groups: GroupChunks, row: Mapping[str, Any]) -> ReplayResult:
        """Return the result whose counts `as_row` returned."""
        return cls.of(
            groups,
            row["asked"] * groups.hit_unit,
            row["hits"] * groups.hit_unit,
            requests=row["requests"],
            blocks=row["blocks"],
            tokens=row["tokens"],
            hit_tokens=row["hit_tokens"],
            missed_p50=row["missed_p50"],
            missed_p95=row["missed_p95"],
            loaded_slots=row.get("loaded"),
            stored_slots=row["stored"],
            evicted_slots=row["evicted"],
            refused=row["refused"],
            not_admitted=row["not_admitted"],
            liar_asked=row.get("liar_asked"),
            liar_hits=row.get("liar_hits"),
        )

    @classmethod
    def of_parts(cls, parts: Sequence[ReplayResult]) -> ReplayResult:
        """Return the hits of some parts together; the other counts are left out."""
        result = cls()
        for name in _OF_HITS:
            counts = [getattr(part, name) for part in parts]
            setattr(result, name, None if None in counts else sum(counts))
        return result

    asked = _renamed("asked", "asked_blocks", "asked_tokens")
    hits = _renamed("hits", "hit_blocks", "loaded_tokens")
    loaded = _renamed("loaded", "loaded_slots")
    stored = _renamed("stored", "stored_slots")
    evicted = _renamed("evicted", "evicted_slots")

    @property
    def token_hit_ratio(self) -> float | None:
        """Share of the prompt tokens that were hit.

        None if `hit_tokens` is None or the lengths of the prompts are unknown.
        """
        return None if self.hit_tokens is None or not self.tokens else self.hit_tokens / self.tokens

    def as_row(self) -> dict[str, int | None]:
        """Return the counts in the form of JSON, CSV and files of results.

        ``asked`` and ``hits`` are blocks, or tokens for a model with several groups. Only such a
        model has ``loaded``; otherwise it would equal ``hits``.
        """
        asked, hits = self._counted()
        row: dict[str, int | None] = {
            "requests": self.requests,
            "blocks": self.blocks,
            "asked": asked,
            "hits": hits,
            "stored": self.stored_slots,
            "evicted": self.evicted_slots,
            "refused": self.refused,
            "not_admitted": self.not_admitted,
            "tokens": self.tokens,
            "hit_tokens": self.hit_tokens,
            "missed_p50": self.missed_p50,
            "missed_p95": self.missed_p95,
        }
        if self.liar_asked is not None:
            row |= {"liar_asked": self.liar_asked, "liar_hits": self.liar_hits}
        return row if self.asked_blocks is not None else row | {"loaded": self.loaded_slots}

    def _counted(self) -> tuple[int, int]:
        """Return the units asked for and hit: blocks if hits are whole blocks, else tokens."""
        if self.asked_blocks is not None:
            return self.asked_blocks, self.hit_blocks or 0
        return self.asked_tokens or 0, self.loaded_tokens or 0

    @property
    def manager_seconds(self) -> float:
        """Time spent in the manager, seconds."""
        return self.times.total / 1e9

    @property
    def blocks_per_second(self) -> float:
        """Blocks per second of manager time; 0 if no time passed."""
        return self.blocks / self.manager_seconds if self.times.total else 0.0
